"""Which axes of the inputs may vary, and their names in the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.calls import bind, tensors_of
from flashrnn_deploy.exporters.observe import Observation, Value

BATCH, TIME = "batch", "time"
Axes = list[dict[int, str]]
"""For each input tensor in flattened order: axis -> name of the dimension."""


def default_axes(seen: Observation) -> Axes:
    """The axes that may vary where nobody says so.

    Axes 0 and 1 of every float input of rank 3 or more, and of every integer input of rank 2 or more, named batch and
    time after the first recurrent layer. Of a state and a lengths input the batch; axis 0 of any other input with one
    or two axes that has the batch's size there. Without a batch, axis 0 of every float input of rank 2 is time. An axis
    as long as a loop that the user's code makes over a layer is time too: it is to be refused, not to be frozen unseen.
    """
    axes: Axes = []
    for value in seen.inputs:
        tensor, rank = value.tensor, value.tensor.dim()
        if value.is_state:
            axes.append({} if value.state_batch_axis is None else {value.state_batch_axis: BATCH})
        elif value.is_lens:
            axes.append({0: BATCH})
        elif value.feeds_state:
            axes.append({})
        elif seen.layers and seen.batch is None:
            axes.append({0: TIME} if rank >= 2 and (seen.has_time or tensor.is_floating_point()) else {})
        elif rank >= (3 if tensor.is_floating_point() else 2):
            batch_first = seen.batch_first if seen.has_time else tensor.shape[0] == seen.batch
            axes.append(dict(enumerate((BATCH, TIME) if batch_first else (TIME, BATCH))))
        elif rank >= 1 and tensor.shape[0] == seen.batch:
            axes.append({0: BATCH})
        else:
            axes.append({})
        if seen.unrolled > 1 and not value.is_state and not value.is_lens:
            for axis, size in enumerate(tensor.shape):
                if size == seen.unrolled and TIME not in axes[-1].values():
                    axes[-1].setdefault(axis, TIME)
    return axes


def given_axes(seen: Observation, module: nn.Module, args: tuple[Any, ...], shapes: Any) -> Axes:
    """The axes of a ``dynamic_shapes`` in the form that ``torch.export.export`` takes."""
    bound = bind(module, args)
    per_parameter = shapes if isinstance(shapes, dict) else dict(zip(bound, shapes, strict=False))
    if unknown := [name for name in per_parameter if name not in bound]:
        raise FlashRNNError(f"dynamic_shapes names {unknown[0]!r}; forward was called with {', '.join(bound)}")
    axes: Axes = []
    values = iter(seen.inputs)
    for parameter, argument in bound.items():
        _read_shapes(argument, per_parameter.get(parameter), values, axes)
    return axes


def _read_shapes(tree: Any, shapes: Any, values: Any, axes: Axes) -> None:
    if isinstance(tree, Tensor):
        value = next(values)
        entries = shapes if isinstance(shapes, dict) else dict(enumerate(shapes or ()))
        axes.append(
            {
                axis: getattr(dim, "__name__", None) or f"{value.name}_dim{axis}"
                for axis, dim in entries.items()
                if dim is not None and dim is not torch.export.Dim.STATIC and not isinstance(dim, int)
            }
        )
        return
    if isinstance(tree, dict):
        for key, item in tree.items():
            _read_shapes(item, (shapes or {}).get(key), values, axes)
    elif isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            _read_shapes(item, shapes[i] if shapes is not None else None, values, axes)


def apply_options(seen: Observation, axes: Axes, dynamic: Sequence[str], static: Sequence[str]) -> Axes:
    """Add ``NAME:AXIS=DIM`` entries and take ``NAME:AXIS`` entries away.

    Raises:
        FlashRNNError: an entry is malformed, names no input, or an axis that the input does not have.
    """
    axes = [dict(entry) for entry in axes]
    for text in dynamic:
        position, _, dim = text.partition("=")
        index, axis = _position(seen.inputs, position, f"--dynamic {text}", "NAME:AXIS=DIM")
        if not dim.isidentifier():
            raise FlashRNNError(f"--dynamic {text}: the dimension needs a name, as in {position}=time")
        axes[index][axis] = dim
    for text in static:
        index, axis = _position(seen.inputs, text, f"--static {text}", "NAME:AXIS")
        axes[index].pop(axis, None)
    return axes


def _position(inputs: list[Value], text: str, label: str, form: str) -> tuple[int, int]:
    name, _, axis = text.rpartition(":")
    names = [value.name for value in inputs]
    if not name or not axis.lstrip("-").isdigit():
        raise FlashRNNError(f"{label}: not of the form {form}")
    if name not in names:
        raise FlashRNNError(f"{label}: no input named '{name}'; the inputs are {', '.join(names)}")
    index, rank = names.index(name), inputs[names.index(name)].tensor.dim()
    if not -rank <= int(axis) < rank:
        raise FlashRNNError(f"{label}: input '{name}' has {rank} axes")
    return index, int(axis) % rank


def sizes_of(seen: Observation, axes: Axes) -> dict[str, int]:
    """The example's size of each named dimension.

    Raises:
        FlashRNNError: two axes of one name have different sizes.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for value, entry in zip(seen.inputs, axes, strict=True):
        for axis, name in entry.items():
            size, where = value.tensor.shape[axis], f"{value.name}:{axis}"
            other, other_where = sizes.setdefault(name, (size, where))
            if other != size:
                raise FlashRNNError(
                    f"axes {other_where} and {where} are both named '{name}' but the example has {other} and {size}; "
                    f"name one of them otherwise with --dynamic {where}=NAME, or fix it with --static {where}"
                )
    return {name: size for name, (size, _) in sizes.items()}


def resize(args: tuple[Any, ...], axes: Axes, sizes: dict[str, int]) -> tuple[Any, ...]:
    """``args`` with every named axis brought to its size in ``sizes``, by repeating or cutting entries."""
    if len(tensors_of(args)) != len(axes):
        raise ValueError("axes and args do not belong together")
    entries = iter(axes)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for axis, name in next(entries).items():
            if name in sizes and sizes[name] != leaf.shape[axis]:
                leaf = leaf.index_select(axis, torch.arange(sizes[name], device=leaf.device) % leaf.shape[axis])
        return leaf

    result: tuple[Any, ...] = pytree.tree_map(one, args)
    return result
