"""Drop-in for the ``flashrnn`` function of the FlashRNN package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.recurrence import recurrence

# FlashRNN's own packing: gates of Wx, of R and biases, and which of ours each one is.
_FLASHRNN_GATES = {
    "lstm": ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)),
    "slstm": ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)),
    "elman": ((0,), (0,), (0,)),
    "gru": ((0, 1, 2), (1, 2, 0), (1, 2, 3, 0)),  # Wx: r u n; R: n r u; b: q r u n
}
_CONFIG_DEFAULTS = {
    "gradient_recurrent_cut": (False,),
    "forward_clipval": (None,),
    "input_shape": ("BTGHD",),
    "output_shape": ("SBTHD",),
    "recurrent_shape": ("GHDP",),
    "bias_shape": ("GHD",),
    "initial_val": (0.0, 0),
}


def flashrnn(
    Wx: Tensor,
    R: Tensor,
    b: Tensor,
    states: Tensor | None = None,
    function: str = "lstm",
    config: Any = None,
    backend: str | None = None,
    dtype: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Drop-in for ``flashrnn.flashrnn`` of the FlashRNN package: one layer, gates already projected.

    Args:
        Wx: [B, T, G, H, D].
        R: [G, H, D, D] as (gate, head, out, in); the GRU's gates are n, r, u here, r, u, n in ``Wx``.
        b: [Gb, H, D]; the GRU's are q, r, u, n, with q the bias inside the reset.
        states: [S, B, 1, H, D], default zero.
        function: "lstm", "gru", "elman" or "slstm" (whose normalizer is at least 1).
        config: a ``FlashRNNConfig``; its function and gradient_recurrent_clipval are used, a field that would change
            the result otherwise is refused by name.
        backend: ignored; it selects one of FlashRNN's kernels, which compute the same.
        dtype: cast ``Wx`` and ``R`` to this dtype first; default: the dtype of ``Wx``.

    Returns:
        every state at every step [S, B, T, H, D], and the last states [S, B, 1, H, D], in the dtype of ``Wx``.

    Raises:
        FlashRNNError: unknown function, shapes that do not fit, or an unsupported field in ``config``.
    """
    clip = None
    if config is not None:
        function, clip = config.function, config.gradient_recurrent_clipval
        for field, allowed in _CONFIG_DEFAULTS.items():
            value = getattr(config, field, allowed[0])
            if value not in allowed:
                raise FlashRNNError(f"flashrnn config: {field}={value!r} is not supported, only {allowed[0]!r}")
    if function not in CELLS:
        raise FlashRNNError(f"flashrnn function {function!r} is not one of {', '.join(CELLS)}")
    if dtype is not None:
        Wx, R = Wx.to(getattr(torch, dtype)), R.to(getattr(torch, dtype))
    cell = CELLS[function]
    if Wx.dim() != 5 or Wx.shape[2] != cell.num_gates:
        raise FlashRNNError(f"flashrnn {function}: Wx must be [B, T, {cell.num_gates}, H, D], not {list(Wx.shape)}")
    B, T, G, H, D = Wx.shape
    for name, tensor, want in (("R", R, (G, H, D, D)), ("b", b, (cell.num_biases, H, D))):
        if tuple(tensor.shape) != want:
            raise FlashRNNError(f"flashrnn {function}: {name} must be {list(want)}, not {list(tensor.shape)}")
    spec = RNNSpec(function, H, D, layout=1, normalizer_floor=1.0 if function == "slstm" else 0.0)
    in_gates, r_gates, biases = _FLASHRNN_GATES[function]
    wx = Wx[:, :, list(in_gates)].permute(0, 1, 3, 4, 2).reshape(B, T, H * D * G)
    S = cell.num_states
    if states is None:
        states = Wx.new_zeros(S, B, 1, H, D)
    initial = states.reshape(S, 1, B, H * D)
    r = R[list(r_gates)][None].to(wx.dtype)
    every, last = recurrence(spec, wx, r, b[list(biases)][None], None, initial, gradient_clip=clip, all_states=True)
    every = every.view(S, T, B, H, D).transpose(1, 2)
    return every.to(Wx.dtype), last.view(S, B, 1, H, D).to(Wx.dtype)
