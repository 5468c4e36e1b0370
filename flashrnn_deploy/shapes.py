"""What a model's tensors look like: dtype and dimensions of each, its FlashRNN nodes, its time and batch axes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import json_metadata, printable
from flashrnn_deploy.graph import shape_of, walk_graphs, walk_nodes
from flashrnn_deploy.op import (
    DTYPES,
    RNNSpec,
    attribute_names,
    attribute_type,
    is_flashrnn,
    register_schemas,
)

Dim = int | str | None
STANDARD_RNNS = ("LSTM", "GRU", "RNN")
_TIME_NAME = re.compile(r"(?:^|_)(time|steps?|frames?|seq|sequence|seqlen|length|t)(?:$|_)", re.IGNORECASE)
_BATCH_NAME = re.compile(r"(?:^|_)(batch|b|n)(?:$|_)", re.IGNORECASE)
_SMALL = 1024  # elements; larger initializers cannot be shapes or axes, and need not be copied for shape inference


@dataclass(frozen=True)
class Tensor:
    """dtype (a ``TensorProto`` value, 0 = unknown) and dimensions (None = unknown rank) of one tensor."""

    dtype: int
    shape: tuple[Dim, ...] | None

    def __str__(self) -> str:
        """``dtype[dims]`` for messages."""
        dims = "?" if self.shape is None else ", ".join("?" if d is None else printable(str(d)) for d in self.shape)
        return f"{dtype_name(self.dtype)}[{dims}]"


@dataclass(frozen=True)
class Axes:
    """Which axis of a graph input or output runs over time, and which over the batch; None where there is none."""

    time: int | None
    batch: int | None


Tensors = Mapping[str, Tensor]


def dtype_name(dtype: int) -> str:
    """NumPy's name of a ``TensorProto`` dtype ("float32", "bfloat16", "int64", ...)."""
    if dtype == TensorProto.BFLOAT16:
        return "bfloat16"
    if dtype == TensorProto.STRING:
        return "str"
    try:
        return str(numpy_dtype(dtype).name)
    except (KeyError, TypeError):
        return f"tensor type {dtype}"


def numpy_dtype(dtype: int) -> np.dtype[Any]:
    """The NumPy dtype of a ``TensorProto`` dtype; bfloat16 is that of ``ml_dtypes``."""
    if dtype == TensorProto.BFLOAT16:
        import ml_dtypes

        dtype_of_bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype_of_bfloat16
    result: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(dtype))
    return result


def value_tensor(value: onnx.ValueInfoProto) -> Tensor:
    """dtype and dimensions that a value info declares."""
    shape = shape_of(value)
    return Tensor(value.type.tensor_type.elem_type, None if shape is None else tuple(shape))


def describe(name: str, tensor: Tensor) -> str:
    """``name dtype[dims]`` for messages."""
    return f"{printable(name)} {tensor}"


def tensors_of(model: onnx.ModelProto) -> dict[str, Tensor]:
    """dtype and dimensions of every tensor that shape inference can tell, by name, inner graphs included."""
    register_schemas()
    light = _without_weights(model)
    # A graph that contradicts itself is for the checker and the engine to refuse; what is declared still holds.
    with contextlib.suppress(onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        light = onnx.shape_inference.infer_shapes(light, data_prop=True)
    result: dict[str, Tensor] = {}
    for graph in walk_graphs(light.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            found = value_tensor(value)
            known = result.get(value.name, found)
            # Two branches of an If may use one name for two tensors: then nothing is known.
            if found != known:
                found = Tensor(found.dtype if found.dtype == known.dtype else 0, None)
            result[value.name] = found
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                for attribute in node.attribute:
                    if attribute.name == "value":
                        result[node.output[0]] = Tensor(attribute.t.data_type, tuple(attribute.t.dims))
    for graph in walk_graphs(model.graph):
        for weight in graph.initializer:
            result[weight.name] = Tensor(weight.data_type, tuple(weight.dims))
    return result


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose large initializers are declarations only."""
    light = onnx.ModelProto(ir_version=model.ir_version)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph, source = light.graph, model.graph
    graph.name = source.name or "graph"
    for part in ("node", "input", "output", "value_info"):
        getattr(graph, part).extend(getattr(source, part))
    declared = {value.name for value in (*source.input, *source.value_info)}
    for weight in source.initializer:
        if np.prod(weight.dims, dtype=np.int64) <= _SMALL:
            graph.initializer.append(weight)
        elif weight.name not in declared:
            graph.value_info.append(helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims)))
    return light


def node_label(node: onnx.NodeProto) -> str:
    """How messages name a node: its op, and its name or, without one, its first output."""
    return f"{node.op_type} node '{node.name or (node.output[0] if node.output else '?')}'"


def spec_of(node: onnx.NodeProto, tensors: Tensors) -> RNNSpec:
    """Read one FlashRNN node with the shapes of its inputs.

    Raises:
        FlashRNNError: as ``RNNSpec.from_node``; or an input is missing, the shape of ``r`` is not fixed, or the dtype
            of ``wx`` is none of the op's.
    """
    if len(node.input) != 5 or len(node.output) != 2 or not all((*node.input, *node.output)):
        raise FlashRNNError(f"{node_label(node)}: all five inputs and both outputs must be there")
    for entry in node.attribute:
        known = entry.name in attribute_names(node.op_type)
        wanted = AttributeProto.FLOAT if known and attribute_type(entry.name) is float else AttributeProto.INT
        if known and entry.type != wanted:
            raise FlashRNNError(f"{node_label(node)}: the attribute {entry.name} must be one number of its type")
    r = tensors.get(node.input[1], Tensor(0, None))
    sizes = [d for d in r.shape or () if isinstance(d, int)]
    if r.shape is None or len(sizes) != len(r.shape):
        raise FlashRNNError(f"{node_label(node)}: the shape of its recurrent weight '{node.input[1]}' is not fixed")
    wx = tensors.get(node.input[0], Tensor(0, None)).dtype or r.dtype
    names = [name for name, dtype in DTYPES.items() if dtype == wx]
    if not names or wx != r.dtype:
        raise FlashRNNError(
            f"{node_label(node)}: wx is {dtype_name(wx)} and r {dtype_name(r.dtype)}; both must be one of "
            f"{', '.join(DTYPES)}"
        )
    return RNNSpec.from_node(node, sizes, names[0])


def flashrnn_nodes(model: onnx.ModelProto, tensors: Tensors) -> list[tuple[onnx.NodeProto, RNNSpec]]:
    """Every FlashRNN node of the model, inner graphs included, and what it says (errors as ``spec_of``)."""
    return [(node, spec_of(node, tensors)) for node in walk_nodes(model) if is_flashrnn(node)]


def is_standard_rnn(node: onnx.NodeProto) -> bool:
    """Whether the node is ONNX's LSTM, GRU or RNN."""
    return node.domain in ("", "ai.onnx") and node.op_type in STANDARD_RNNS


def attribute(node: onnx.NodeProto, name: str, default: object = None) -> object:
    """An attribute's value, or ``default`` where the node does not carry it."""
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def rnn_input_axes(node: onnx.NodeProto) -> Axes:
    """Time and batch axis of the sequence that a FlashRNN or standard recurrent node reads."""
    return Axes(1, 0) if attribute(node, "layout", 0) else Axes(0, 1)


def dim_names(model: onnx.ModelProto, tensors: Tensors) -> tuple[set[str], set[str]]:
    """Names of the dimensions that run over time, and over the batch.

    They are those of the sequences that recurrent nodes read; where shape inference does not reach them, the names
    themselves decide ("time", "frames", "seq_len", ...; "batch", ...).
    """
    time: set[str] = set()
    batch: set[str] = set()
    for node in walk_nodes(model):
        if is_flashrnn(node) or is_standard_rnn(node):
            shape = tensors.get(node.input[0], Tensor(0, None)).shape
            axes = rnn_input_axes(node)
            for axis, names in ((axes.time, time), (axes.batch, batch)):
                name = shape[axis] if shape and axis is not None and len(shape) == 3 else None
                names |= {name} if isinstance(name, str) else set()
    values = (*model.graph.input, *model.graph.output)
    graph_names = [d for value in values for d in shape_of(value) or () if isinstance(d, str)]
    if not time & set(graph_names):
        time |= {d for d in graph_names if _TIME_NAME.search(d)} - batch
    if not batch & set(graph_names):
        batch |= {d for d in graph_names if _BATCH_NAME.search(d)} - time
    return time - batch, batch - time


def axes_of(model: onnx.ModelProto, tensors: Tensors) -> dict[str, Axes]:
    """Time and batch axis of each graph input and output: the metadata ``flashrnn.axes``, else the dimensions' names.

    Raises:
        FlashRNNError: the metadata names an axis that a tensor does not have.
    """
    written = json_metadata(model, "flashrnn.axes")
    time, batch = dim_names(model, tensors)
    result = {}
    for value in (*model.graph.input, *model.graph.output):
        shape = shape_of(value)
        if value.name in written:
            result[value.name] = _written_axes(value.name, written[value.name], shape)
        else:
            result[value.name] = Axes(_only_axis(shape or (), time), _only_axis(shape or (), batch))
    return result


def _only_axis(shape: Iterable[Dim], names: set[str]) -> int | None:
    axes = [axis for axis, dim in enumerate(shape) if dim in names]
    return axes[0] if len(axes) == 1 else None


def _written_axes(name: str, entry: object, shape: list[Dim] | None) -> Axes:
    pair: list[Any] = [entry.get(key) for key in ("time", "batch")] if isinstance(entry, dict) else ["?"]
    for axis in pair:
        if not (axis is None or (isinstance(axis, int) and 0 <= axis < (99 if shape is None else len(shape)))):
            raise FlashRNNError(
                f"the model's metadata 'flashrnn.axes' gives '{name}' of shape {shape} the axes {entry}"
            )
    return Axes(pair[0], pair[1])
