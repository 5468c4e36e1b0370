"""The op in NumPy, one time step after the other: the judge of every backend.

``run`` is the specification of docs/op.md in its shortest form. In float64 (the default) nothing is rounded. With
``precision=numpy.float32`` it keeps the op's rounding points instead: the product ``R h'`` takes ``h`` rounded to the
dtype of ``r``, everything else is float32, and ``y`` is rounded to the dtype of ``wx``. That second form measures how
large the error of a correct implementation is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashrnn_deploy.cells import Array
from flashrnn_deploy.op import RNNSpec


def run(
    spec: RNNSpec,
    wx: Array,
    r: Array,
    b: Array,
    sequence_lens: Array,
    initial_states: Array,
    precision: Any = np.float64,
) -> tuple[Array, Array]:
    """Run one op over a whole sequence.

    Args:
        spec: what the node says.
        wx: input projection [T, B, N*H*D*G] ([B, T, ...] in layout 1), any float dtype.
        r: recurrent weight [N, G, H, D, D] as (out, in), any float dtype.
        b: biases [N, Gb, H, D].
        sequence_lens: valid steps of each row, [B] or [1], integers; clamped to 0..T.
        initial_states: [S, N, B, H*D].
        precision: numpy.float64 (no rounding) or numpy.float32 (the op's own rounding points).

    Returns:
        ``y`` [T, B, N*H*D] (layout 1: [B, T, ...]), 0 behind a row's end, and ``final_states`` [S, N, B, H*D]; both in
        ``precision``, except that ``y`` has the dtype of ``wx`` where ``precision`` is float32.

    Raises:
        ValueError: a shape does not fit the others.
    """
    if spec.layout:
        wx = np.swapaxes(wx, 0, 1)
    T, B = wx.shape[:2]
    cell, N, H, D = spec.definition, spec.num_directions, spec.num_heads, spec.head_dim
    x = np.moveaxis(wx.reshape(T, B, N, H, D, cell.num_gates), -1, 1).astype(precision)  # [T, G, B, N, H, D]
    states = initial_states.reshape(cell.num_states, N, B, H, D).astype(precision)
    lens = np.clip(np.broadcast_to(sequence_lens, (B,)), 0, T)
    rounds = precision != np.float64
    y = np.zeros((T, B, N, H, D), precision)
    for n in range(N):
        weight = np.swapaxes(r[n], -1, -2).astype(precision)  # [G, H, D in, D out]
        bias = b[n, :, None].astype(precision)
        state = tuple(states[:, n])
        backward = (n + spec.reverse) % 2 == 1
        for t in reversed(range(T)) if backward else range(T):
            h = state[0].astype(r.dtype).astype(precision) if rounds else state[0]
            rh = np.swapaxes(np.swapaxes(h, 0, 1) @ weight, 1, 2)
            new = cell.step(spec, x[t, :, :, n], rh, bias, state)
            valid = (t < lens)[:, None, None]
            state = tuple(np.where(valid, a, b) for a, b in zip(new, state, strict=True))
            y[t, :, n] = np.where(valid, new[0], 0)
        states[:, n] = state
    y = y.reshape(T, B, N * H * D)
    if spec.layout:
        y = np.swapaxes(y, 0, 1)
    return (y.astype(wx.dtype) if rounds else y), states.reshape(initial_states.shape)
