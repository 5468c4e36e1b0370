"""Chunks: equal to the whole, or refused by name."""

from __future__ import annotations

from typing import Any

import models
import numpy as np
import onnx
import pytest
from models import network
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy import streaming
from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.chunks import run_chunks
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.shapes import axes_of, tensors_of

GRU = RNNSpec("gru", 2, 4)
F32 = TensorProto.FLOAT
T, B = 50, 2


def feeds_for(model: onnx.ModelProto, spec: RNNSpec, lens: Any = None, steps: int = T) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((B, steps, models.IN) if spec.layout else (steps, B, models.IN))
    state = rng.standard_normal(spec.shapes(1, B)["initial_states"]) * 0.5
    if spec.cell == "slstm":
        state[2] = np.abs(state[2]) + 1
    feeds = {"x": x.astype(np.float32), "state0": state.astype(np.float32)}
    if lens is not None:
        feeds["lens"] = np.asarray(lens)
    return {v.name: feeds[v.name] for v in model.graph.input}


def chunked(model: onnx.ModelProto, feeds: dict[str, np.ndarray], chunk: int, *options: str) -> dict[str, np.ndarray]:
    tensors = tensors_of(model)
    axes, pairs = axes_of(model, tensors), streaming.state_pairs(model, options)
    streaming.check_chunkable(model, tensors, axes, pairs)
    lengths = streaming.length_inputs(model)
    return run_chunks(make_runner("onnxruntime", model), feeds, chunk, axes, pairs, lengths)


def refuse(model: onnx.ModelProto, message: str, *options: str) -> None:
    with pytest.raises(FlashRNNError, match=message):
        chunked(model, feeds_for(model, GRU), 7, *options)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("chunk", [1, 7, 50, 60])
def test_chunks_add_up(cell: str, chunk: int) -> None:
    spec = RNNSpec(cell, 2, 4)
    model = network(spec)
    feeds = feeds_for(model, spec)
    whole = make_runner("onnxruntime", model).infer(feeds)
    parts = chunked(model, feeds, chunk)
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], atol=1e-5)


@pytest.mark.parametrize("layout", [0, 1])
def test_lengths_are_cut_too(layout: int) -> None:
    spec = RNNSpec("lstm", 1, 4, layout=layout)
    model = network(spec, lens=True)
    feeds = feeds_for(model, spec, lens=[50, 10])
    whole = make_runner("onnxruntime", model).infer(feeds)
    parts = chunked(model, feeds, 7)
    assert np.abs(whole["state1"]).max() > 0.1
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], atol=1e-5)


def test_foreign_files_name_their_states() -> None:
    model = network(GRU, metadata=False)
    refuse(model, "--chunk would reset the state of the FlashGRU node 'rnn'")
    parts = chunked(model, feeds_for(model, GRU), 7, "state0=state1")
    whole = make_runner("onnxruntime", model).infer(feeds_for(model, GRU))
    np.testing.assert_allclose(parts["out"], whole["out"], atol=1e-5)


def test_a_default_state_would_be_reset() -> None:
    refuse(network(GRU, states=False), "would reset the state of the FlashGRU node 'rnn'.*expose-states")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (RNNSpec("gru", 2, 4, num_directions=2), "FlashGRU node 'rnn' runs in both directions"),
        (RNNSpec("gru", 2, 4, reverse=1), "FlashGRU node 'rnn' runs backward"),
    ],
)
def test_backward_nodes(spec: RNNSpec, why: str) -> None:
    refuse(network(spec), why)


def test_a_model_without_a_time_axis() -> None:
    model = network(GRU)
    models.set_metadata(model, "flashrnn.axes", {"x": {"time": None, "batch": 1}})
    refuse(
        model,
        r"no input has a known time axis \(x float32\[time, batch, 5\]; state0 float32\[1, 1, batch, 8\]\); export",
    )


def test_a_fixed_length() -> None:
    model = network(GRU)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = T
    refuse(model, "the input 'x' has a fixed length of 50 steps.*--dynamic x:0=time")


def test_an_output_without_a_time_axis() -> None:
    model = network(GRU)
    model.graph.node.append(helper.make_node("ReduceMean", ["out"], ["mean"], axes=[0]))
    model.graph.output.add().CopyFrom(helper.make_tensor_value_info("mean", F32, [1, "batch", 3]))
    refuse(model, "output 'mean' has no time axis")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, ("nope=state1",), "state pair nope=state1: the inputs are x, state0"),
        ({}, ("state0=nope",), "the outputs are out, state1"),
        ({}, ("x=state1",), r"input is float32\[time, batch, 5\], the output float32\[1, 1, batch, 8\]; they must"),
        ({}, ("state0",), "state pair state0="),
        ({"extra": True}, ("other=state1",), "continue more than one"),
    ],
)
def test_wrong_pairs(changes: dict[str, bool], options: tuple[str, ...], message: str) -> None:
    model = network(GRU)
    if changes:
        model.graph.input.add().CopyFrom(model.graph.input[1])
        model.graph.input[2].name = "other"
    with pytest.raises(FlashRNNError, match=message):
        streaming.state_pairs(model, options)


def separate_states(order: str = "hc", carried: str = "hc") -> onnx.ModelProto:
    """An LSTM whose h and c are two inputs and two outputs; ``carried`` are inputs, the others zeros."""
    spec = RNNSpec("lstm", 2, 4)
    model = network(spec)
    graph = model.graph
    del graph.input[1:], graph.output[1:], graph.metadata_props[:]
    shape: list[Any] = [1, 1, "batch", 8]
    for name in "hc":
        if name in carried:
            graph.input.append(helper.make_tensor_value_info(f"{name}0", F32, shape))
        else:
            graph.initializer.append(numpy_helper.from_array(np.zeros((1, 1, B, 8), np.float32), f"{name}0"))
        graph.output.append(helper.make_tensor_value_info(f"{name}1", F32, shape))
    graph.node.insert(0, helper.make_node("Concat", ["h0", "c0"], ["state0"], axis=0))
    graph.node.append(helper.make_node("Split", ["state1"], ["h1", "c1"], axis=0))
    models.set_metadata(model, "flashrnn.axes", {})
    models.set_metadata(
        model, "flashrnn.states", {f"{a}0": f"{b}1" for a, b in zip("hc", order, strict=True) if a in carried}
    )
    return model


def state_feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    shapes = {"x": (T, B, models.IN)}
    return {v.name: rng.standard_normal(shapes.get(v.name, (1, 1, B, 8))).astype(np.float32) for v in model.graph.input}


def test_states_in_parts() -> None:
    model = separate_states()
    feeds = state_feeds(model)
    whole, parts = make_runner("onnxruntime", model).infer(feeds), chunked(model, feeds, 7)
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], atol=1e-5)


def test_a_part_that_is_not_carried() -> None:
    model = separate_states(carried="h")
    del model.graph.output[2]
    with pytest.raises(FlashRNNError, match="would reset the state of the FlashLSTM node 'rnn'"):
        chunked(model, state_feeds(model), 7)


def test_swapped_pairs_are_found_by_running() -> None:
    model = separate_states(order="ch")
    with pytest.raises(FlashRNNError, match=r"is not the whole.*a state pair is wrong"):
        chunked(model, state_feeds(model), 7)


def test_a_state_of_another_node() -> None:
    model = network(GRU)
    model.graph.node.append(helper.make_node("Neg", ["state0"], ["state2"]))
    model.graph.output.add().CopyFrom(model.graph.output[1])
    model.graph.output[2].name = "state2"
    models.set_metadata(model, "flashrnn.states", {"state0": "state2"})
    refuse(model, "starts from state0, but no output paired with that continues it")


def test_silence_hides_nothing() -> None:
    """A sum over three steps, where the first two chunks of the user's sequence are zero: random ones show it."""
    model = network(GRU)
    pads = helper.make_node("Constant", [], ["pads"], value_ints=[1, 0, 0, 1, 0, 0])
    pad = helper.make_node("Pad", ["x", "pads"], ["padded"])
    begin, end, axis = (
        helper.make_node("Constant", [], [n], value_ints=[v]) for n, v in (("s", 2), ("e", 2**31), ("a", 0))
    )
    late = helper.make_node("Slice", ["padded", "s", "e", "a"], ["late"])
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "x":
                node.input[i] = "late"
    for node in (late, axis, end, begin, pad, pads):
        model.graph.node.insert(0, node)
    feeds = feeds_for(model, GRU)
    feeds["x"][:20] = 0
    with pytest.raises(FlashRNNError, match="is not the whole"):
        chunked(model, feeds, 7)


def test_an_input_of_nan_alone() -> None:
    """What is fed shows nothing; random numbers in its place show that chunks add up."""
    model = network(GRU)
    feeds = feeds_for(model, GRU)
    feeds["x"] = np.full_like(feeds["x"], np.nan)
    parts = chunked(model, feeds, 7)
    assert {name: np.isnan(array).all() for name, array in parts.items()} == {"out": True, "state1": True}


def test_lengths_that_the_model_computes() -> None:
    """They would count from the start of every chunk."""
    model = network(GRU)
    node = next(n for n in model.graph.node if n.op_type.startswith("Flash"))
    lens = helper.make_node("Constant", [], ["three"], value=helper.make_tensor("", onnx.TensorProto.INT32, [1], [3]))
    model.graph.node.insert(0, lens)
    node = next(n for n in model.graph.node if n.op_type.startswith("Flash"))
    node.input[3] = "three"
    refuse(model, "the lengths of the FlashGRU node 'rnn' are computed in the model")


def test_an_output_of_the_final_state() -> None:
    """A classifier on the last state, as an utterance embedding: the last chunk's value is the whole's."""
    model = network(GRU)
    model.graph.node.append(helper.make_node("Tanh", ["state1"], ["embedding"]))
    model.graph.output.add().CopyFrom(model.graph.output[1])
    model.graph.output[2].name = "embedding"
    feeds = feeds_for(model, GRU)
    whole = make_runner("onnxruntime", model).infer(feeds)["embedding"]
    np.testing.assert_allclose(chunked(model, feeds, 7)["embedding"], whole, atol=1e-6)


@pytest.mark.parametrize(("pad", "message"), [([0, 0, 1, 0, 0, 1], "differs by"), ([0] * 6, "has 5 steps for a chunk")])
def test_looking_across_time(pad: list[int], message: str) -> None:
    """A sum over three steps: with padding the shape holds and the values do not; without it neither does."""
    model = network(GRU)
    nodes = model.graph.node
    nodes[0].input[0] = "seen"
    weight = np.ones((models.IN, 1, 3), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "window"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(pad), "pad"))
    for node in reversed(
        [
            helper.make_node("Transpose", ["x"], ["x_bct"], perm=[1, 2, 0]),
            helper.make_node("Pad", ["x_bct", "pad"], ["x_pad"]),
            helper.make_node("Conv", ["x_pad", "window"], ["x_sum"], group=models.IN),
            helper.make_node("Transpose", ["x_sum"], ["seen"], perm=[2, 0, 1]),
        ]
    ):
        nodes.insert(0, node)
    refuse(model, message)


def test_inputs_of_two_lengths() -> None:
    model = network(GRU)
    models.set_metadata(model, "flashrnn.states", {})
    axes = {"x": {"time": 0, "batch": 1}, "state0": {"time": 2, "batch": 1}, "out": {"time": 0}, "state1": {"time": 2}}
    models.set_metadata(model, "flashrnn.axes", axes)
    tensors = tensors_of(model)
    with pytest.raises(FlashRNNError, match="inputs of one length"):
        run_chunks(make_runner("onnxruntime", model), feeds_for(model, GRU), 7, axes_of(model, tensors), {}, {})


def standard(op: str, **attributes: Any) -> onnx.ModelProto:
    """x -> one standard recurrent node with all its states outside."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal((1, gates * 8, k)).astype(np.float32) for n, k in (("w", models.IN), ("r", 8))}
    states = ["h0", "c0"] if op == "LSTM" else ["h0"]
    outs = ["h1", "c1"] if op == "LSTM" else ["h1"]
    dims: list[Any] = [1, "batch", 8]
    graph = helper.make_graph(
        [
            helper.make_node(
                op, ["x", "w", "r", "", "", *states], ["y", *outs], name="cell", hidden_size=8, **attributes
            )
        ],
        "standard",
        [
            helper.make_tensor_value_info("x", F32, ["steps", "batch", models.IN]),
            *(helper.make_tensor_value_info(n, F32, dims) for n in states),
        ],
        [
            helper.make_tensor_value_info("y", F32, ["steps", 1, "batch", 8]),
            *(helper.make_tensor_value_info(n, F32, dims) for n in outs),
        ],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    models.set_metadata(model, "flashrnn.states", dict(zip(states, outs, strict=True)))
    return model


def standard_feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    shapes = {"x": (T, B, models.IN)}
    return {v.name: rng.standard_normal(shapes.get(v.name, (1, B, 8))).astype(np.float32) for v in model.graph.input}


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_standard_nodes(op: str) -> None:
    model = standard(op)
    feeds = standard_feeds(model)
    whole, parts = make_runner("onnxruntime", model).infer(feeds), chunked(model, feeds, 7)
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], atol=1e-5)
    del model.graph.node[0].input[5:]
    with pytest.raises(FlashRNNError, match=f"would reset the state of the {op} node 'cell'"):
        chunked(model, feeds, 7)
    with pytest.raises(FlashRNNError, match=f"{op} node 'cell' has direction reverse"):
        chunked(standard(op, direction="reverse"), feeds, 7)


@pytest.mark.parametrize("carried", [True, False])
def test_scan(carried: bool) -> None:
    """A running sum over time by Scan, its state in and out or a constant."""
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "row"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        "body",
        [helper.make_tensor_value_info(n, F32, [2]) for n in ("s", "row")],
        [helper.make_tensor_value_info(n, F32, [2]) for n in ("t", "o")],
    )
    graph = helper.make_graph(
        [helper.make_node("Scan", ["s0", "x"], ["s1", "y"], name="sum", num_scan_inputs=1, body=body)],
        "scan",
        [helper.make_tensor_value_info("x", F32, ["time", 2]), helper.make_tensor_value_info("s0", F32, [2])],
        [helper.make_tensor_value_info("y", F32, ["time", 2]), helper.make_tensor_value_info("s1", F32, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {"x": np.ones((9, 2), np.float32), "s0": np.zeros(2, np.float32)}
    if carried:
        assert chunked(model, feeds, 4, "s0=s1")["y"][-1].tolist() == [9, 9]
        return
    del graph.input[1], graph.output[1]
    graph.initializer.append(numpy_helper.from_array(feeds.pop("s0"), "s0"))
    model.graph.CopyFrom(graph)
    with pytest.raises(FlashRNNError, match="would reset the state of the Scan node 'sum'"):
        chunked(model, feeds, 4)


def test_scan_without_a_state() -> None:
    """A map over time needs nothing from the step before."""
    body = helper.make_graph(
        [helper.make_node("Neg", ["row"], ["o"])],
        "body",
        [helper.make_tensor_value_info("row", F32, [2])],
        [helper.make_tensor_value_info("o", F32, [2])],
    )
    graph = helper.make_graph(
        [helper.make_node("Scan", ["x"], ["y"], num_scan_inputs=1, body=body)],
        "scan",
        [helper.make_tensor_value_info("x", F32, ["time", 2])],
        [helper.make_tensor_value_info("y", F32, ["time", 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.arange(18, dtype=np.float32).reshape(9, 2)
    np.testing.assert_array_equal(chunked(model, {"x": x}, 4)["y"], -x)


def test_nodes_inside_branches_and_functions() -> None:
    model = network(GRU)
    node = onnx.NodeProto()
    node.CopyFrom(model.graph.node[1])
    inner = helper.make_graph([node], "inner", [], [helper.make_tensor_value_info("y", F32, None)])
    branch = helper.make_node("If", ["c"], ["y", "state1"], then_branch=inner, else_branch=inner)
    del model.graph.node[1]
    model.graph.node.insert(1, branch)
    tensors = tensors_of(model)
    with pytest.raises(FlashRNNError, match="inside the branch"):
        streaming.check_chunkable(model, tensors, axes_of(model, tensors), {"state0": "state1"})
    model = network(GRU)
    model.functions.append(helper.make_function("local", "F", ["a"], ["b"], [node], []))
    with pytest.raises(FlashRNNError, match="inside the function F"):
        streaming.check_chunkable(model, tensors, axes_of(model, tensors), {"state0": "state1"})


def test_state_reset_by_a_mask() -> None:
    """A control policy that clears the state of some rows: Where(mask, 0, state)."""
    model = network(GRU, state0="given")
    graph = model.graph
    graph.node[1].input[4] = "masked"
    graph.node.insert(0, helper.make_node("Where", ["mask", "zero", "given"], ["masked"]))
    graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "zero"))
    graph.input.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, [1, 1, "batch", 1]))
    feeds = {"x": feeds_for(network(GRU), GRU)["x"], "given": np.ones((1, 1, B, 8), np.float32)}
    feeds["mask"] = np.array([False, False]).reshape(1, 1, 2, 1)
    whole, parts = make_runner("onnxruntime", model).infer(feeds), chunked(model, feeds, 7)
    np.testing.assert_allclose(parts["out"], whole["out"], atol=1e-5)
    feeds["mask"] = np.array([True, False]).reshape(1, 1, 2, 1)  # would clear row 0 at every chunk
    with pytest.raises(FlashRNNError, match="is not the whole"):
        chunked(model, feeds, 7)
