"""Lengths of rows in the comparison of a file with its module: legal ones, and results that torch alone cuts.

``pad_packed_sequence`` without ``total_length`` cuts to the longest row, a file keeps all steps (torch_packed.py). A
result that only carries those steps along is equal up to there; one that computes with them is another result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flashrnn_deploy.cells import Array
from flashrnn_deploy.exporters.observe import Observation, Value


def with_lengths(
    args: tuple[Any, ...], seen: Observation, steps: int | None, shorter: bool
) -> Iterator[tuple[Any, ...]]:
    """``args`` with lengths of at most ``steps``, in the forms that a module may want, the most telling first.

    Lengths as they are show what a module that sorts does with its rows; without ``enforce_sorted=False`` torch packs
    descending ones only.

    Args:
        steps: of the padded input, None where they are fixed.
        shorter: whether torch should cut something: rows half as long come first.
    """
    for divisor in (2, 1) if shorter and seen.cuts else (1,):
        for ordered in (False, True):
            values = iter(seen.inputs)

            def one(leaf: Any, values: Any = values, divisor: int = divisor, ordered: bool = ordered) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                value = next(values)
                if value.is_lens:
                    leaf = leaf if steps is None else leaf.clamp(max=steps)
                    leaf = leaf.sort(descending=True).values if ordered and leaf.dim() == 1 else leaf
                if divisor > 1 and _may_be_lengths(value):
                    leaf = torch.where(leaf > 1, leaf // divisor, leaf)
                return leaf

            result: tuple[Any, ...] = pytree.tree_map(one, args)
            yield result


def _may_be_lengths(value: Value) -> bool:
    """Also an input from which a module computes its lengths, as behind a strided convolution."""
    plain = not value.is_state and not value.carried and value.tensor.dim() == 1
    return value.is_lens or (plain and value.tensor.dtype in (torch.int32, torch.int64))


def common_steps(actual: Array, expected: Sequence[int], seen: Observation) -> Array:
    """The part of a file's result that has the shape ``expected``, where torch cut that; else all of it."""
    if not seen.cuts or actual.ndim != len(expected):
        return actual
    if any(have < want for have, want in zip(actual.shape, expected, strict=True)):
        return actual
    result: Array = actual[tuple(map(slice, expected))]
    return result


def cure(seen: Observation) -> str:
    """What to do about a result that differs, "" where torch cuts nothing."""
    if not seen.cuts:
        return ""
    return (
        f"; pad_packed_sequence{seen.cuts[0]} cuts to the longest row and the file keeps all steps: where "
        f"results depend on their number, pass it total_length=x.shape[{int(seen.batch_first)}]"
    )
