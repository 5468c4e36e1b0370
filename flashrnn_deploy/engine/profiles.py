"""Optimization profiles: the smallest, the usual and the largest shape of every input of a model.

Axes of one name have one size; an axis without a name that runs over the batch or time follows the one that has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import printable
from flashrnn_deploy.graph import free_inputs
from flashrnn_deploy.shapes import Tensor, axes_of, describe, flashrnn_nodes, node_label, tensors_of, value_tensor

Range = tuple[int, int, int]
"""Smallest, usual and largest size of an axis."""

RANGES: dict[str, Range] = {"time": (1, 100, 512), "batch": (1, 4, 16), "": (1, 16, 256)}
"""What a dynamic axis covers where the user says nothing, by what it runs over."""

MAX_ELEMENTS = 2**31 - 1
"""Of one tensor. Source: TensorRT's developer guide, "Layers and tensors": a tensor has fewer than 2^31 elements."""

_SHAPE = re.compile("[0-9]{1,18}(?:[xX,][0-9]{1,18})*")


@dataclass(frozen=True)
class Profile:
    """The shapes that one input may have."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def to_json(self) -> dict[str, list[int]]:
        return {"min": list(self.min), "opt": list(self.opt), "max": list(self.max)}


@dataclass
class _Axis:
    """One size that may be dynamic, shared by all axes of its name."""

    role: str
    range: Range | None = None
    given: str = field(default="")


def make_profiles(model: onnx.ModelProto, options: Sequence[str] = ()) -> dict[str, Profile]:
    """One profile per input that must be fed, in graph order.

    Args:
        model: the model.
        options: each ``NAME=MIN:OPT:MAX`` with shapes such as ``1x1x64:100x4x64:512x16x64`` for an input, or sizes such
            as ``1:100:512`` for an axis, by its name. One shape or size alone is all three.

    Raises:
        FlashRNNError: an option cannot be read, names nothing, contradicts the model or another option; an input has
            no known rank, or its largest shape, or that of a layer's wx, is larger than any tensor of TensorRT.
    """
    inputs = {value.name: value_tensor(value) for value in free_inputs(model.graph)}
    dims, axes = _named_axes(model, inputs)
    for option in options:
        name, equals, text = option.rpartition("=")
        triple = text.split(":")
        if not equals or not name or len(triple) not in (1, 3) or not all(map(_SHAPE.fullmatch, triple)):
            raise FlashRNNError(f"--shapes {option}: write it as NAME=MIN:OPT:MAX, for example {_example(dims, axes)}")
        shapes = [
            tuple(int(size) for size in re.split("[xX,]", part)) for part in triple * (1 if len(triple) == 3 else 3)
        ]
        if name in inputs:
            _give_shapes(option, describe(name, inputs[name]), dims[name], shapes, axes)
        elif name in axes:
            if any(len(shape) > 1 for shape in shapes):
                small, usual, large = RANGES[axes[name].role]
                raise FlashRNNError(
                    f"--shapes {option}: {printable(name)} is an axis and takes sizes, for example "
                    f"{printable(name)}={small}:{usual}:{large}"
                )
            _give_range(option, axes[name], (shapes[0][0], shapes[1][0], shapes[2][0]))
        else:
            named = [key for key in axes if not key.startswith("?")]
            raise FlashRNNError(
                f"--shapes {option}: the model has no such input or axis; its inputs are "
                f"{'; '.join(describe(n, t) for n, t in inputs.items())}, its axes {', '.join(map(printable, named))}"
            )
    profiles = {name: _profile(keys, axes) for name, keys in dims.items()}
    for name, profile in profiles.items():
        _check_size(f"the largest shape {list(profile.max)} of the input '{printable(name)}'", profile.max)
    _check_projections(model, axes)
    return profiles


def _check_projections(model: onnx.ModelProto, axes: Mapping[str, _Axis]) -> None:
    """The largest wx of each FlashRNN op whose axes shape inference can name is no larger than a tensor may be."""
    largest = {name: axis.range[2] if axis.range else RANGES[axis.role][2] for name, axis in axes.items()}
    tensors = tensors_of(model)
    for node, _ in flashrnn_nodes(model, tensors):
        wx = tensors.get(node.input[0], Tensor(0, None)).shape or (None,)
        sizes = [largest.get(d) if isinstance(d, str) else d for d in wx]
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes):
            _check_size(f"the largest input wx of the {node_label(node)}, {known},", known)


def _check_size(what: str, sizes: Sequence[int]) -> None:
    if (elements := math.prod(sizes)) > MAX_ELEMENTS:
        raise FlashRNNError(
            f"{what} has {elements} elements, and a tensor of TensorRT at most {MAX_ELEMENTS}: give smaller sizes with "
            "--shapes"
        )


def _example(dims: Mapping[str, Sequence[int | str]], axes: Mapping[str, _Axis]) -> str:
    """An option that the model takes: the default of its first input."""
    name, keys = next(iter(dims.items()), ("x", [1]))
    profile = _profile(keys, axes)
    return f"{printable(name)}=" + ":".join("x".join(map(str, s)) for s in (profile.min, profile.opt, profile.max))


def _named_axes(
    model: onnx.ModelProto, inputs: Mapping[str, Tensor]
) -> tuple[dict[str, list[int | str]], dict[str, _Axis]]:
    """Each input's axes as sizes and names, and what is known of each name; ``?`` starts the names made up here."""
    known = axes_of(model, tensors_of(model))
    axes: dict[str, _Axis] = {}
    roles: dict[tuple[str, int], str] = {}
    for name, tensor in inputs.items():
        if tensor.shape is None:
            raise FlashRNNError(f"the input '{printable(name)}' has no known rank: an engine cannot be built for it")
        for axis, dim in enumerate(tensor.shape):
            role = "time" if axis == known[name].time else "batch" if axis == known[name].batch else ""
            roles[name, axis] = role
            if isinstance(dim, str):
                entry = axes.setdefault(dim, _Axis(role))
                entry.role = entry.role or role
    dims: dict[str, list[int | str]] = {}
    for name, tensor in inputs.items():
        dims[name] = []
        for axis, dim in enumerate(tensor.shape or ()):
            if dim is None:
                role = roles[name, axis]
                same = [key for key, entry in axes.items() if role and entry.role == role]
                dim = same[0] if len(same) == 1 else f"?{name}:{axis}"
                axes.setdefault(dim, _Axis(role))
            dims[name].append(dim)
    return dims, axes


def _give_shapes(
    option: str, described: str, dims: Sequence[int | str], shapes: Sequence[tuple[int, ...]], axes: dict[str, _Axis]
) -> None:
    for shape in shapes:
        fits = len(shape) == len(dims) and all(isinstance(d, str) or d == s for d, s in zip(dims, shape, strict=True))
        if not fits:
            raise FlashRNNError(f"--shapes {option}: {list(shape)} does not fit the model's {described}")
    for dim, *sizes in zip(dims, *shapes, strict=True):
        if isinstance(dim, str):
            _give_range(option, axes[dim], (sizes[0], sizes[1], sizes[2]))


def _give_range(option: str, axis: _Axis, sizes: Range) -> None:
    if not sizes[0] <= sizes[1] <= sizes[2]:
        raise FlashRNNError(f"--shapes {option}: {':'.join(map(str, sizes))} is not MIN:OPT:MAX in rising order")
    if axis.range not in (None, sizes):
        raise FlashRNNError(
            f"--shapes {option} and --shapes {axis.given} give one axis the sizes {':'.join(map(str, sizes))} and "
            f"{':'.join(map(str, axis.range or ()))}: axes of one name have one size"
        )
    axis.range, axis.given = sizes, option


def _profile(dims: Sequence[int | str], axes: Mapping[str, _Axis]) -> Profile:
    ranges = [(d, d, d) if isinstance(d, int) else axes[d].range or RANGES[axes[d].role] for d in dims]
    small, usual, large = (tuple(r[i] for r in ranges) for i in range(3))
    return Profile(small, usual, large)
