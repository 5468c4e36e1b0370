"""The contract as code: specs, nodes, schemas, shape inference, bodies at every opset."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import onnx
import pytest
from onnx import helper

from flashrnn_deploy import functions, op, reference
from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.graph import shape_of
from flashrnn_deploy.op import RNNSpec


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cell": "rnn"}, "unknown cell; the cells are lstm, gru, elman, slstm"),
        ({"num_heads": 0}, "num_heads must be at least 1, not 0"),
        ({"head_dim": 0}, "head_dim must be at least 1"),
        ({"num_directions": 3}, "1 or 2 directions, not 3"),
        ({"dtype": "float64"}, "dtype float64 is not one of float32, float16, bfloat16"),
        ({"layout": 2}, "layout must be 0 or 1, not 2"),
        ({"num_directions": 2, "reverse": 1}, "reverse must be 0 with two directions"),
        ({"head_dim": 64.5}, "head_dim must be a whole number, not 64.5"),
        ({"clip": -1.0}, "clip must be finite and not negative, not -1.0"),
        ({"clip": float("nan")}, "clip must be finite"),
        ({"cell": "slstm", "clip": 1.0}, "the sLSTM has no clip"),
        ({"relu": 1}, "relu belongs to the elman cell"),
        ({"normalizer_floor": 1.0}, "normalizer_floor belongs to the slstm cell"),
        ({"cell": "slstm", "normalizer_floor": float("inf")}, "normalizer_floor must be finite"),
    ],
)
def test_spec_refuses(change: dict[str, Any], words: str) -> None:
    with pytest.raises(FlashRNNError, match=words):
        RNNSpec(**{"cell": "lstm", "num_heads": 2, "head_dim": 3, **change})


def test_whole_numbers_become_attributes_of_the_right_type() -> None:
    node = op.make_node(RNNSpec("gru", 2, 3, layout=True, clip=1), op.INPUTS, op.OUTPUTS)
    types = {a.name: a.type for a in node.attribute}
    assert (types["clip"], types["layout"]) == (onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT)


@pytest.mark.parametrize("cell", CELLS)
def test_node_round_trip(cell: str) -> None:
    spec = RNNSpec(cell, 2, 3, 1, "float16", 1, 1, 0.0 if cell == "slstm" else 0.5, int(cell == "elman"))
    node = op.make_node(spec, op.INPUTS, op.OUTPUTS, "n")
    assert {a.name for a in node.attribute} == set(op.attribute_names(node.op_type)) | {
        "plugin_version",
        "plugin_namespace",
    }
    assert op.RNNSpec.from_node(node, spec.shapes(1, 1)["r"], "float16") == spec
    with pytest.raises(ValueError, match="none may be left out"):
        op.make_node(spec, [*op.INPUTS[:-1], ""], op.OUTPUTS)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda n: n.attribute.pop(), "lacks the attribute"),
        (lambda n: n.attribute.append(helper.make_attribute("peephole", 1)), "unknown attribute.* peephole"),
        (lambda n: setattr(n, "domain", "other"), "is not a FlashRNN op"),
    ],
)
def test_from_node_refuses(break_it: Any, words: str) -> None:
    spec = RNNSpec("gru", 2, 3)
    node = op.make_node(spec, op.INPUTS, op.OUTPUTS, "n")
    break_it(node)
    with pytest.raises(FlashRNNError, match=words):
        RNNSpec.from_node(node, spec.shapes(1, 1)["r"])


@pytest.mark.parametrize("shape", [(1, 4, 2, 3, 3), (1, 3, 2, 3, 4), (3, 2, 3, 3)])
def test_from_node_refuses_a_weight_that_does_not_fit(shape: tuple[int, ...]) -> None:
    node = op.make_node(RNNSpec("gru", 2, 3), op.INPUTS, op.OUTPUTS, "n")
    with pytest.raises(FlashRNNError, match=r"r must be \[N, 3, H, D, D\]"):
        RNNSpec.from_node(node, shape)


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("cell", CELLS)
def test_shape_inference(cell: str, layout: int) -> None:
    op.register_schemas()
    spec = RNNSpec(cell, 2, 3, 2, layout=layout)
    model = cases.model(spec)
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = {v.name: shape_of(v) for v in onnx.shape_inference.infer_shapes(model).graph.output}
    lead = ["batch", "time"] if layout else ["time", "batch"]
    assert inferred == {"y": [*lead, 12], "final_states": [spec.definition.num_states, 2, "batch", 6]}


def test_checker_demands_every_attribute() -> None:
    op.register_schemas()
    model = cases.model(RNNSpec("lstm", 2, 3))
    onnx.checker.check_model(model, full_check=True)
    del model.graph.node[0].attribute[0]
    with pytest.raises(onnx.checker.ValidationError, match="layout"):
        onnx.checker.check_model(model, full_check=True)


def test_macs_count_the_recurrent_product() -> None:
    assert RNNSpec("lstm", 3, 5, 2).macs_per_step == 2 * 4 * 3 * 25


VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_directions": 2},
    {"reverse": 1},
    {"layout": 1, "num_directions": 2},
    {"num_heads": 1, "head_dim": 1},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_body_computes_the_op(cell: str, variant: dict[str, Any]) -> None:
    spec = RNNSpec(cell, **{"num_heads": 3, "head_dim": 5, **variant})
    runner = make_runner("onnxruntime", cases.model(spec))
    for T, B, lens in ((7, 4, [7, 0, 3, 9]), (1, 1, [2**31 - 1]), (5, 3, [-4]), (3, 0, None), (257, 2, None)):
        check_body(spec, runner, cases.tensors(spec, T, B, lens))


@pytest.mark.parametrize(
    "spec",
    [RNNSpec(cell, 3, 5, clip=0.4) for cell in ("lstm", "gru", "elman")]
    + [RNNSpec("elman", 3, 5, relu=1), RNNSpec("slstm", 3, 5, normalizer_floor=1.0)],
    ids=str,
)
def test_body_reads_its_attributes(spec: RNNSpec) -> None:
    check_body(spec, make_runner("onnxruntime", cases.model(spec)), cases.tensors(spec, 9, 3, [9, 4, 6]))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cell", CELLS)
def test_body_passes_on_what_is_not_finite(cell: str, special: float) -> None:
    spec = RNNSpec(cell, 2, 3)
    tensors = cases.tensors(spec, 6, 3, [6, 2, 5])
    tensors["wx"][2, 1, 3] = tensors["wx"][1, 0, 4] = special
    check_body(spec, make_runner("onnxruntime", cases.model(spec)), tensors)


def check_body(spec: RNNSpec, runner: Any, tensors: dict[str, np.ndarray]) -> None:
    with np.errstate(invalid="ignore"):
        expected = dict(zip(op.OUTPUTS, reference.run(spec, *tensors.values()), strict=True))
    actual = runner.infer(tensors)
    # the body keeps h in float32: only y is rounded to the dtype, by half a unit in its last place
    eps = {"float32": 4e-7, "float16": 2.0**-11, "bfloat16": 2.0**-8}[spec.dtype]
    for name, exact in expected.items():
        scale = max(1.0, np.nanmax(np.abs(np.where(np.isinf(exact), 0, exact)), initial=0))
        tolerance = (4e-6 + (eps if name == "y" else 0)) * scale
        np.testing.assert_allclose(actual[name].astype(np.float64), exact, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("opset", range(15, 24))
def test_body_at_every_opset(opset: int) -> None:
    for cell in CELLS:
        spec = RNNSpec(cell, 2, 3)
        model = cases.model(spec, opset)
        model.ir_version = max(8, helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True))
        onnx.checker.check_model(model, full_check=True)
        check_body(spec, make_runner("onnxruntime", model), cases.tensors(spec, 5, 2, [3, 5]))


def test_body_below_opset_15_is_refused() -> None:
    with pytest.raises(ValueError, match="opset 15"):
        functions.function(CELLS["lstm"], 14)


def test_add_functions_replaces_old_bodies_and_keeps_foreign_ones() -> None:
    model = cases.model(RNNSpec("gru", 2, 3))
    model.functions[0].ClearField("node")
    foreign = helper.make_function(
        "other", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    model.functions.append(foreign)
    functions.add_functions(model)
    assert [(f.domain, f.name) for f in model.functions] == [("other", "Twice"), ("flashrnn", "FlashGRU")]
    assert model.functions[1].node
