"""Which modules the exporter knows how to replace, and how anyone adds one.

Write a function from your layer to a module that takes and gives the same and computes with ``MultiHeadRNN`` (or with
``recurrence.call_op``), and register it::

    @register(MyGRU)
    def my_gru(layer: MyGRU) -> nn.Module:
        ...

Raise ``FlashRNNError`` in it for options that cannot be expressed; the layer is then refused by that message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from flashrnn_deploy.errors import FlashRNNError

Build = Callable[[Any], nn.Module]
_B = TypeVar("_B", bound=Build)
_builders: dict[str, Build] = {}


def register(layer_type: type[nn.Module] | str) -> Callable[[_B], _B]:
    """Decorator: use the function for layers of this type, and of subclasses that keep its ``forward``.

    Args:
        layer_type: the class, or "module.Class" for one whose package is imported only where it is used.
            A later registration of the same type replaces the earlier one.
    """
    name = layer_type if isinstance(layer_type, str) else _name(layer_type)

    def add(build: _B) -> _B:
        _builders[name] = build
        return build

    return add


def registered() -> list[str]:
    """The full names of all registered types."""
    return sorted(_builders)


def find(layer: nn.Module) -> Build | None:
    """The function for ``layer``, None for a module that is not registered.

    Raises:
        FlashRNNError: the layer's class changes ``forward`` of a registered one: replacing it would drop the change.
    """
    for base in type(layer).__mro__:
        build = _builders.get(_name(base))
        if build is None:
            continue
        if "forward" in vars(layer) or type(layer).forward is not getattr(base, "forward", None):
            raise FlashRNNError(
                f"{type(layer).__name__} changes the forward of {base.__name__}, so that it cannot stand for one; add "
                "it with flashrnn_deploy.exporters.registry.register"
            )
        return build
    return None


def _name(layer_type: type) -> str:
    return f"{layer_type.__module__}.{layer_type.__qualname__}"
