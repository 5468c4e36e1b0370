"""`verify`: right models pass, each kind of wrong one fails, and nodes that no judge can do are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from models import network
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from flashrnn_deploy import sampling, upcast
from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.backends.reference import ReferenceRunner, product_in_order
from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.cli import main
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import DTYPES, RNNSpec
from flashrnn_deploy.shapes import axes_of, tensors_of
from flashrnn_deploy.verify import check_structure, verify

F32 = TensorProto.FLOAT
GRU = RNNSpec("gru", 2, 8)


def changed(model: onnx.ModelProto, name: str, change: Any) -> onnx.ModelProto:
    """The model with ``change`` applied to one weight."""
    for weight in model.graph.initializer:
        if weight.name == name:
            weight.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(weight)), name))
    return model


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_models_pass(tmp_path: Path, cell: str, dtype: str) -> None:
    path = models.save(network(RNNSpec(cell, 2, 8, dtype=dtype), lens=True), tmp_path / "m.onnx")
    report = verify(path)
    assert not report.failures
    assert [c.name for c, _ in report.outputs] == ["out", "state1"]
    assert report.cases == [(1, 1), (2, 11), (7, 3)]
    for comparison, _ in report.outputs:
        assert 0 < comparison.max_abs_error < {"float32": 1e-5, "float16": 1e-2, "bfloat16": 0.2}[dtype]


@pytest.mark.parametrize("layout", [0, 1])
def test_wide_layers_pass(tmp_path: Path, layout: int) -> None:
    for seed in range(3):
        model = network(RNNSpec("elman", 2, 128, layout=layout), seed=seed)
        assert not verify(models.save(model, tmp_path / "m.onnx"), seed=seed).failures


def test_a_wrong_body_fails(tmp_path: Path) -> None:
    model = network(GRU)
    body = model.functions[0].node
    next(n for n in body if n.output[0] == "bias_q").input[0] = "bias_row_shape"  # nonsense ORT cannot run
    with pytest.raises(FlashRNNError, match="ONNX Runtime"):
        verify(models.save(model, tmp_path / "m.onnx"))
    model = network(GRU)
    scan = next(n for n in model.functions[0].node if n.op_type == "Scan")
    step = next(a.g for a in scan.attribute if a.name == "body")
    next(n for n in step.node if n.op_type == "Tanh").op_type = "Sigmoid"
    result = CliRunner().invoke(main, ["verify", str(models.save(model, tmp_path / "m.onnx"))])
    assert result.exit_code == 1
    assert "NO" in result.stdout
    assert "error: 2 of 2 outputs differ from onnx.reference in float64: out (error" in result.stderr


def test_json(tmp_path: Path) -> None:
    path = models.save(network(GRU), tmp_path / "m.onnx")
    result = CliRunner().invoke(main, ["verify", str(path), "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["passed"] is True
    assert report["cases"][1] == {"T": 2, "B": 11}
    entry = report["outputs"][0]
    assert entry["name"] == "out"
    assert entry["max_abs_error"] <= entry["tolerance"]
    assert entry["judge"] == "onnx.reference in float64"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nothing_finite_never_passes(tmp_path: Path, value: float) -> None:
    model = changed(network(GRU), "w_in", lambda w: w * value)
    result = CliRunner().invoke(main, ["verify", str(models.save(model, tmp_path / "m.onnx")), "--json"])
    assert result.exit_code == 1
    entry = json.loads(result.stdout)["outputs"][0]
    assert entry["max_abs_error"] is None
    assert entry["note"]


def test_half_precision_overflow_fails(tmp_path: Path) -> None:
    model = changed(network(RNNSpec("gru", 1, 4, dtype="float16")), "w_out", lambda w: np.full_like(w, 60000))
    assert "infinities at different places" in [
        c.note for c in verify(models.save(model, tmp_path / "m.onnx")).failures
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.graph.node[1].attribute.append(helper.make_attribute("peephole", 1)), "peephole"),
        (lambda m: m.graph.node[1].attribute.remove(m.graph.node[1].attribute[0]), "layout"),
        (lambda m: setattr(m.graph.node[1].attribute[0], "i", 3), "layout must be 0 or 1, not 3"),
        (lambda m: m.graph.node[1].input.remove("lens32"), "FlashGRU"),
        (lambda m: m.graph.node.pop(0), "wx"),
        (lambda m: changed(m, "w_out", lambda w: w[:-1]), "the ONNX checker refuses the model"),
        (lambda m: changed(m, "r", lambda r: r[:, :, 0]), "r must have rank 5, not 4"),
        (lambda m: models.set_metadata(m, "flashrnn.states", {"state0": "gone"}), "state pair state0=gone"),
        (lambda m: models.set_metadata(m, "flashrnn.states", {"state0": ["state1"]}), "must give one output name"),
        (lambda m: models.set_metadata(m, "flashrnn.axes", {"x": {"time": 5}}), "'flashrnn.axes' gives 'x'"),
        (lambda m: models.set_metadata(m, "flashrnn.axes", {"x": 1}), "'flashrnn.axes' gives 'x'"),
    ],
)
def test_structure(tmp_path: Path, change: Any, message: str) -> None:
    model = network(GRU)
    change(model)
    with pytest.raises(FlashRNNError, match=message):
        check_structure(model)
    result = CliRunner().invoke(main, ["verify", str(models.save(model, tmp_path / "m.onnx"))])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


def test_another_file(tmp_path: Path) -> None:
    path = models.save(network(GRU), tmp_path / "m.onnx")
    twin = models.save(network(GRU), tmp_path / "twin.onnx")
    report = verify(path, str(twin))
    assert not report.failures
    assert {c.judge for c, _ in report.outputs} == {"twin.onnx"}
    other = models.save(changed(network(GRU), "b", lambda b: b + 0.01), tmp_path / "other.onnx")
    assert [c.name for c in verify(path, str(other)).failures] == ["out", "state1"]


def test_another_file_with_default_states(tmp_path: Path) -> None:
    """A converted file has states where the original has zeros: both start from zero then."""
    path = models.save(network(GRU), tmp_path / "m.onnx")
    default = network(GRU, states=False)
    for value in (*default.graph.input, *default.graph.output):
        value.type.tensor_type.shape.dim[1].dim_value = 2
    other = models.save(default, tmp_path / "default.onnx")
    model = network(GRU)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[2 if "state" in value.name else 1].dim_value = 2
    report = verify(models.save(model, path), str(other))
    assert not report.failures
    assert report.not_compared == ["state1"]
    assert len(report.cases) == 3
    result = CliRunner().invoke(main, ["verify", str(path), "--against", str(other)])
    assert "not compared, since the judge has no such output: state1" in result.stderr


@pytest.mark.parametrize("metadata", [True, False])
def test_the_sizes_that_ran_are_told(metadata: bool, tmp_path: Path) -> None:
    """Of fixed sizes, which no axis of the metadata names, those of the file; of what is missing, nothing."""
    model = network(GRU, states=False)
    for value in (*model.graph.input, *model.graph.output):
        for axis, size in enumerate((9, 2)):
            value.type.tensor_type.shape.dim[axis].dim_value = size
    if metadata:
        fixed = {"time": None, "batch": None}
        models.set_metadata(model, "flashrnn.axes", {v.name: fixed for v in (*model.graph.input, *model.graph.output)})
    path = models.save(model, tmp_path / "m.onnx")
    report = verify(path)
    assert report.cases == [case for _, case in report.outputs] == [(9, 2)]
    assert report.to_json()["cases"] == [{"T": 9, "B": 2}]
    assert "T=9 B=2" in CliRunner().invoke(main, ["verify", str(path)]).stdout


def test_files_that_cannot_be_compared(tmp_path: Path) -> None:
    path = models.save(network(GRU), tmp_path / "m.onnx")
    renamed = models.save(network(GRU, x="audio"), tmp_path / "renamed.onnx")
    with pytest.raises(FlashRNNError, match=r"differ in the input.*audio"):
        verify(path, str(renamed))
    outputs = models.save(network(GRU, out="other", state1="state2"), tmp_path / "outputs.onnx")
    with pytest.raises(FlashRNNError, match="no output in common"):
        verify(path, str(outputs))
    with pytest.raises(FlashRNNError, match=r"cannot read the model .*gone.onnx"):
        verify(path, str(tmp_path / "gone.onnx"))


@pytest.mark.parametrize("offset", [0.0, 1e-5])
def test_a_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: float) -> None:
    """A module that differs from the file in every dtype must not pass for its own error."""
    exporters = pytest.importorskip("flashrnn_deploy.exporters")
    asked = []

    def factory_judge(source: str, model: onnx.ModelProto, dtype: str, weights: Path | None) -> Any:
        asked.append((source, dtype, weights))

        def judge(precision: type) -> Any:
            runner = ReferenceRunner(model, precision, declared_dtypes=False)
            return lambda feeds: {n: a + np.asarray(offset, a.dtype) for n, a in runner.infer(feeds).items()}

        return judge(np.float64), judge(np.float32)

    monkeypatch.setattr(exporters, "factory_judge", factory_judge, raising=False)
    report = verify(models.save(network(GRU), tmp_path / "m.onnx"), "model.py:build", weights=Path("w.pt"))
    assert asked == [("model.py:build", "float32", Path("w.pt"))]
    assert {c.judge for c, _ in report.outputs} == {"PyTorch in float64"}
    assert [c.passed for c, _ in report.outputs] == [not offset] * 2


def test_nodes_that_the_judge_cannot_do(tmp_path: Path) -> None:
    model = network(GRU)
    model.graph.node[0].output[0] = "wx0"
    model.graph.node.insert(1, helper.make_node("FusedThing", ["wx0"], ["wx"], name="odd", domain="com.example"))
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises(FlashRNNError, match=r"onnx.reference cannot do the FusedThing node 'odd'"):
        ReferenceRunner(model)


def test_inputs_the_judge_fails_on() -> None:
    runner = ReferenceRunner(network(GRU))
    with pytest.raises(FlashRNNError, match=r"onnx.reference cannot do the MatMul node 'project'"):
        runner.infer({"x": np.zeros((2, 1, 4), np.float32), "state0": np.zeros((1, 1, 1, 16), np.float32)})


def lstm(inputs: list[str], **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node("LSTM", inputs, ["y"], name="cell", hidden_size=2, **attributes)
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", F32, ["T", "B", 3])],
        [helper.make_tensor_value_info("y", F32, ["T", 1, "B", 2])],
        [
            numpy_helper.from_array(rng.standard_normal((1, 8, 3)).astype(np.float32), "w"),
            numpy_helper.from_array(rng.standard_normal((1, 8, 2)).astype(np.float32), "r"),
            numpy_helper.from_array(np.array([1], np.int32), "lens"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("inputs", "attributes", "ignored"),
    [
        (["x", "w", "r"], {}, None),
        (["x", "w", "r"], {"activations": ["Sigmoid", "Tanh", "Tanh"]}, None),
        (["x", "w", "r"], {"activations": ["Sigmoid", "Tanh", "Relu"]}, "activations"),
        (["x", "w", "r"], {"clip": 0.5}, "clip"),
        (["x", "w", "r"], {"input_forget": 1}, "input_forget"),
        (["x", "w", "r", "", "lens"], {}, "sequence_lens"),
    ],
)
def test_what_the_judge_ignores_is_named(
    tmp_path: Path, inputs: list[str], attributes: dict[str, Any], ignored: str | None
) -> None:
    path = models.save(lstm(inputs, **attributes), tmp_path / "m.onnx")
    if ignored is None:
        assert not verify(path).failures
    else:
        with pytest.raises(FlashRNNError, match=f"no judge of the LSTM node 'cell': it ignores {ignored}"):
            verify(path)


def test_the_judge_computes_in_float64() -> None:
    """Half the weights in float16, a Cast, a Constant of each kind: everything upcast, values kept."""
    graph = helper.make_graph(
        [
            helper.make_node("Constant", [], ["a"], value_float=0.1),
            helper.make_node("Constant", [], ["b"], value_floats=[0.1, 0.2]),
            helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array([0.1], np.float32))),
            helper.make_node("Cast", ["half"], ["d"], to=F32),
            helper.make_node("Sum", ["x", "a", "b", "c", "d"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", F32, [2])],
        [helper.make_tensor_value_info("y", F32, [2])],
        [numpy_helper.from_array(np.array([0.1], np.float16), "half")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.array([1e-9, 0], np.float32)
    exact = ReferenceRunner(model, declared_dtypes=False).infer({"x": x})["y"]
    f32, f16 = np.float32, np.float16
    expected = [sum(map(float, (x[i], f32(0.1), f32(b), f32(0.1), f16(0.1)))) for i, b in enumerate((0.1, 0.2))]
    assert exact.dtype == np.float64
    np.testing.assert_allclose(exact, expected, rtol=1e-15)
    copy = upcast.to_float64(model)
    assert {v.type.tensor_type.elem_type for v in (*copy.graph.input, *copy.graph.output)} == {TensorProto.DOUBLE}
    assert ReferenceEvaluator(copy).run(None, {"x": x.astype(np.float64)})[0].dtype == np.float64


def test_functions_of_the_file_are_upcast_too() -> None:
    body = [helper.make_node("Cast", ["a"], ["h"], to=TensorProto.FLOAT16), helper.make_node("Neg", ["h"], ["b"])]
    function = helper.make_function("local", "F", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    graph = helper.make_graph(
        [helper.make_node("F", ["x"], ["y"], domain="local")],
        "g",
        [helper.make_tensor_value_info("x", F32, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [1])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=[function])
    x = np.array([1.0001], np.float32)
    assert ReferenceRunner(model, declared_dtypes=False).infer({"x": x})["y"][0] == -float(x[0])


def test_products_in_order() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 1, 3, 5)), rng.standard_normal((4, 5, 2))
    np.testing.assert_allclose(product_in_order(a, b), a @ b, atol=1e-12)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["a", "b", "c"], ["y"], transA=1, transB=1, alpha=0.5, beta=2.0)],
        "g",
        [helper.make_tensor_value_info(n, F32, None) for n in "abc"],
        [helper.make_tensor_value_info("y", F32, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("a", (5, 3)), ("b", (2, 5)), ("c", (2,)))}
    blas, in_order = (ReferenceRunner(model, np.float32, in_order=order).infer(feeds)["y"] for order in (False, True))
    np.testing.assert_allclose(in_order, blas, atol=1e-6)
    np.testing.assert_allclose(blas, 0.5 * feeds["a"].T @ feeds["b"].T + 2 * feeds["c"], atol=1e-6)


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((2, 4, 9), (6, 4, 3), {}),
        ((2, 4, 9), (6, 2, 3), {"group": 2, "pads": [2, 1], "strides": [2], "dilations": [2]}),
        ((1, 3, 6, 5), (2, 3, 3, 2), {"pads": [1, 0, 0, 1], "strides": [2, 1], "dilations": [1, 2]}),
        ((1, 2, 6), (2, 2, 3), {"auto_pad": "SAME_UPPER"}),
    ],
)
def test_convolutions_in_order(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info(n, F32, None) for n in "xwb"],
        [helper.make_tensor_value_info("y", F32, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", x), ("w", w), ("b", w[:1]))}
    in_order = ReferenceRunner(model, np.float32, in_order=True).infer(feeds)["y"]
    np.testing.assert_allclose(in_order, make_runner("onnxruntime", model).infer(feeds)["y"], atol=1e-5)


def drawn(model: onnx.ModelProto) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    tensors = tensors_of(model)
    return dict(sampling.samples(model, tensors, axes_of(model, tensors)))


def test_samples_are_legal() -> None:
    samples = drawn(network(RNNSpec("slstm", 1, 4), lens=True))
    assert set(samples) == {(1, 1), (2, 11), (7, 3)}
    for (T, B), feeds in samples.items():
        assert feeds["x"].shape == (T, B, models.IN)
        assert feeds["lens"].dtype == np.int64
        assert feeds["lens"].max() == T
        assert feeds["lens"].min() >= 1
        assert feeds["state0"][2].min() >= 1
        assert B < 3 or feeds["state0"][[0, 1, 3]].min() < 0
    again = drawn(network(RNNSpec("slstm", 1, 4), lens=True))
    np.testing.assert_array_equal(again[7, 3]["x"], samples[7, 3]["x"])
    assert len({lens for lens in samples[2, 11]["lens"].tolist()}) == 2


def test_a_normalizer_in_a_state_of_its_own() -> None:
    model = network(RNNSpec("slstm", 1, 4))
    graph = model.graph
    del graph.input[1:], graph.metadata_props[:]
    graph.input.extend(helper.make_tensor_value_info(n, F32, [1, "batch", 4]) for n in "hcnm")
    graph.node.insert(0, helper.make_node("Concat", [f"{n}4" for n in "hcnm"], ["state0"], axis=0))
    graph.initializer.append(numpy_helper.from_array(np.array([0]), "front"))
    for n in "hcnm":
        graph.node.insert(0, helper.make_node("Unsqueeze", [n, "front"], [f"{n}4"]))
    assert sampling.normalizer_inputs(model) == {"n": None}
    del model.metadata_props[:]
    feeds = drawn(model)[2, 11]
    assert feeds["n"].min() >= 1
    assert feeds["h"].min() < 0
    graph.node[4].op_type = "Sum"  # no longer known which is which: all of them
    graph.node[4].attribute.pop()
    graph.node.insert(5, helper.make_node("Reshape", ["state0", "front"], ["state"]))
    assert sampling.normalizer_inputs(model) == {}


def test_indices_lie_in_their_range() -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["ids"], ["ids64"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "ids64"], ["rows"]),
            helper.make_node("Where", ["flag", "rows", "rows"], ["y"]),
        ],
        "g",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT32, ["time", "batch"]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, [1]),
            helper.make_tensor_value_info("code", TensorProto.INT64, ["odd"]),
        ],
        [helper.make_tensor_value_info("y", F32, ["time", "batch", 2])],
        [numpy_helper.from_array(np.zeros((50, 2), np.float32), "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert sampling.index_ranges(model, tensors_of(model)) == {"ids": 50}
    ids = np.concatenate([feeds["ids"].ravel() for feeds in drawn(model).values()])
    assert ids.min() >= 0
    assert 2 < ids.max() < 50
    assert drawn(model)[2, 11]["code"].max() <= 1
    assert drawn(model)[2, 11]["flag"].dtype == bool


def test_inputs_that_cannot_be_made_up() -> None:
    model = network(GRU)
    model.graph.input.append(helper.make_tensor_value_info("odd", F32, None))
    with pytest.raises(FlashRNNError, match=r"cannot make up the input odd float32\[\?\]"):
        drawn(model)
