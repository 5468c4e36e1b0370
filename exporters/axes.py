"""Which axes of the inputs may vary, and their names in the file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.calls import tensors_of
from flashrnn_deploy.exporters.observe import Observation, Value

BATCH, TIME = "batch", "time"
Axes = list[dict[int, str]]
"""For each input tensor in flattened order: axis -> name of the dimension."""


def default_axes(seen: Observation) -> Axes:
    """The axes that may vary where nobody says so.

    Axes 0 and 1 of every float input of rank 3 or more, and of every integer input of rank 2 or more, named batch and
    time after the first recurrent layer. Of a state and a lengths input the batch; axis 0 of any other input with one
    or two axes that has the batch's size there. Of what a module keeps between calls, an axis of the batch's size.
    Without a batch, axis 0 of every float input of rank 2 is time. An axis as long as a loop that the user's code makes
    over a layer is time too: it is to be refused, not to be frozen unseen.
    """
    axes: Axes = []
    for value in seen.inputs:
        tensor, rank = value.tensor, value.tensor.dim()
        if value.is_state:
            axes.append({} if value.state_batch_axis is None else {value.state_batch_axis: BATCH})
        elif value.is_lens:
            axes.append({0: BATCH})
        elif value.carried:  # a buffer of the last steps has a fixed number of them
            fits = [axis for axis, size in enumerate(tensor.shape) if size == seen.batch]
            usual = 0 if seen.batch_first else 1
            axes.append({usual if usual in fits else fits[0]: BATCH} if fits and not value.feeds_state else {})
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
        if seen.unrolled > 1 and not value.is_state and not value.is_lens and not value.carried:
            for axis, size in enumerate(tensor.shape):
                if size == seen.unrolled and TIME not in axes[-1].values():
                    axes[-1].setdefault(axis, TIME)
    return axes


def apply_options(seen: Observation, axes: Axes, dynamic: Sequence[str], static: Sequence[str]) -> Axes:
    """Add ``NAME:AXIS=DIM`` entries and take ``NAME:AXIS`` entries away.

    Raises:
        FlashRNNError: an entry is malformed, names no input or an axis that the input does not have, or contradicts
            another.
    """
    axes = [dict(entry) for entry in axes]
    named: dict[tuple[int, int], str] = {}
    for text in dynamic:
        position, _, dim = text.partition("=")
        index, axis = _position(seen.inputs, position, f"--dynamic {text}", "NAME:AXIS=DIM")
        if not dim.isidentifier():
            raise FlashRNNError(f"--dynamic {text}: the dimension needs a name, as in {position}=time")
        if named.setdefault((index, axis), text) != text:
            raise FlashRNNError(
                f"--dynamic {named[index, axis]} and --dynamic {text} contradict each other: leave one out"
            )
        axes[index][axis] = dim
    for text in static:
        index, axis = _position(seen.inputs, text, f"--static {text}", "NAME:AXIS")
        if (index, axis) in named:
            raise FlashRNNError(
                f"--static {text} and --dynamic {named[index, axis]} contradict each other: leave one out"
            )
        axes[index].pop(axis, None)
    return axes


def _position(inputs: list[Value], text: str, label: str, form: str) -> tuple[int, int]:
    name, _, axis = text.rpartition(":")
    names = [value.name for value in inputs]
    if not name or not re.fullmatch("-?[0-9]{1,18}", axis):
        raise FlashRNNError(f"{label}: not of the form {form}")
    if name not in names:
        raise FlashRNNError(f"{label}: no input named '{name}'; the inputs are {', '.join(names)}")
    index, rank = names.index(name), inputs[names.index(name)].tensor.dim()
    if not -rank <= int(axis) < rank:
        raise FlashRNNError(f"{label}: input '{name}' has {rank} axes")
    return index, int(axis) % rank


def time_name(seen: Observation, axes: Axes) -> str:
    """The name of the dimension over which the first recurrent layer runs, where an input has it at its usual place."""
    place = 0 if seen.batch is None or not seen.batch_first else 1
    for value, entry in zip(seen.inputs, axes, strict=True):
        if not value.feeds_state and not value.is_lens and place in entry and value.tensor.dim() > place:
            return entry[place]
    return TIME


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
