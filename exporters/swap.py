"""Replace the recurrent layers of a module by ones that call the op, and functions likewise, for one export.

A layer stays where it is, with its class, its attributes and its hooks, since the user's code may look at all of them
(``isinstance(self.rnn, nn.LSTM)``, ``self.rnn.hidden_size``). Only its ``forward`` changes: it calls a child, named
``CHILD``, that holds the re-ordered weights. The old weights are read by nothing and do not get into a file.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import flashrnn_calls, registry, torch_modules, torch_packed, xlstm_modules

BUILT_IN = (torch_modules, xlstm_modules)
"""Modules whose import registers the layers that the exporter knows from the start."""

CHILD = "_flashrnn_stand_in"


def swap(module: nn.Module) -> list[str]:
    """Replace every registered layer of ``module`` in place.

    Returns:
        the paths of the replaced layers.

    Raises:
        FlashRNNError: a layer is refused; the message starts with its path.
    """
    swapped: list[str] = []
    for path, layer in list(module.named_modules()):
        if any(path.startswith(f"{outer}." if outer else "") for outer in swapped):
            continue  # inside a layer that was replaced as a whole
        try:
            build = registry.find(layer)
            child = build(layer) if build else None
        except FlashRNNError as error:
            raise FlashRNNError(f"{path or 'the module'}: {error}") from error
        if child is None:
            continue
        vars(child)["flashrnn_path"] = path
        layer._modules[CHILD] = child.eval()  # past torch's own __setattr__, which tracks an RNN's weights
        vars(layer)["forward"] = types.MethodType(_forward_to_child(type(layer).forward), layer)
        swapped.append(path)
    return swapped


def _forward_to_child(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # inspect.signature still tells the names of the arguments
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._modules[CHILD](*args, **kwargs)  # type: ignore[misc]

    return forward


def visible_path(path: str) -> str:
    """The path of the user's layer that holds ``path``: the inner parts of a stand-in belong to its layer."""
    parts = path.split(".")
    return ".".join(parts[: parts.index(CHILD)]) if CHILD in parts else path


@contextlib.contextmanager
def runnable_calls() -> Iterator[None]:
    """While open, functions that need a GPU elsewhere compute the same anywhere, in eager mode."""
    with flashrnn_calls.eager():
        yield


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """While open, functions that torch cannot trace are replaced by ones that call the op."""
    with torch_packed.stand_ins(), flashrnn_calls.stand_ins():
        yield
