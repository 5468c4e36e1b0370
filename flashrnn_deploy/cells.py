"""The four recurrent cells: gate order, biases, states, and one step each in NumPy.

This file is the one home of the gate order. Letters: ``B`` batch, ``G`` gates, ``H`` heads, ``D`` head_dim.
A step takes

* ``x``: the input projection of one time step, ``[G, B, H, D]``,
* ``rh``: ``R h'``, the recurrent product with the previous hidden state, ``[G, B, H, D]``,
* ``b``: the biases, ``[Gb, 1, H, D]``,
* ``state``: the previous states in the order of ``Cell.states``, each ``[B, H, D]``,

and returns the new states in the same order; the first one is the hidden state ``h``. It computes in the dtype of its
arguments. Of ``spec`` it reads ``clip``, which bounds the input of every activation (0 = no bound), ``relu``, which
selects the Elman activation, and ``normalizer_floor``, the smallest sLSTM normalizer.

Sources: LSTM, GRU and Elman follow the ONNX operators LSTM, GRU (``linear_before_reset=1``) and RNN; sLSTM follows
Beck et al., "xLSTM: Extended Long Short-Term Memory" (2024), equations 8 to 17, with the stabilizer state ``m``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from flashrnn_deploy.op import RNNSpec

Array = NDArray[Any]
States = tuple[Array, ...]


def sigmoid(x: Array) -> Array:
    """Logistic function as ``(tanh(x / 2) + 1) / 2``: no overflow for any ``x``."""
    return np.asarray(0.5 * np.tanh(0.5 * x) + 0.5)


def logsigmoid(x: Array) -> Array:
    """``log(sigmoid(x))``, stable at both ends: ``min(x, 0) - log1p(exp(-|x|))``."""
    return np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x)))


def _bound(x: Array, clip: float) -> Array:
    return np.clip(x, -clip, clip) if clip else x


def lstm_step(spec: RNNSpec, x: Array, rh: Array, b: Array, state: States) -> States:
    """``c = f c' + i z``, ``h = o tanh(c)`` with gates i, f, z, o. Not ``c``, but the input of its tanh is clipped."""
    _, c = state
    i, f, z, o = _bound(x + rh + b, spec.clip)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(z)
    return sigmoid(o) * np.tanh(_bound(c, spec.clip)), c


def gru_step(spec: RNNSpec, x: Array, rh: Array, b: Array, state: States) -> States:
    """``n = tanh(x_n + b_n + r (R_n h' + b_q))``, ``h = u h' + (1 - u) n`` with gates r, u, n and biases r, u, n, q."""
    (h,) = state
    r = sigmoid(_bound(x[0] + rh[0] + b[0], spec.clip))
    u = sigmoid(_bound(x[1] + rh[1] + b[1], spec.clip))
    n = np.tanh(_bound(x[2] + b[2] + r * (rh[2] + b[3]), spec.clip))
    return (u * h + (1 - u) * n,)


def elman_step(spec: RNNSpec, x: Array, rh: Array, b: Array, state: States) -> States:
    """``h = tanh(x + R h' + b)``, or ReLU in place of tanh."""
    pre = _bound(x[0] + rh[0] + b[0], spec.clip)
    return (np.maximum(pre, 0) if spec.relu else np.tanh(pre),)


def slstm_step(spec: RNNSpec, x: Array, rh: Array, b: Array, state: States) -> States:
    """Stabilized sLSTM: exponential input gate, normalizer ``n``, running maximum ``m`` of the gate exponents.

    Where the previous normalizer is 0 (an empty state) ``m`` starts at the input gate. The two ``min(1, ...)`` act
    only there, and keep ``inf * 0`` away.
    """
    _, c, n, m = state
    i, f, z, o = x + rh + b
    a = logsigmoid(f) + m
    m = np.where(n == 0, i, np.maximum(i, a))
    with np.errstate(over="ignore"):
        i = np.minimum(1, np.exp(i - m))
        f = np.minimum(1, np.exp(a - m))
    c = f * c + i * np.tanh(z)
    n = np.maximum(f * n + i, spec.normalizer_floor)
    return sigmoid(o) * c / n, c, n, m


@dataclass(frozen=True)
class Cell:
    """One recurrent cell: its names and its step function (see the module's text for the step's shapes)."""

    name: str
    op_type: str
    gates: tuple[str, ...]
    biases: tuple[str, ...]
    states: tuple[str, ...]
    step: Callable[..., States]

    @property
    def num_gates(self) -> int:
        return len(self.gates)

    @property
    def num_biases(self) -> int:
        return len(self.biases)

    @property
    def num_states(self) -> int:
        return len(self.states)


CELLS = {
    cell.name: cell
    for cell in (
        Cell("lstm", "FlashLSTM", ("i", "f", "z", "o"), ("i", "f", "z", "o"), ("h", "c"), lstm_step),
        Cell("gru", "FlashGRU", ("r", "u", "n"), ("r", "u", "n", "q"), ("h",), gru_step),
        Cell("elman", "FlashElman", ("z",), ("z",), ("h",), elman_step),
        Cell("slstm", "FlashSLSTM", ("i", "f", "z", "o"), ("i", "f", "z", "o"), ("h", "c", "n", "m"), slstm_step),
    )
}
CELL_OF_OP = {cell.op_type: cell for cell in CELLS.values()}
