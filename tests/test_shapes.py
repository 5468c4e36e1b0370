"""dtype, dimensions and axes that the graph tells."""

from __future__ import annotations

from typing import Any

import models
import numpy as np
import onnx
import pytest
from models import network
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy import feeds
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.shapes import Axes, Tensor, axes_of, dim_names, dtype_name, flashrnn_nodes, spec_of, tensors_of

F32 = TensorProto.FLOAT
SPEC = RNNSpec("gru", 2, 64, layout=1)


def test_tensors_behind_the_op() -> None:
    tensors = tensors_of(network(SPEC))
    assert tensors["y"] == Tensor(F32, ("batch", "time", 128))
    assert tensors["r"] == Tensor(F32, (1, 3, 2, 64, 64))
    assert tensors["lens32"] == Tensor(TensorProto.INT32, (1,))
    assert flashrnn_nodes(network(SPEC), tensors)[0][1] == SPEC


def test_large_weights_are_not_copied_but_known() -> None:
    model = network(SPEC)
    before = model.SerializeToString()
    assert tensors_of(model)["wx"] == Tensor(F32, ("batch", "time", 3 * 128))
    assert model.SerializeToString() == before


def test_weights_as_constants() -> None:
    model = network(SPEC)
    weight = next(w for w in model.graph.initializer if w.name == "r")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["r"], value=weight))
    model.graph.initializer.remove(weight)
    assert flashrnn_nodes(model, tensors_of(model))[0][1] == SPEC


def test_a_contradicting_graph_keeps_what_it_declares() -> None:
    model = network(SPEC)
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 4
    assert tensors_of(model)["x"] == Tensor(F32, ("batch", "time", 4))


def test_one_name_in_two_branches() -> None:
    def branch(size: int) -> onnx.GraphProto:
        values = numpy_helper.from_array(np.zeros(size, np.float32))
        node = helper.make_node("Constant", [], ["v"], value=values)
        return helper.make_graph([node], "b", [], [helper.make_tensor_value_info("v", F32, [size])])

    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch(2), else_branch=branch(3))],
        "g",
        [helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", F32, None)],
    )
    assert tensors_of(helper.make_model(graph))["y"].dtype == F32


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"r": Tensor(F32, (1, 3, 2, 64, "D"))}, "the shape of its recurrent weight 'r' is not fixed"),
        ({"r": Tensor(F32, None)}, "is not fixed"),
        ({"wx": Tensor(TensorProto.DOUBLE, None)}, "wx is float64 and r float32; both must be one of float32"),
        ({"wx": Tensor(TensorProto.FLOAT16, None)}, "wx is float16 and r float32"),
    ],
)
def test_nodes_that_cannot_be_read(tensor: dict[str, Tensor], message: str) -> None:
    model = network(SPEC)
    with pytest.raises(FlashRNNError, match=message):
        spec_of(model.graph.node[1], {**tensors_of(model), **tensor})


def test_a_node_with_an_input_left_out() -> None:
    model = network(SPEC)
    model.graph.node[1].input[3] = ""
    with pytest.raises(FlashRNNError, match="all five inputs"):
        spec_of(model.graph.node[1], tensors_of(model))


def test_an_attribute_of_another_type() -> None:
    model = network(SPEC)
    attributes = model.graph.node[1].attribute
    clip = next(a for a in attributes if a.name == "clip")
    clip.CopyFrom(helper.make_attribute("clip", 1))
    with pytest.raises(FlashRNNError, match="the attribute clip must be one number of its type"):
        spec_of(model.graph.node[1], tensors_of(model))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(F32, "float32"), (TensorProto.BFLOAT16, "bfloat16"), (TensorProto.STRING, "str"), (TensorProto.INT64, "int64")],
)
def test_dtype_names(dtype: int, name: str) -> None:
    assert dtype_name(dtype) == name


def test_unknown_dtypes_have_a_name_too() -> None:
    assert dtype_name(0) == "tensor type 0"


@pytest.mark.parametrize("layout", [0, 1])
def test_axes_from_metadata_and_from_names(layout: int) -> None:
    spec = RNNSpec("gru", 1, 4, layout=layout)
    written, derived = (network(spec, metadata=m) for m in (True, False))
    assert axes_of(written, tensors_of(written)) == axes_of(derived, tensors_of(derived))
    assert axes_of(derived, tensors_of(derived))["x"] == (Axes(1, 0) if layout else Axes(0, 1))


def test_axes_from_the_sequence_that_a_node_reads() -> None:
    """The names say nothing; that the op reads [q, p, ...] does."""
    model = network(RNNSpec("gru", 1, 4), metadata=False)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = {"time": "q", "batch": "p"}.get(dim.dim_param, dim.dim_param)
    tensors = tensors_of(model)
    assert dim_names(model, tensors) == ({"q"}, {"p"})
    assert axes_of(model, tensors)["state1"] == Axes(None, 2)


@pytest.mark.parametrize(
    ("dims", "axes"),
    [
        (["batch_size", "frames", 161], Axes(1, 0)),
        (["sequence_length", 576], Axes(0, None)),
        (["N", "T", 3], Axes(1, 0)),
        (["time", "time"], Axes(None, None)),
        (["height", "width"], Axes(None, None)),
    ],
)
def test_axes_from_what_names_suggest(dims: list[Any], axes: Axes) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", F32, dims)],
        [helper.make_tensor_value_info("y", F32, dims)],
    )
    model = helper.make_model(graph)
    assert axes_of(model, tensors_of(model))["x"] == axes


def test_lengths_are_checked_against_what_the_node_gets() -> None:
    """x of 8 steps, the node behind a Slice of 5: known by shape inference, and 6 is refused."""
    model = network(RNNSpec("gru", 1, 4), lens=True, states=True)
    graph = model.graph
    graph.input[0].type.tensor_type.shape.dim[0].dim_value = 8
    graph.output[0].type.tensor_type.shape.dim[0].dim_value = 5
    for name, value in (("start", 0), ("stop", 5)):
        graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    graph.node.insert(0, helper.make_node("Slice", ["x", "start", "stop", "start"], ["cut"]))
    graph.node[2].input[0] = "cut"
    tensors = tensors_of(model)
    given = {"x": np.zeros((8, 2, models.IN), np.float32), "lens": np.array([5, 6])}
    with pytest.raises(FlashRNNError, match=r"holds the length 6, outside 0\.\.5, the steps that the FlashGRU node"):
        feeds.check_feeds(model, tensors, axes_of(model, tensors), given, {"state0": "state1"})
    given["lens"][1] = 0
    assert set(feeds.check_feeds(model, tensors, axes_of(model, tensors), given, {"state0": ""})) == {*given, "state0"}
