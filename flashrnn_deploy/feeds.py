"""The arrays a user gives for a model's inputs: read, checked against the graph, and completed with zero states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import load_array, printable
from flashrnn_deploy.graph import free_inputs
from flashrnn_deploy.shapes import (
    Axes,
    Tensor,
    Tensors,
    describe,
    dtype_name,
    node_label,
    numpy_dtype,
    rnn_input_axes,
    value_tensor,
)
from flashrnn_deploy.streaming import length_inputs

Bindings = dict[str, tuple[int, str]]
"""Size of each named dimension, and the input that set it."""


def read_feeds(options: Sequence[str]) -> dict[str, Array]:
    """Load the arrays of ``NAME=FILE.npy`` options.

    Raises:
        FlashRNNError: an option has no ``=``, a name comes twice, or a file cannot be read.
    """
    feeds: dict[str, Array] = {}
    for option in options:
        name, equals, file = option.rpartition("=")
        if not equals or not name or not file:
            raise FlashRNNError(f"--input {option}: write it as NAME=FILE.npy")
        if name in feeds:
            raise FlashRNNError(f"--input {printable(name)} is given twice")
        feeds[name] = load_array(Path(file))
    return feeds


def check_feeds(
    model: onnx.ModelProto,
    tensors: Tensors,
    axes: Mapping[str, Axes],
    given: Mapping[str, Array],
    states: Mapping[str, str],
) -> dict[str, Array]:
    """What to feed: ``given`` checked against the graph, bfloat16 rounded, and zeros for state inputs left out.

    Args:
        model: the model.
        tensors: ``shapes.tensors_of(model)``.
        axes: ``shapes.axes_of(model, tensors)``.
        given: arrays by input name; float32 for a bfloat16 input.
        states: state inputs and the outputs that continue them.

    Raises:
        FlashRNNError: a name is unknown or missing; a dtype, rank or dimension differs; a length is outside 0..T; or
            the batch of a state input cannot be told.
    """
    inputs = {value.name: value_tensor(value) for value in model.graph.input}
    required = [value.name for value in free_inputs(model.graph)]
    listed = "; ".join(describe(name, inputs[name]) for name in required) or "(none)"
    if unknown := [printable(name) for name in given if name not in inputs]:
        raise FlashRNNError(f"the model has no input {', '.join(unknown)}; its inputs are {listed}")
    if missing := [printable(name) for name in required if name not in given and name not in states]:
        raise FlashRNNError(f"--input is missing for {', '.join(missing)}; the model's inputs are {listed}")
    bound: Bindings = {}
    feeds = {name: _checked(name, array, inputs[name], bound) for name, array in given.items()}
    for name in required:
        if name not in feeds:
            feeds[name] = _zeros(name, inputs[name], bound, axes, feeds)
    _check_lengths(model, tensors, axes, feeds, bound)
    return feeds


def _checked(name: str, array: Array, tensor: Tensor, bound: Bindings) -> Array:
    label = f"input '{printable(name)}'"
    if not tensor.dtype:
        raise FlashRNNError(f"{label} is not a tensor (a sequence, map or optional): `run` cannot feed it")
    wanted = dtype_name(tensor.dtype)
    travels = "float32" if wanted == "bfloat16" else wanted
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.name != travels and not (wanted == "str" and array.dtype.kind == "U"):
        note = " (it is bfloat16 in the model, and rounded on the way in)" if travels != wanted else ""
        raise FlashRNNError(
            f"{label} must be {travels}{note}, not {array.dtype.name}: save array.astype('{travels}') instead"
        )
    if tensor.shape is not None and array.ndim != len(tensor.shape):
        raise FlashRNNError(
            f"{label} has rank {array.ndim} (shape {list(array.shape)}), and the model wants rank "
            f"{len(tensor.shape)}: {describe(name, tensor)}"
        )
    for axis, (size, dim) in enumerate(zip(array.shape, tensor.shape or (), strict=False)):
        if isinstance(dim, int) and dim != size:
            raise FlashRNNError(f"{label} has size {size} on axis {axis}, and the model wants {dim}")
        if isinstance(dim, str):
            before, setter = bound.setdefault(dim, (size, label))
            if before != size:
                raise FlashRNNError(
                    f"{label} has {dim} = {size} on axis {axis}, but {setter} has {dim} = {before}: they must agree"
                )
    return array.astype(numpy_dtype(tensor.dtype)) if travels != wanted else array


def _zeros(name: str, tensor: Tensor, bound: Bindings, axes: Mapping[str, Axes], feeds: Mapping[str, Array]) -> Array:
    """A state input that was left out."""
    batches = {a.shape[axis] for n, a in feeds.items() if (axis := axes[n].batch) is not None}
    shape: list[int] = []
    for axis, dim in enumerate(tensor.shape or ()):
        if isinstance(dim, int):
            shape.append(dim)
        elif dim in bound:
            shape.append(bound[dim][0])
        elif axis == axes[name].batch and len(batches) == 1:
            shape.append(next(iter(batches)))
        else:
            raise FlashRNNError(
                f"the state input '{printable(name)}' was left out, and axis {axis} of {describe(name, tensor)} cannot "
                f"be told from the other inputs: give --input {printable(name)}=FILE.npy"
            )
    return np.zeros(shape, numpy_dtype(tensor.dtype))


def _check_lengths(
    model: onnx.ModelProto,
    tensors: Tensors,
    axes: Mapping[str, Axes],
    feeds: Mapping[str, Array],
    bound: Bindings,
) -> None:
    common = {a.shape[axis] for n, a in feeds.items() if (axis := axes[n].time) is not None}
    for name, nodes in length_inputs(model).items():
        if name not in feeds:
            continue
        lengths = feeds[name]
        readers: list[onnx.NodeProto | None] = [*nodes] or [None]  # an engine has none
        for node in readers:
            T = _steps(node, tensors, bound) if node is not None else None
            if T is None and len(common) == 1:
                T = next(iter(common))
            wrong = lengths[(lengths < 0) | (lengths > (np.iinfo(lengths.dtype).max if T is None else T))]
            if wrong.size:
                raise FlashRNNError(
                    f"input '{printable(name)}' holds the length {wrong.flat[0]}, outside 0..{'T' if T is None else T}"
                    f", the steps that the {node_label(node) if node else 'model'} gets"
                )


def _steps(node: onnx.NodeProto, tensors: Tensors, bound: Bindings) -> int | None:
    """The steps that a recurrent node gets, None where the feeds do not tell."""
    shape, axis = tensors.get(node.input[0], Tensor(0, None)).shape, rnn_input_axes(node).time
    dim = shape[axis] if shape and axis is not None else None
    return dim if isinstance(dim, int) else bound[dim][0] if dim in bound else None
