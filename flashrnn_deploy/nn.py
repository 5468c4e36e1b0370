"""The recurrent layers in PyTorch: trainable, and exported as one FlashRNN op per layer.

``MultiHeadRNN`` is the layer; ``flashrnn`` is a drop-in for the function of that name in the FlashRNN package. Under
``torch.export`` a layer calls the operator ``torch.ops.flashrnn.rnn``, which the exporters translate to ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashrnn_deploy.dropin import flashrnn
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.recurrence import call_op, state_dtype

__all__ = ["MultiHeadRNN", "flashrnn"]

States = Tensor | tuple[Tensor, ...]


class MultiHeadRNN(nn.Module):
    """A stack of recurrent layers with a block-diagonal (multi-head) recurrent weight.

    With one head it computes what ``torch.nn.LSTM``, ``GRU`` and ``RNN`` compute. Every layer has one input projection
    for both directions, ``weight_ih_l{k}`` [N*H*D*G, in] with the gate innermost, a recurrent weight
    ``weight_hh_l{k}`` [N, G, H, D, D] as (out, in), and biases ``bias_l{k}`` [N, Gb, H, D]; gate order as in
    ``cells.py``.

    Args:
        input_size: features of ``x``.
        hidden_size: ``H * D``, units of one direction.
        num_heads: ``H``; divides ``hidden_size``.
        cell: "lstm", "gru", "elman" or "slstm".
        num_layers: layers, each fed by the ``y`` of the one before.
        bidirectional: run every layer in both directions, ``y`` holding forward then backward units.
        batch_first: ``x`` and ``y`` are [B, T, ...] instead of [T, B, ...]. States never change shape.
        bias: learn biases; without them they are zero.
        dropout: probability of dropout on the ``y`` of every layer but the last, in training.
        nonlinearity: "tanh" or "relu", for the elman cell.
        normalizer_floor: smallest sLSTM normalizer: 1.0 as in FlashRNN, 0.0 as in xLSTM.
        clip: bound of the input of every activation, 0 = none; not for the sLSTM.
        gradient_clip: clamp the gradient that flows back through ``R h'``, the recurrent signal, to +-this value.
        checkpoint_steps: recompute activations in time chunks of that many steps to save memory in training.

    Raises:
        FlashRNNError: a value is outside the contract of docs/op.md, or heads do not divide the hidden size.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_heads: int = 1,
        cell: str = "lstm",
        num_layers: int = 1,
        *,
        bidirectional: bool = False,
        batch_first: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        nonlinearity: str = "tanh",
        normalizer_floor: float | None = None,
        clip: float = 0.0,
        gradient_clip: float | None = None,
        checkpoint_steps: int | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise FlashRNNError(f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}")
        if nonlinearity not in ("tanh", "relu"):
            raise FlashRNNError(f"nonlinearity is 'tanh' or 'relu', not {nonlinearity!r}")
        if normalizer_floor is None:
            normalizer_floor = 1.0 if cell == "slstm" else 0.0
        if num_layers < 1:
            raise FlashRNNError(f"num_layers must be at least 1, not {num_layers}")
        if checkpoint_steps is not None and checkpoint_steps < 1:
            raise FlashRNNError(f"checkpoint_steps must be at least 1, not {checkpoint_steps}")
        self.spec = RNNSpec(
            cell,
            num_heads,
            hidden_size // num_heads,
            num_directions=2 if bidirectional else 1,
            layout=int(batch_first),
            clip=clip,
            relu=int(nonlinearity == "relu"),
            normalizer_floor=normalizer_floor,
        )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first, self.dropout = batch_first, dropout
        self.gradient_clip, self.checkpoint_steps = gradient_clip, checkpoint_steps
        shapes, N = self.spec.shapes(0, 0), self.spec.num_directions
        for k in range(num_layers):
            features = N * hidden_size if k else input_size
            self.register_parameter(f"weight_ih_l{k}", nn.Parameter(torch.empty(shapes["wx"][2], features)))
            self.register_parameter(f"weight_hh_l{k}", nn.Parameter(torch.empty(shapes["r"])))
            zeros = torch.zeros(shapes["b"])
            if bias:
                self.register_parameter(f"bias_l{k}", nn.Parameter(zeros))
            else:
                self.register_buffer(f"bias_l{k}", zeros, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(D), torch.nn's rule per head; forget gates of LSTM and sLSTM start open (bias 1)."""
        bound = 1 / math.sqrt(self.spec.head_dim)
        with torch.no_grad():
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -bound, bound)
            for name, parameter in self.named_parameters():
                if name.startswith("bias") and "f" in self.spec.definition.gates:
                    parameter[:, self.spec.definition.gates.index("f")] = 1.0

    def extra_repr(self) -> str:
        s = self.spec
        return (
            f"{self.input_size}, {self.hidden_size}, num_heads={s.num_heads}, cell={s.cell!r}, "
            f"num_layers={self.num_layers}, bidirectional={s.num_directions == 2}, batch_first={self.batch_first}"
        )

    def forward(
        self, x: Tensor, states: States | None = None, sequence_lens: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """Run the whole sequence.

        Args:
            x: [T, B, input_size] ([B, T, ...] with batch_first).
            states: the initial states, in the order of the cell (lstm: h, c; slstm: h, c, n, m), each
                [num_layers * N, B, hidden_size] ordered l0 forward, l0 backward, l1 forward, ...; a cell with one state
                takes the tensor itself. Default zero.
            sequence_lens: [B] integers, valid steps of each row, clamped to 0..T; default all full.

        Returns:
            ``y`` [T, B, N * hidden_size] and the final states in the form of ``states``, float32.
        """
        spec, N, L = self.spec, self.spec.num_directions, self.num_layers
        S = spec.definition.num_states
        self._check_input(x)
        B = x.shape[0 if self.batch_first else 1]
        if states is None:
            packed = x.new_zeros((S, L * N, B, self.hidden_size), dtype=state_dtype(x))
        else:
            given = (states,) if isinstance(states, Tensor) else tuple(states)
            self._check_states(given, B)
            packed = torch.stack([s.to(state_dtype(x)) for s in given])
        final, y = [], x
        for k in range(L):
            weight, r = self.get_parameter(f"weight_ih_l{k}"), self.get_parameter(f"weight_hh_l{k}")
            wx = F.linear(y, weight)
            y, last = call_op(
                spec,
                wx,
                r.to(wx.dtype),
                getattr(self, f"bias_l{k}"),
                sequence_lens,
                packed[:, k * N : (k + 1) * N],
                gradient_clip=self.gradient_clip,
                checkpoint_steps=self.checkpoint_steps,
            )
            final.append(last)
            if self.dropout and k < L - 1:
                y = F.dropout(y, self.dropout, self.training)
        result = torch.cat(final, 1).unbind(0)
        return y, (result[0] if S == 1 else tuple(result))

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[2] != self.input_size:
            order = "[B, T, {}]" if self.batch_first else "[T, B, {}]"
            raise FlashRNNError(f"x must be {order.format(self.input_size)}, not {list(x.shape)}")

    def _check_states(self, states: Sequence[Tensor], B: int) -> None:
        names = self.spec.definition.states
        want = (self.num_layers * self.spec.num_directions, B, self.hidden_size)
        if len(states) != len(names):
            raise FlashRNNError(
                f"the {self.spec.cell} cell has the states {', '.join(names)}, but {len(states)} are given"
            )
        for name, state in zip(names, states, strict=True):
            if state.dim() != 3 or any(a != b for a, b in zip(state.shape, want, strict=True)):
                raise FlashRNNError(f"state {name} must be {list(want)}, not {list(state.shape)}")
