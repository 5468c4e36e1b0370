"""Default states become inputs and outputs; chunks fed with them equal the whole; axes are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_rnn
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_rnn import convert

from flashrnn_deploy.exporters.states import AXES_KEY, STATES_KEY, expose_states, kept_states, read_metadata, write_axes
from flashrnn_deploy.op import is_flashrnn

T, B, WIDTH, HD = 12, 3, 4, 5
INT64 = TensorProto.INT64
ATTRIBUTES = {"LSTM": {"hidden_size": HD}, "GRU": {"hidden_size": HD, "linear_before_reset": 1}, "RNN": {}}
ATTRIBUTES["RNN"] = {"hidden_size": HD}


def default_model(op: str, layout: int = 0) -> tuple[onnx.ModelProto, dict[str, Any]]:
    attributes = ATTRIBUTES[op] | {"layout": layout}
    feeds = onnx_rnn.random_feeds(op, attributes, T, B, WIDTH, HD)
    for name in ("sequence_lens", "initial_h", "initial_c"):
        feeds[name] = None
    return onnx_rnn.node_model(op, attributes, feeds), feeds


def shape_of(value: onnx.ValueInfoProto) -> list[Any]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def in_chunks(model: onnx.ModelProto, x: np.ndarray, size: int, states: dict[str, str], axis: int = 0) -> np.ndarray:
    """Feed ``x`` in chunks along ``axis``, each state output going back in; the first output of all chunks."""
    session = onnx_rnn.session(model)
    names = [o.name for o in session.get_outputs()]
    known = {i.name: i.shape for i in session.get_inputs()}
    carried = {i: np.zeros([d if isinstance(d, int) else B for d in known[i]], np.float32) for i in states}
    pieces = []
    for start in range(0, x.shape[axis], size):
        piece = np.take(x, range(start, min(start + size, x.shape[axis])), axis)
        found = dict(zip(names, session.run(None, {session.get_inputs()[0].name: piece} | carried), strict=True))
        carried = {i: found[o] for i, o in states.items()}
        pieces.append(found[names[0]])
    return np.concatenate(pieces, axis)


@pytest.mark.parametrize("op", ATTRIBUTES)
@pytest.mark.parametrize("layout", [0, 1])
def test_chunks_equal_the_whole(op: str, layout: int, tmp_path: Path) -> None:
    """D4, small: T steps in one call, in single steps, and in chunks of 5."""
    source, feeds = default_model(op, layout)
    model, report = convert(source, tmp_path, expose_states=True)
    assert report["states"] == read_metadata(model, STATES_KEY) == {"rnn.states": "rnn.final_states"}
    assert report["states_kept"] == {}
    expected = onnx_rnn.run(op, ATTRIBUTES[op] | {"layout": layout}, feeds)[0]
    for size in (T, 1, 5):
        found = in_chunks(model, feeds["X"], size, report["states"], layout)
        assert onnx_rnn.max_error([found], [expected]) < 2e-5
    stateless = convert(source, tmp_path)[0]
    assert [i.name for i in stateless.graph.input] == ["X"]
    reset = in_chunks(stateless, feeds["X"], 5, {}, layout)  # without states every chunk starts again
    assert onnx_rnn.max_error([reset], [expected]) > 1e-2


@pytest.mark.parametrize("op", ATTRIBUTES)
def test_shapes_and_leftovers(op: str, tmp_path: Path) -> None:
    source, _ = default_model(op)
    model, _ = convert(source, tmp_path, expose_states=True)
    states = 2 if op == "LSTM" else 1
    values = {v.name: v for v in (*model.graph.input, *model.graph.output)}
    for name in ("rnn.states", "rnn.final_states"):
        assert shape_of(values[name]) == [states, 1, "batch", HD]
        assert values[name].type.tensor_type.elem_type == TensorProto.FLOAT
    assert "ConstantOfShape" not in {n.op_type for n in model.graph.node}
    onnx.checker.check_model(model, full_check=True)


def test_axes_of_both_layouts(tmp_path: Path) -> None:
    for layout in (0, 1):
        model, _ = convert(default_model("GRU", layout)[0], tmp_path, expose_states=True)
        axes = json.loads({p.key: p.value for p in model.metadata_props}[AXES_KEY])
        assert axes["X"] == {"time": layout, "batch": 1 - layout}
        assert axes["Y"] == {"time": layout, "batch": 0 if layout else 2}
        assert axes["rnn.states"] == axes["rnn.final_states"] == {"time": None, "batch": 2}
        assert axes["Y_h"] == {"time": None, "batch": 0 if layout else 1}


def test_axes_behind_a_computed_reshape(tmp_path: Path) -> None:
    """Symbols get lost where a Reshape's target is computed; the axes are still found."""
    source, _ = default_model("RNN")
    nodes = [
        helper.make_node("Shape", ["Y"], ["shape"]),
        helper.make_node("Gather", ["shape", "lead"], ["leading"]),
        helper.make_node("Concat", ["leading", "width"], ["target"], axis=0),
        helper.make_node("Reshape", ["Y", "target"], ["flat"]),
    ]
    source.graph.node.extend(nodes)
    constants = {"lead": [0, 2], "width": [HD]}
    source.graph.initializer.extend(numpy_helper.from_array(np.array(v), k) for k, v in constants.items())
    source.graph.output.append(helper.make_tensor_value_info("flat", TensorProto.FLOAT, ["a", "b", "c"]))
    model, _ = convert(source, tmp_path)
    assert read_metadata(model, AXES_KEY)["flat"] == {"time": 0, "batch": 1}


def with_states(producers: list[onnx.NodeProto], constants: dict[str, Any], inputs: dict[str, Any]) -> onnx.ModelProto:
    """A GRU whose initial_h "h" comes from ``producers``."""
    source, feeds = default_model("GRU")
    feeds["initial_h"] = np.zeros((1, B, HD), np.float32)
    source = onnx_rnn.node_model("GRU", ATTRIBUTES["GRU"], feeds)
    (state,) = [i for i in source.graph.input if i.name == "initial_h"]
    source.graph.input.remove(state)
    for k, node in enumerate(producers):
        source.graph.node.insert(k, node)
    source.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items())
    for name, dims in inputs.items():
        source.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
    return source


def node(op: str, inputs: list[str], output: str = "initial_h", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], **attributes)


BATCH = [node("Shape", ["X"], "shape"), node("Gather", ["shape", "one"], "b", axis=0)]
FULL = [*BATCH, node("Concat", ["one", "b", "size"], "full", axis=0)]
SIZES = {"one": [1], "size": [HD]}
ZEROS: dict[str, tuple[list[onnx.NodeProto], dict[str, Any]]] = {
    "initializer": ([], {"initial_h": np.zeros((1, B, HD), np.float32)}),
    "ConstantOfShape": ([*FULL, node("ConstantOfShape", ["full"])], SIZES),
    "Expand": ([*FULL, node("Expand", ["zero", "full"])], SIZES | {"zero": np.float32(0)}),
    "Slice of zeros": (
        [
            node("Concat", ["two", "b", "size"], "twice", axis=0),
            node("ConstantOfShape", ["twice"], "zeros"),
            node("Slice", ["zeros", "start", "end", "start"]),
        ],
        SIZES | {"two": [2], "start": [0], "end": [1]},
    ),
    "Concat and Unsqueeze": (
        [
            *BATCH,
            node("Concat", ["b", "size"], "flat", axis=0),
            node("ConstantOfShape", ["flat"], "zeros"),
            node("Unsqueeze", ["zeros", "first"]),
        ],
        SIZES | {"first": [0]},
    ),
}
ZEROS["Slice of zeros"] = ([*BATCH, *ZEROS["Slice of zeros"][0]], ZEROS["Slice of zeros"][1])


@pytest.mark.parametrize("kind", ZEROS)
def test_zeros_in_every_form_become_inputs(kind: str, tmp_path: Path) -> None:
    producers, constants = ZEROS[kind]
    model, report = convert(with_states(producers, constants, {}), tmp_path, expose_states=True)
    assert report["states"] == {"rnn.states": "rnn.final_states"}
    assert {n.op_type for n in model.graph.node} <= {"MatMul", "FlashGRU", "Unsqueeze", "Gather"}
    assert [i.name for i in model.graph.input] == ["X", "rnn.states"]
    assert not {"zeros", "shape", "full", "initial_h"} & {t.name for t in model.graph.initializer}


def test_other_states_are_kept_and_named(tmp_path: Path) -> None:
    """A non-zero constant keeps its value: a caller who starts with zeros would silently change the result."""
    learned = with_states([], {"initial_h": np.full((1, B, HD), 0.5, np.float32)}, {})
    model, report = convert(learned, tmp_path, expose_states=True)
    assert report["states"] == {}
    assert "not zero" in report["states_kept"]["rnn"]
    x = default_model("GRU")[1]["X"]
    assert onnx_rnn.max_error(onnx_rnn.run_file(model, {"X": x}), onnx_rnn.run_file(learned, {"X": x})) < 2e-5
    given = with_states([], {}, {"initial_h": [1, "batch", HD]})
    _, report = convert(given, tmp_path, expose_states=True)
    assert (report["states"], report["states_kept"]) == ({"initial_h": "Y_h"}, {})
    scaled = with_states([node("Mul", ["x_mean", "zero"])], {"zero": np.float32(0)}, {"x_mean": [1, "batch", HD]})
    _, report = convert(scaled, tmp_path, expose_states=True)
    assert report["states"] == {}  # 0 * x is not zero for an infinite x


def test_a_used_default_is_not_removed(tmp_path: Path) -> None:
    """The zeros are read by something else too: they stay for that reader."""
    source = with_states(*ZEROS["ConstantOfShape"], {})
    source.graph.node.append(node("Relu", ["initial_h"], "also"))
    source.graph.output.append(helper.make_tensor_value_info("also", TensorProto.FLOAT, [1, "batch", HD]))
    model, report = convert(source, tmp_path, expose_states=True)
    assert report["states"] == {"rnn.states": "rnn.final_states"}
    assert "ConstantOfShape" in {n.op_type for n in model.graph.node}
    onnx.checker.check_model(model)


def test_stacked_layers_get_their_own_names(tmp_path: Path) -> None:
    """Two names that differ in a slash only, the second fed by the first: unique pairs, streamed result equal."""
    source, feeds = default_model("GRU")
    second = onnx_rnn.random_feeds("GRU", {}, T, B, HD, HD, seed=1)
    source.graph.initializer.extend(numpy_helper.from_array(second[n], f"{n}2") for n in "WRB")
    source.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    source.graph.node.append(node("Squeeze", ["Y", "axis"], "x2"))
    source.graph.node.append(helper.make_node("GRU", ["x2", "W2", "R2", "B2"], ["Z"], name="/rnn", **ATTRIBUTES["GRU"]))
    for _ in range(2):
        source.graph.output.pop()
    source.graph.output.append(helper.make_tensor_value_info("Z", TensorProto.FLOAT, ["time", 1, "batch", HD]))
    model, report = convert(source, tmp_path, expose_states=True)
    assert report["states"] == {"rnn.states": "rnn.final_states", "rnn.states.2": "rnn.final_states.2"}
    whole = onnx_rnn.run_file(source, feeds)[0]
    assert onnx_rnn.max_error([in_chunks(model, feeds["X"], 5, report["states"])], [whole]) < 2e-5


def test_exposing_twice_adds_nothing(tmp_path: Path) -> None:
    model, _ = convert(default_model("LSTM")[0], tmp_path, expose_states=True)
    before = model.SerializeToString()
    assert expose_states(model) == {}
    assert kept_states(model) == {}
    write_axes(model)
    assert model.SerializeToString() == before


def test_a_node_in_a_branch_keeps_its_zeros(tmp_path: Path) -> None:
    source, feeds = default_model("GRU")
    branch = helper.make_graph(
        list(source.graph.node), "branch", [], [helper.make_tensor_value_info("Y", 1, [None] * 4)]
    )
    for graph_node in branch.node:
        del graph_node.output[1:]
    switch = helper.make_node("If", ["cond"], ["Z"], then_branch=branch, else_branch=branch)
    inputs = [source.graph.input[0], helper.make_tensor_value_info("cond", TensorProto.BOOL, [])]
    outputs = [helper.make_tensor_value_info("Z", 1, [None] * 4)]
    graph = helper.make_graph([switch], "g", inputs, outputs, source.graph.initializer)
    outer = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model, report = convert(outer, tmp_path, expose_states=True)
    assert (report["rewritten"], report["states"]) == (2, {})
    assert "inside the body" in report["states_kept"]["rnn"]
    given = {"X": feeds["X"], "cond": np.array(True)}
    assert onnx_rnn.max_error(onnx_rnn.run_file(model, given), onnx_rnn.run_file(outer, given)) < 2e-5
    assert not any(map(is_flashrnn, model.graph.node))
