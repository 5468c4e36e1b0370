"""Calling a user's module: arguments by parameter, results as flat lists, failures in one line."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flashrnn_deploy.errors import FlashRNNError


def bind(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of ``module.forward`` by parameter.

    Raises:
        FlashRNNError: they do not fit.
    """
    try:
        return dict(inspect.signature(module.forward).bind(*args).arguments)
    except TypeError as error:
        raise FlashRNNError(f"the example args do not fit {type(module).__name__}.forward: {error}") from error


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a nest of tuples, lists and dicts, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def flat_call(module: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that ``module(*args)`` returns, in order.

    Raises:
        FlashRNNError: the call raises.
    """
    return tensors_of(call(module, args))


def varied(args: tuple[Any, ...], seed: int = 0) -> tuple[Any, ...]:
    """``args`` with every float tensor drawn anew from [0.25, 1.25): an example of zeros hides what depends on it."""
    generator = torch.Generator().manual_seed(seed)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return (torch.rand(leaf.shape, generator=generator) + 0.25).to(leaf)

    result: tuple[Any, ...] = pytree.tree_map(one, args)
    return result


def call(module: nn.Module, args: tuple[Any, ...]) -> Any:
    """``module(*args)`` without gradients.

    Raises:
        FlashRNNError: the arguments do not fit, or the call raises.
    """
    bind(module, args)
    try:
        with torch.no_grad():
            return module(*args)
    except FlashRNNError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        raise FlashRNNError(f"the module's forward raised {type(error).__name__}: {message}") from error
