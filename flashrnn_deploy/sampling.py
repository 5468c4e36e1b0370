"""Seeded random inputs for a model, legal for what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.graph import free_inputs, walk_nodes
from flashrnn_deploy.op import is_flashrnn
from flashrnn_deploy.shapes import (
    Axes,
    Tensor,
    Tensors,
    describe,
    dim_names,
    is_standard_rnn,
    numpy_dtype,
    rnn_input_axes,
    value_tensor,
)
from flashrnn_deploy.streaming import length_inputs

CASES = ((1, 1), (2, 11), (7, 3))
"""(T, B) of each sample, where a model leaves them open."""

Case = tuple[int | None, int | None]
"""(T, B) that a sample really has; None where a model has no such axis."""

_OTHER_DIM = 4  # size of a dynamic dimension that is neither time nor batch
_KEEP = ("Identity", "Cast", "CastLike")
_MOVES = (*_KEEP, "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Slice", "Split", "Concat", "Flatten", "Expand")
_SLSTM_NORMALIZER = 2  # position in the packed states h, c, n, m


def samples(
    model: onnx.ModelProto, tensors: Tensors, axes: Mapping[str, Axes], seed: int = 0
) -> list[tuple[Case, dict[str, Array]]]:
    """One set of feeds for each (T, B) of ``CASES`` that the model's dynamic dimensions can tell apart, with its sizes.

    Floats are normal, states not zero, an sLSTM normalizer at least 1; lengths lie in 1..T, one of them T; indices of
    a Gather lie in its range; other integers are 0 or 1.

    Raises:
        FlashRNNError: an input is not a tensor, or its rank is unknown.
    """
    seen, result = set(), []
    for number, (T, B) in enumerate(CASES):
        shapes = _shapes(model, tensors, axes, T, B)
        key = tuple(shapes.items())
        if key in seen:
            continue
        seen.add(key)
        arrays = _arrays(model, tensors, axes, shapes, np.random.default_rng([seed, number]), T)
        result.append((_case(model, tensors, axes, shapes), arrays))
    return result


def _case(
    model: onnx.ModelProto, tensors: Tensors, axes: Mapping[str, Axes], shapes: Mapping[str, tuple[int, ...]]
) -> Case:
    """The steps and rows of one sample: along the inputs' known axes, else in the sequence that a recurrent node reads.

    The latter is where a fixed size is found, which is nobody's axis.
    """
    sizes: dict[Any, int] = {}
    for value in free_inputs(model.graph):
        sizes |= zip(value_tensor(value).shape or (), shapes[value.name], strict=True)
    known = [(axes[name], shape) for name, shape in shapes.items()]
    for node in walk_nodes(model):
        dims = tensors.get(node.input[0], Tensor(0, None)).shape if is_flashrnn(node) or is_standard_rnn(node) else None
        if dims is not None and len(dims) == 3:
            shape: Any = tuple(dim if isinstance(dim, int) else sizes.get(dim) for dim in dims)
            known.append((rnn_input_axes(node), shape))
    T = (shape[a.time] for a, shape in known if a.time is not None and shape[a.time] is not None)
    B = (shape[a.batch] for a, shape in known if a.batch is not None and shape[a.batch] is not None)
    return next(T, None), next(B, None)


def sample(
    model: onnx.ModelProto,
    tensors: Tensors,
    axes: Mapping[str, Axes],
    T: int,
    B: int,
    sizes: Mapping[str, int],
    seed: int = 0,
) -> dict[str, Array]:
    """One set of feeds as ``samples`` makes them, at ``T`` steps and ``B`` rows; ``sizes`` of named dimensions win.

    Raises:
        FlashRNNError: as ``samples``.
    """
    shapes = _shapes(model, tensors, axes, T, B, sizes)
    return _arrays(model, tensors, axes, shapes, np.random.default_rng(seed), T)


def _shapes(
    model: onnx.ModelProto,
    tensors: Tensors,
    axes: Mapping[str, Axes],
    T: int,
    B: int,
    given: Mapping[str, int] | None = None,
) -> dict[str, tuple[int, ...]]:
    time, batch = dim_names(model, tensors)
    sizes: dict[Any, int] = dict.fromkeys(time, T) | dict.fromkeys(batch, B)
    for value in model.graph.input:  # what the metadata says comes before what names suggest
        known = axes[value.name]
        for axis, dim in enumerate(value_tensor(value).shape or ()):
            if isinstance(dim, str) and axis in (known.time, known.batch):
                sizes[dim] = T if axis == known.time else B
    sizes |= given or {}
    result = {}
    for value in free_inputs(model.graph):
        tensor, known = value_tensor(value), axes[value.name]
        if not tensor.dtype or tensor.shape is None:
            raise FlashRNNError(f"cannot make up the input {describe(value.name, tensor)}: its rank or type is unknown")
        result[value.name] = tuple(
            dim
            if isinstance(dim, int)
            else sizes.get(dim, T if axis == known.time else B if axis == known.batch else _OTHER_DIM)
            for axis, dim in enumerate(tensor.shape)
        )
    return result


def _arrays(
    model: onnx.ModelProto,
    tensors: Tensors,
    axes: Mapping[str, Axes],
    shapes: Mapping[str, tuple[int, ...]],
    rng: np.random.Generator,
    T: int,
) -> dict[str, Array]:
    steps = [shape[axis] for name, shape in shapes.items() if (axis := axes[name].time) is not None]
    lengths, ranges = length_inputs(model, reordered=True), index_ranges(model, tensors)
    normalizers = normalizer_inputs(model)
    result = {}
    for value in free_inputs(model.graph):
        name, shape = value.name, shapes[value.name]
        dtype = numpy_dtype(value_tensor(value).dtype)
        if name in lengths:
            array: Array = rng.integers(1, min(steps, default=T) + 1, shape)
            array.flat[:1] = min(steps, default=T)
        elif dtype.kind in "biu":
            array = rng.integers(0, 2 if dtype.kind == "b" else ranges.get(name, 2), shape)
        elif name in normalizers:
            array = rng.standard_normal(shape) * 0.5
            part = array if normalizers[name] is None else array[normalizers[name]]
            part[...] = np.abs(part) + 1
        else:
            array = rng.standard_normal(shape)
        result[name] = np.asarray(array).astype(dtype)
    return result


def index_ranges(model: onnx.ModelProto, tensors: Tensors) -> dict[str, int]:
    """Graph inputs that reach the indices of a Gather, and the smallest size they index."""
    source = {value.name: value.name for value in model.graph.input}
    result: dict[str, int] = {}
    for node in walk_nodes(model):
        if node.op_type in _MOVES and node.input and node.input[0] in source:
            source |= dict.fromkeys(node.output, source[node.input[0]])
        if node.op_type in ("Gather", "GatherElements") and node.input[1] in source:
            shape = tensors.get(node.input[0], Tensor(0, None)).shape
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            size = shape[axis] if shape else None
            if isinstance(size, int):
                name = source[node.input[1]]
                result[name] = min(size, result.get(name, size))
    return result


def normalizer_inputs(model: onnx.ModelProto) -> dict[str, int | None]:
    """Graph inputs that hold an sLSTM normalizer: its position on axis 0 of a packed state, or None for the whole."""
    behind: dict[str, frozenset[str]] = {value.name: frozenset([value.name]) for value in model.graph.input}
    same = {value.name: value.name for value in model.graph.input}
    parts: dict[str, list[str]] = {}
    result: dict[str, int | None] = {}
    for node in walk_nodes(model):
        if node.op_type == "FlashSLSTM":
            states = node.input[4]
            if states in same:
                result[same[states]] = _SLSTM_NORMALIZER
            elif len(parts.get(states, ())) == 4:
                result |= dict.fromkeys(behind.get(parts[states][_SLSTM_NORMALIZER], frozenset()))
            else:
                result |= dict.fromkeys(behind.get(states, frozenset()))
        elif node.op_type in _MOVES:
            names = list(node.input) if node.op_type == "Concat" else list(node.input[:1])
            reached = frozenset[str]().union(*(behind.get(name, frozenset()) for name in names))
            for name in node.output:
                behind[name] = reached
            if node.op_type in _KEEP and names[0] in same:
                same[node.output[0]] = same[names[0]]
            if node.op_type in _KEEP and names[0] in parts:
                parts[node.output[0]] = parts[names[0]]
            if node.op_type == "Concat":
                parts[node.output[0]] = names
    return result
