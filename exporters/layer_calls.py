"""What the recurrent layers of a module were called with: recorded while the module runs once in eager mode."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerCall:
    """One call of one recurrent layer or cell, as the user's code made it.

    Args:
        path: dotted name of the layer in the module, "" where a function was called.
        states: names of the states, in the order of ``before`` and ``after``.
        before: initial states as the call gave them; empty where it gave none.
        after: final states as the call returned them.
        x: the input sequence, or the input of one step.
        batch_axis: of ``x``; None without a batch.
        time_axis: of ``x``; None where the call is one step of a cell.
        state_batch_axis: of ``before`` and ``after``; None without a batch.
        lens: valid steps of each row, None where every row is full.
    """

    path: str
    states: tuple[str, ...]
    before: list[Tensor]
    after: list[Tensor]
    x: Tensor
    batch_axis: int | None
    time_axis: int | None
    state_batch_axis: int | None
    lens: Tensor | None = field(default=None)

    @property
    def batch(self) -> int | None:
        return None if self.batch_axis is None else self.x.shape[self.batch_axis]

    @property
    def steps(self) -> int:
        return 1 if self.time_axis is None else self.x.shape[self.time_axis]


@dataclass(frozen=True)
class Recording:
    """The calls in their order, every tensor that was used as the lengths of rows, and whether torch cuts a result."""

    calls: list[LayerCall] = field(default_factory=list)
    lens: list[Tensor] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    """Lines that cut a padded result to its longest row, which a file does not (torch_packed.py)."""


_recorded: ContextVar[Recording | None] = ContextVar("flashrnn_layer_calls", default=None)


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Collect the calls that stand-ins of layers and functions make while this is open."""
    made = Recording()
    token = _recorded.set(made)
    try:
        yield made
    finally:
        _recorded.reset(token)


def record(call: LayerCall) -> None:
    """Add a call to the open ``recording``, if there is one."""
    made = _recorded.get()
    if made is not None:
        made.calls.append(call)
        if call.lens is not None:
            made.lens.append(call.lens)


def record_lengths(lens: Tensor) -> None:
    """Add lengths that no layer takes to the open ``recording``, if there is one."""
    made = _recorded.get()
    if made is not None:
        made.lens.append(lens)


def record_cut() -> None:
    """Add the running line to the open ``recording``, if there is one, as one that cuts a padded result."""
    made = _recorded.get()
    if made is not None:
        made.cuts.append(user_line())


def user_line() -> str:
    """The words " (FILE:LINE in FUNCTION)" of the innermost running line outside of torch and this package."""
    here = Path(__file__).resolve()
    libraries = (Path(torch.__file__).parent, here.parent, here.parents[1] / "flashrnn_deploy")
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_file() and not any(path.resolve().is_relative_to(library) for library in libraries):
            return f" ({path.name}:{frame.lineno} in {frame.name})"
    return ""
