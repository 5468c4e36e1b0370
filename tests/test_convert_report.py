"""What ``convert`` says: states of files converted before, lengths of 0, wrong shapes, functions, NaN; and how fast."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import onnx_rnn
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import BOOL, HD, WIDTH, B, feeds, info, lstm, model_of, plain_model, same_results, tensors
from onnx_rnn import convert, flash_nodes

from flashrnn_deploy.exporters.convert import convert_file
from flashrnn_deploy.files import json_metadata
from flashrnn_deploy.op import register_schemas
from flashrnn_deploy.run import run
from flashrnn_deploy.verify import verify


def test_states_of_a_file_converted_before(tmp_path: Path) -> None:
    """Exposed later is exposed at once, and ``run --chunk`` works on it."""
    source = plain_model()
    at_once, _ = convert(source, tmp_path, expose_states=True)
    convert(source, tmp_path)
    report = convert_file(tmp_path / "out.onnx", tmp_path / "later.onnx", expose_states=True)
    assert report["states"] == {"rnn.states": "rnn.final_states"}
    assert (report["nodes"], report["notes"]) == ([], [])
    later = onnx.load(tmp_path / "later.onnx")
    assert (later.graph.input, later.graph.output) == (at_once.graph.input, at_once.graph.output)
    assert json_metadata(later, "flashrnn.axes") == json_metadata(at_once, "flashrnn.axes")
    np.save(tmp_path / "x.npy", feeds()["X"])
    for folder, chunk in (("whole", None), ("chunks", 2)):
        run(tmp_path / "later.onnx", [f"X={tmp_path / 'x.npy'}"], tmp_path / folder, chunk=chunk)
    whole, chunks = (np.load(tmp_path / folder / "Y.npy") for folder in ("whole", "chunks"))
    assert np.max(np.abs(whole - chunks)) < 1e-6
    again = convert_file(tmp_path / "later.onnx", tmp_path / "again.onnx", expose_states=True)
    assert "no state to expose" in again["notes"][0]


def test_states_that_stay_inside_are_named_where_they_were_asked_for(tmp_path: Path) -> None:
    source = plain_model()
    source.graph.initializer.append(numpy_helper.from_array(np.ones((1, B, HD), np.float32), "learned"))
    source.graph.node[0].input.extend(["", "learned"])
    _, report = convert(source, tmp_path)
    assert report["states_kept"] == {}
    report = convert_file(tmp_path / "out.onnx", tmp_path / "later.onnx", expose_states=True)
    assert "not zero" in report["states_kept"]["rnn"]
    assert "copy" in report["notes"][0]


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_states_that_are_inputs_already(op: str, tmp_path: Path) -> None:
    """An input that starts a node and an output that ends it are a pair: the file runs in chunks as it is."""
    attributes = {"hidden_size": 4} | ({"linear_before_reset": 1} if op == "GRU" else {})
    given = onnx_rnn.random_feeds(op, attributes, T=7, B=2, width=3, HD=4)
    given["sequence_lens"] = None
    converted, report = convert(onnx_rnn.node_model(op, attributes, given), tmp_path)
    pairs = {"initial_h": "Y_h"} | ({"initial_c": "Y_c"} if op == "LSTM" else {})
    assert report["states"] == json_metadata(converted, "flashrnn.states") == pairs
    inputs = [value.name for value in converted.graph.input]
    for name in inputs:
        np.save(tmp_path / f"{name}.npy", given[name])
    arguments = [f"{name}={tmp_path / f'{name}.npy'}" for name in inputs]
    for folder, chunk in (("whole", None), ("chunks", 3)):
        run(tmp_path / "out.onnx", arguments, tmp_path / folder, chunk=chunk)
    for name in ("Y", *pairs.values()):
        whole, chunks = (np.load(tmp_path / folder / f"{name}.npy") for folder in ("whole", "chunks"))
        assert np.max(np.abs(whole - chunks)) < 1e-6


@pytest.mark.parametrize(("op", "clip", "noted"), [("LSTM", 0.3, True), ("LSTM", 0.0, False), ("GRU", 0.3, False)])
def test_clip_of_an_lstm_is_noted(op: str, clip: float, noted: bool, tmp_path: Path) -> None:
    """ONNX Runtime clips no cell state, ONNX's text does."""
    attributes = (
        {"hidden_size": 4} | ({"clip": clip} if clip else {}) | ({"linear_before_reset": 1} if op == "GRU" else {})
    )
    given = onnx_rnn.random_feeds(op, attributes, T=5, B=2, width=3, HD=4)
    _, report = convert(onnx_rnn.node_model(op, attributes, given), tmp_path)
    assert report["rewritten"] == 1
    assert any("clip bounds the cell state" in note for note in report["notes"]) == noted


@pytest.mark.parametrize(("states", "noted"), [(True, True), (False, False)])
def test_rows_of_length_zero_are_noted(states: bool, noted: bool, tmp_path: Path) -> None:
    """Lengths known at run time only, and an initial state that may differ from 0: ONNX Runtime answers otherwise."""
    given = onnx_rnn.random_feeds("LSTM", {}, T=5, B=2, width=3, HD=4)
    if not states:
        given["initial_h"] = given["initial_c"] = None
    _, report = convert(onnx_rnn.node_model("LSTM", {"hidden_size": 4}, given), tmp_path)
    assert any("length 0" in note and "rnn" in note for note in report["notes"]) == noted


def test_int64_lengths_behind_a_cast_and_as_a_constant(tmp_path: Path) -> None:
    """D15: the file's own Cast serves; a constant "all steps" does not wrap around."""
    given = onnx_rnn.random_feeds("LSTM", {}, T=5, B=3, width=4, HD=5)
    given["sequence_lens"] = given["sequence_lens"].astype(np.int64)
    source = onnx_rnn.node_model("LSTM", {"hidden_size": 5}, given)
    source.graph.node[0].input[4] = "int32_lens"
    cast = helper.make_node("Cast", ["sequence_lens"], ["int32_lens"], to=TensorProto.INT32)
    source.graph.node.insert(0, cast)
    model, _ = convert(source, tmp_path)
    assert flash_nodes(model)[0].input[3] == "int32_lens"
    assert [n for n in model.graph.node if n.op_type == "Cast"] == [cast]
    same_results(source, model, given)
    endless = plain_model()
    endless.graph.initializer.append(numpy_helper.from_array(np.full(B, np.iinfo(np.int64).max), "lens"))
    endless.graph.node[0].input.append("lens")
    model, _ = convert(endless, tmp_path)
    same_results(plain_model(), model, {"X": feeds()["X"]})


@pytest.mark.parametrize("declared", [("t", 1, "b", 99), ("t", "b", HD), (7, 2, 9, HD)])
def test_wrong_declared_shapes_are_corrected(declared: tuple[str | int, ...], tmp_path: Path) -> None:
    """Of an output and of a value behind the node; a strict reader takes the result."""
    source = plain_model()
    source.graph.node.append(helper.make_node("Relu", ["Y"], ["Z"]))
    source.graph.output.append(info("Z", shape=declared))
    source.graph.value_info.append(info("Y", shape=declared))
    del source.graph.output[0]
    model, report = convert(source, tmp_path)
    assert [note for note in report["notes"] if note.startswith("output 'Z' was declared")]
    register_schemas()
    onnx.checker.check_model(model, full_check=True)
    same_results(source, model, {"X": feeds()["X"]})
    assert not verify(tmp_path / "out.onnx").failures


def test_right_declared_shapes_are_kept(tmp_path: Path) -> None:
    source = plain_model()
    model, report = convert(source, tmp_path)
    assert model.graph.output == source.graph.output
    assert not any("declared" in note for note in report["notes"])


def test_nodes_inside_the_bodies_of_a_function_are_reported(tmp_path: Path) -> None:
    source = plain_model()
    branches = [
        helper.make_graph([lstm(x="x", name=name)], name, [], [info("Y", shape=[None] * 4)], tensors(feeds()))
        for name in ("left", "right")
    ]
    node = helper.make_node("If", ["c"], ["y"], name="switch", then_branch=branches[0], else_branch=branches[1])
    opsets = [helper.make_opsetid("", 17)]
    source.functions.append(helper.make_function("mine", "F", ["x", "c"], ["y"], [node], opsets))
    source.opset_import.append(helper.make_opsetid("mine", 1))
    source.graph.node.append(helper.make_node("F", ["X", "c"], ["Y2"], domain="mine"))
    source.graph.input.append(info("c", BOOL, []))
    source.graph.output.append(info("Y2", shape=[None] * 4))
    model, report = convert(source, tmp_path)
    left = [row for row in report["nodes"] if row["action"] == "left"]
    assert {row["name"]: row["path"] for row in left} == {
        "left": "function mine::F > switch.then_branch",
        "right": "function mine::F > switch.else_branch",
    }
    assert all("function" in row["reason"] for row in left)
    same_results(source, model, {"X": feeds()["X"], "c": np.array(True)})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_noted(value: float, tmp_path: Path) -> None:
    weights = feeds()
    weights["R"][0, 0, 0] = value
    graph = helper.make_graph([lstm()], "g", [info("X", shape=("t", "b", WIDTH))], [info("Y")], tensors(weights))
    _, report = convert(model_of(graph), tmp_path)
    assert report["rewritten"] == 1
    assert any("NaN or infinity" in note and "rnn" in note for note in report["notes"])


def deep_model(layers: int) -> onnx.ModelProto:
    """LSTMs with a dynamic default state, as exporters write them, and other nodes in between."""
    weights = onnx_rnn.random_feeds("LSTM", {}, 2, 2, HD, HD)
    stored = [*tensors(weights), numpy_helper.from_array(np.array([1]), "one")]
    stored += [numpy_helper.from_array(np.array(1), "axis"), numpy_helper.from_array(np.array([HD]), "width")]
    nodes, x = [], "X"
    for k in range(layers):
        nodes += [
            helper.make_node("Shape", [x], [f"shape{k}"]),
            helper.make_node("Gather", [f"shape{k}", "one"], [f"batch{k}"]),
            helper.make_node("Concat", ["one", f"batch{k}", "width"], [f"sizes{k}"], axis=0),
            helper.make_node("ConstantOfShape", [f"sizes{k}"], [f"zero{k}"]),
            helper.make_node(
                "LSTM", [x, "W", "R", "B", "", f"zero{k}", f"zero{k}"], [f"y{k}"], name=f"rnn{k}", hidden_size=HD
            ),
            helper.make_node("Squeeze", [f"y{k}", "one"], [f"x{k}"]),
        ]
        nodes += [helper.make_node("Tanh", [f"x{k}" if j == 0 else f"t{k}.{j - 1}"], [f"t{k}.{j}"]) for j in range(10)]
        x = f"t{k}.9"
    return model_of(helper.make_graph(nodes, "g", [info("X", shape=("t", "b", HD))], [info(x)], stored))


def test_time_grows_with_the_file_not_with_its_square(tmp_path: Path) -> None:
    seconds = []
    for layers in (30, 120):
        started = time.process_time()
        _, report = convert(deep_model(layers), tmp_path, expose_states=True)
        seconds.append(time.process_time() - started)
        assert len(report["states"]) == layers
    assert seconds[1] < 8 * seconds[0] + 1  # four times the nodes; 16 times the seconds were it quadratic
