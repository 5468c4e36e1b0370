"""Weights of other implementations in the order of the op: the one place where weights are re-ordered.

Letters as in ``op.py``: ``N`` directions, ``H`` heads, ``D`` head_dim, ``G`` gates. The op's order is

* input weight [N*H*D*G, in]: rows by direction, head, unit, gate, the gate innermost;
* recurrent weight [N, G, H, D, D]: (out, in) of each gate and head;
* biases [N, Gb, H, D].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashrnn_deploy.nn import MultiHeadRNN

CELL_OF_TORCH = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "elman", "RNN_RELU": "elman"}
"""``nn.RNNBase.mode`` -> cell. torch's gate orders (i f g o; r z n) are the op's (i f z o; r u n)."""

_Read = Callable[[str], list[Tensor]]


@dataclass(frozen=True)
class Weights:
    """One layer in the order of the op."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias: Tensor

    def copy_to(self, layer: MultiHeadRNN, k: int) -> None:
        """Overwrite layer ``k`` of a ``MultiHeadRNN``."""
        with torch.no_grad():
            for name in ("weight_ih", "weight_hh", "bias"):
                getattr(layer, f"{name}_l{k}").copy_(getattr(self, name))


def input_weight(directions: Sequence[Tensor], num_gates: int) -> Tensor:
    """torch's weight_ih [G*H*D, in] of each direction -> [N*H*D*G, in]."""
    return torch.cat([w.reshape(num_gates, -1, w.shape[1]).transpose(0, 1).flatten(0, 1) for w in directions])


def recurrent_weight(directions: Sequence[Tensor], num_gates: int) -> Tensor:
    """torch's weight_hh [G*D, D] of each direction -> [N, G, 1, D, D]."""
    return torch.stack([w.reshape(num_gates, 1, -1, w.shape[1]) for w in directions])


def biases(cell: str, b_ih: Sequence[Tensor], b_hh: Sequence[Tensor], num_gates: int) -> Tensor:
    """torch's bias_ih and bias_hh [G*D] of each direction -> [N, Gb, 1, D].

    They are summed, but for the GRU's candidate: its recurrent bias is inside the reset, a bias of its own in the op.
    """
    rows = []
    for i, h in zip(b_ih, b_hh, strict=True):
        i, h = i.reshape(num_gates, 1, -1), h.reshape(num_gates, 1, -1)
        rows.append(torch.cat([i[:2] + h[:2], i[2:], h[2:]]) if cell == "gru" else i + h)
    return torch.stack(rows)


def of_torch_layer(layer: nn.RNNBase, k: int, w_hh: Sequence[Tensor] | None = None) -> Weights:
    """Layer ``k`` of a torch.nn LSTM, GRU or RNN; ``w_hh`` replaces its recurrent weights."""
    suffixes = [f"_l{k}", f"_l{k}_reverse"][: 2 if layer.bidirectional else 1]

    def of(name: str) -> list[Tensor]:
        return [getattr(layer, f"{name}{s}").detach() for s in suffixes]

    return _of_torch(CELL_OF_TORCH[layer.mode], of("weight_ih"), w_hh or of("weight_hh"), of, layer.bias)


def of_torch_cell(cell: str, layer: nn.RNNCellBase) -> Weights:
    """A torch.nn LSTMCell, GRUCell or RNNCell, which computes the op's ``cell``."""

    def of(name: str) -> list[Tensor]:
        return [getattr(layer, name).detach()]

    return _of_torch(cell, of("weight_ih"), of("weight_hh"), of, layer.bias)


def _of_torch(cell: str, w_ih: list[Tensor], w_hh: Sequence[Tensor], of: _Read, has_bias: bool) -> Weights:
    num_gates = w_hh[0].shape[0] // w_hh[0].shape[1]
    zeros = [torch.zeros_like(w[:, 0]) for w in w_hh]
    b_ih, b_hh = (of("bias_ih"), of("bias_hh")) if has_bias else (zeros, zeros)
    return Weights(
        input_weight(w_ih, num_gates), recurrent_weight(w_hh, num_gates), biases(cell, b_ih, b_hh, num_gates)
    )


def projected(w_hh: Tensor, w_hr: Tensor) -> Tensor:
    """The recurrent weight [4*D, D] of an LSTM with projection on its unprojected ``u = o tanh(c)``.

    ``W_hh h = W_hh (W_hr u)``: exact but for rounding, hence the product in float64.
    """
    return (w_hh.detach().double() @ w_hr.detach().double()).to(w_hh.dtype)


def of_xlstm_cell(kernel: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """xLSTM's external recurrent kernel [H, D(in), G, D(out)] and bias [H, G, D] -> r [1, G, H, D, D], b [1, G, H, D].

    These are its backend-independent forms, made by the cell's own ``_recurrent_kernel_int2ext`` and
    ``_bias_int2ext``. Gates are i, f, z, o in both.
    """
    return kernel.detach().permute(2, 0, 3, 1)[None], bias.detach().permute(1, 0, 2)[None]


def gates_innermost(x: Tensor, num_gates: int) -> Tensor:
    """An input projection [..., G * units] with the gate outermost -> [..., units * G]."""
    return x.view(*x.shape[:-1], num_gates, -1).transpose(-1, -2).flatten(-2)
