"""``convert_file`` on single nodes: where weights come from, opsets, dtypes, what checkers and simplifiers say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_rnn
import pytest
from ml_dtypes import bfloat16
from onnx import TensorProto, helper
from onnx_rnn import convert, flash_nodes

from flashrnn_deploy.op import register_schemas

TOLERANCE = 2e-5
BASE = {"LSTM": {}, "GRU": {"linear_before_reset": 1}, "RNN": {}}


@pytest.mark.parametrize("op", BASE)
@pytest.mark.parametrize("weights", ["initializer", "constant", "input"])
def test_weights_from_initializers_constants_and_inputs(op: str, weights: str, tmp_path: Path) -> None:
    attributes = BASE[op] | {"hidden_size": 5, "direction": "bidirectional"}
    feeds = onnx_rnn.random_feeds(op, attributes, T=5, B=3, width=4, HD=5)
    model, report = convert(onnx_rnn.node_model(op, attributes, feeds, weights), tmp_path)
    assert report["rewritten"] == 1
    assert sum(node.op_type == "MatMul" for node in model.graph.node) == 1
    assert onnx_rnn.max_error(onnx_rnn.run_file(model, feeds), onnx_rnn.run(op, attributes, feeds)) < TOLERANCE
    if weights == "input":  # other weights, other results
        other = feeds | {"W": feeds["W"] * 2}
        assert onnx_rnn.max_error(onnx_rnn.run_file(model, other), onnx_rnn.run(op, attributes, other)) < TOLERANCE
    else:
        stored = {t.name for t in model.graph.initializer}
        (node,) = flash_nodes(model)
        assert {node.input[1], node.input[2]} <= stored
        assert not {"W", "R", "B"} & stored


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24])
def test_every_opset_is_raised_or_kept(opset: int, tmp_path: Path) -> None:
    feeds = onnx_rnn.random_feeds("LSTM", {}, T=5, B=3, width=4, HD=5)
    source = onnx_rnn.node_model("LSTM", {"hidden_size": 5}, feeds, opset=opset)
    source.ir_version = max(3, helper.find_min_ir_version_for(list(source.opset_import)))
    if source.ir_version == 3:
        for tensor in source.graph.initializer:
            source.graph.input.append(helper.make_tensor_value_info(tensor.name, 1, tensor.dims))
    model, report = convert(source, tmp_path)
    assert report["rewritten"] == 1
    assert (report["source_opset"], report["opset"]) == (opset, max(17, opset))
    assert {e.domain: e.version for e in model.opset_import}[""] == max(17, opset)
    assert model.ir_version >= 8
    assert [i.name for i in model.graph.input] == ["X", "sequence_lens", "initial_h", "initial_c"]
    if opset < 17:
        assert any("gives the same results" in note for note in report["notes"])
    assert onnx_rnn.max_error(onnx_rnn.run_file(model, feeds), onnx_rnn.run("LSTM", {}, feeds)) < TOLERANCE


def test_the_asked_opset_is_written(tmp_path: Path) -> None:
    feeds = onnx_rnn.random_feeds("RNN", {}, T=5, B=3, width=4, HD=5)
    model, report = convert(onnx_rnn.node_model("RNN", {"hidden_size": 5}, feeds), tmp_path, opset=20)
    assert report["opset"] == 20
    assert all({e.domain: e.version for e in f.opset_import}[""] == 20 for f in model.functions)
    assert onnx_rnn.max_error(onnx_rnn.run_file(model, feeds), onnx_rnn.run("RNN", {}, feeds)) < TOLERANCE


def test_replaceable_initializers_stay_replaceable(tmp_path: Path) -> None:
    """From IR 4 on, an initializer listed as an input is a default that a caller may override."""
    feeds = onnx_rnn.random_feeds("GRU", {}, T=5, B=3, width=4, HD=5)
    attributes = {"hidden_size": 5, "linear_before_reset": 1}
    source = onnx_rnn.node_model("GRU", attributes, feeds)
    source.graph.input.append(helper.make_tensor_value_info("W", 1, feeds["W"].shape))
    model, report = convert(source, tmp_path)
    assert report["rewritten"] == 1
    session = onnx_rnn.session(model)
    given = {k: v for k, v in feeds.items() if k in ("X", "sequence_lens", "initial_h")}
    for w in (feeds["W"], feeds["W"] * 2):
        expected = onnx_rnn.run("GRU", attributes, feeds | {"W": w})
        assert onnx_rnn.max_error(session.run(None, given | {"W": w}), expected) < TOLERANCE
    assert onnx_rnn.max_error(session.run(None, given), onnx_rnn.run("GRU", attributes, feeds)) < TOLERANCE


@pytest.mark.parametrize("op", BASE)
@pytest.mark.parametrize("layout", [0, 1])
def test_float16_models(op: str, layout: int, tmp_path: Path) -> None:
    attributes = BASE[op] | {"hidden_size": 5, "layout": layout}
    feeds = onnx_rnn.random_feeds(op, attributes, T=5, B=3, width=4, HD=5)
    half = {k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in feeds.items()}
    model, report = convert(onnx_rnn.node_model(op, attributes, half), tmp_path)
    assert report["rewritten"] == 1
    found = onnx_rnn.run_file(model, half)
    assert {a.dtype for a in found} == {np.dtype(np.float16)}
    assert onnx_rnn.max_error(found, onnx_rnn.run(op, attributes, half)) < 4e-3
    (node,) = flash_nodes(model)
    bias = next(t for t in model.graph.initializer if t.name == node.input[2])
    assert bias.data_type == TensorProto.FLOAT


def test_bfloat16_models(tmp_path: Path) -> None:
    """No CPU kernel multiplies bfloat16, so ONNX's evaluator runs the converted file."""
    attributes = {"hidden_size": 5, "direction": "bidirectional"}
    feeds = onnx_rnn.random_feeds("LSTM", attributes, T=4, B=3, width=4, HD=5)
    rounded = {k: v.astype(bfloat16) if v.dtype == np.float32 else v for k, v in feeds.items()}
    model, report = convert(onnx_rnn.node_model("LSTM", attributes, rounded), tmp_path)
    assert report["rewritten"] == 1
    types = {t.name: t.data_type for t in model.graph.initializer}
    (node,) = flash_nodes(model)
    assert [types[node.input[k]] for k in (1, 2)] == [TensorProto.BFLOAT16, TensorProto.FLOAT]
    given = {i.name: rounded[i.name] for i in model.graph.input}
    found = onnx.reference.ReferenceEvaluator(model).run(None, given)
    assert onnx_rnn.max_error(found, onnx_rnn.run("LSTM", attributes, rounded)) < 5e-2


def test_float64_is_left_by_name(tmp_path: Path) -> None:
    feeds = onnx_rnn.random_feeds("RNN", {}, T=5, B=3, width=4, HD=5)
    double = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}
    _, report = convert(onnx_rnn.node_model("RNN", {"hidden_size": 5}, double), tmp_path)
    assert "double" in report["nodes"][0]["reason"]


def test_int64_lengths_get_a_cast(tmp_path: Path) -> None:
    """D15: ONNX wants int32 lengths; a file whose lengths input is int64 runs after conversion."""
    feeds = onnx_rnn.random_feeds("LSTM", {}, T=5, B=3, width=4, HD=5)
    feeds["sequence_lens"] = feeds["sequence_lens"].astype(np.int64)
    model, report = convert(onnx_rnn.node_model("LSTM", {"hidden_size": 5}, feeds), tmp_path)
    assert report["rewritten"] == 1
    (node,) = flash_nodes(model)
    (cast,) = [n for n in model.graph.node if n.output[0] == node.input[3]]
    assert (cast.op_type, cast.attribute[0].i) == ("Cast", TensorProto.INT32)
    assert onnx_rnn.max_error(onnx_rnn.run_file(model, feeds), onnx_rnn.run("LSTM", {}, feeds)) < TOLERANCE


@pytest.mark.parametrize("op", BASE)
def test_checker_and_shapes_behind_the_node(op: str, tmp_path: Path) -> None:
    """D16: own domain imported, full check passes, shapes known behind the node."""
    attributes = BASE[op] | {"hidden_size": 5}
    feeds = onnx_rnn.random_feeds(op, attributes, T=5, B=3, width=4, HD=5)
    feeds["B"] = None  # bias and c0 absent, h0 given
    feeds.pop("initial_c", None)
    model, _ = convert(onnx_rnn.node_model(op, attributes, feeds), tmp_path)
    register_schemas()
    onnx.checker.check_model(model, full_check=True)
    assert {e.domain for e in model.opset_import} == {"", "flashrnn"}
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.output}
    assert shapes["Y"] == ["time", 1, "batch", 5]
    assert shapes["Y_h"] == [1, "batch", 5]
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in model.graph.value_info}
    (node,) = flash_nodes(model)
    assert [ranks[name] for name in node.output] == [3, 4]  # y [T, B, N H D], final states [S, N, B, H D]
    assert onnx_rnn.max_error(onnx_rnn.run_file(model, feeds), onnx_rnn.run(op, attributes, feeds)) < TOLERANCE


@pytest.mark.parametrize("tool", ["onnxslim", "onnxsim"])
def test_simplifiers_keep_the_node(tool: str, tmp_path: Path) -> None:
    """D16: a round trip through a simplifier keeps node and result."""
    module = pytest.importorskip(tool, reason=f"{tool} is not installed")
    feeds = onnx_rnn.random_feeds("LSTM", {}, T=5, B=3, width=4, HD=5)
    model, _ = convert(onnx_rnn.node_model("LSTM", {"hidden_size": 5}, feeds), tmp_path)
    slim = module.slim(model) if tool == "onnxslim" else module.simplify(model)[0]
    assert len(flash_nodes(slim)) == 1
    assert onnx_rnn.max_error(onnx_rnn.run_file(slim, feeds), onnx_rnn.run("LSTM", {}, feeds)) < TOLERANCE
