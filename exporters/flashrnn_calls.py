"""Calls of ``flashrnn`` in a module's forward: the FlashRNN package's function, and our drop-in.

In eager mode the function returns every state at every step. In an export only the hidden sequence and the last states
exist: another part of the result is refused, with the line that takes it. ``backend`` and ``dtype`` choose among
FlashRNN's kernels and say nothing about the model: the dtype of a file is that of its weights and inputs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashrnn_deploy import dropin
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.layer_calls import LayerCall, record, user_line
from flashrnn_deploy.exporters.replaced import replaced_code
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.recurrence import call_op, recurrence


class AllStates:
    """Stands for the states at all steps [S, B, T, H, D], of which an export has the first one and the last step."""

    def __init__(self, hidden: Tensor, last: Tensor) -> None:
        self.hidden, self.last = hidden, last
        self.shape = (last.shape[0], *hidden.shape)
        self.dtype, self.device = hidden.dtype, hidden.device

    def __getitem__(self, index: Any) -> Tensor:
        items = index if isinstance(index, tuple) else (index,)
        if type(items[0]) is int and items[0] == 0:
            return self.hidden[items[1:]] if len(items) > 1 else self.hidden
        whole = slice(None)
        if len(items) >= 3 and all(i == whole for i in items[:2]) and items[2] in (-1, slice(-1, None)):
            last = self.last.squeeze(2) if items[2] == -1 else self.last
            axes = (whole,) * (2 if items[2] == -1 else 3)
            return last[(*axes, *items[3:])] if len(items) > 3 else last
        self._refuse(f"index {index}")

    def __iter__(self) -> Any:
        self._refuse("iteration")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"'{name}'")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls._refuse(f"'{getattr(function, '__name__', function)}'")

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise FlashRNNError(
            f"flashrnn: {what} of the states at all steps{user_line()}: an export has only the hidden sequence "
            "states[0] and the last states, the second result"
        )


class _Pending:
    """What ``dropin.flashrnn`` reshapes and casts: y [B, T, H*D] and the last states [S, N, B, H*D]."""

    def __init__(self, y: Tensor, last: Tensor) -> None:
        self.y, self.last = y, last

    def view(self, S: int, T: int, B: int, H: int, D: int) -> _Pending:
        return _Pending(self.y.view(B, T, H, D), self.last.view(S, B, 1, H, D))

    def transpose(self, _: int, __: int) -> _Pending:
        return self

    def to(self, dtype: torch.dtype) -> Tensor | AllStates:
        y, last = self.y.to(dtype), self.last.to(dtype)
        return y[None] if last.shape[0] == 1 else AllStates(y, last)


def _recurrence(
    spec: RNNSpec, wx: Tensor, r: Tensor, b: Tensor, lens: Tensor | None, initial: Tensor, **_: Any
) -> tuple[_Pending, Tensor]:
    """``recurrence(..., all_states=True)`` as ``dropin.flashrnn`` calls it, by the op."""
    y, last = call_op(spec, wx, r, b, lens, initial)
    record(LayerCall("", ("states",), [initial], [last], wx, 0, 1, 2))
    return _Pending(y, last), last


def _package_function(Wx, R, b, states=None, function="lstm", config=None, backend="cuda_fused", dtype="bfloat16"):  # type: ignore[no-untyped-def]
    from flashrnn_deploy.dropin import flashrnn as drop_in  # this runs with the globals of the package

    return drop_in(Wx, R, b, states, function, config)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """While open, the package's function is the drop-in: it needs no GPU, and computes what their vanilla code does."""
    package = sys.modules.get("flashrnn.flashrnn.flashrnn")
    function = getattr(package, "flashrnn", None)
    if function is None or not hasattr(function, "__code__"):
        yield
        return
    with replaced_code(function, _package_function):
        yield


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """While open, both functions call the op."""
    module: Any = dropin
    module.recurrence = _recurrence
    try:
        with eager():
            yield
    finally:
        module.recurrence = recurrence
