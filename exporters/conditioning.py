"""How much of a difference between two implementations the module itself explains.

A trained network that decides (a flip-flop, say) can turn one rounding of a number into another decision: there two
right implementations differ by any amount, and only the module tells how much.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flashrnn_deploy.exporters.calls import flat_call

DRAWS = 8
FACTOR = 2.0
"""As between a kernel's error and torch's own (compare.py)."""


def sensitivity(module: nn.Module, args: tuple[Any, ...]) -> list[float]:
    """The largest change of each result when weights and float arguments move by up to one rounding of their dtype.

    Args:
        module: in evaluation mode; it is copied.
        args: its arguments.

    Returns:
        one number for each tensor that the module gives, NaN left out; 0 where a result is no float.
    """
    before = flat_call(module, args)
    changes = [0.0] * len(before)
    generator = torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        moved = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.copy_(_moved(parameter, generator))
        after = flat_call(moved, pytree.tree_map(lambda a: _moved(a, generator), args))
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            if a.is_floating_point() and a.shape == b.shape and a.numel():
                changes[i] = max(changes[i], float((a.double() - b.double()).abs().nan_to_num(0.0).max()))
    return changes


def _moved(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    eps = torch.finfo(value.dtype).eps
    factor = 1 + eps * (2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1)
    return (value.detach().double() * factor).to(value.dtype)
