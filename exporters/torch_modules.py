"""Stand-ins for torch.nn's LSTM, GRU, RNN and their cells: the same arguments and results, computed by the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import weights
from flashrnn_deploy.exporters.calls import tensors_of
from flashrnn_deploy.exporters.layer_calls import LayerCall, record
from flashrnn_deploy.exporters.registry import register
from flashrnn_deploy.exporters.torch_packed import Packed
from flashrnn_deploy.nn import MultiHeadRNN
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.recurrence import call_op, state_dtype

_CELL_STATES = {"lstm": ("h", "c"), "gru": ("h",), "elman": ("h",)}


@register(nn.LSTM)
@register(nn.GRU)
@register(nn.RNN)
def torch_rnn(layer: nn.RNNBase) -> nn.Module:
    """torch.nn.LSTM (``proj_size`` too), GRU and RNN."""
    cell = weights.CELL_OF_TORCH[layer.mode]
    if layer.proj_size:
        return TorchRNN(ProjectedLSTM(layer), cell, layer.batch_first)
    inner = MultiHeadRNN(
        layer.input_size,
        layer.hidden_size,
        cell=cell,
        num_layers=layer.num_layers,
        bidirectional=layer.bidirectional,
        batch_first=layer.batch_first,
        nonlinearity="relu" if layer.mode == "RNN_RELU" else "tanh",
    ).to(next(layer.parameters()))
    for k in range(layer.num_layers):
        weights.of_torch_layer(layer, k).copy_to(inner, k)
    return TorchRNN(inner, cell, layer.batch_first)


@register(nn.LSTMCell)
@register(nn.GRUCell)
@register(nn.RNNCell)
def torch_cell(layer: nn.RNNCellBase) -> nn.Module:
    """torch.nn.LSTMCell, GRUCell and RNNCell: the op with one step."""
    cell = "lstm" if isinstance(layer, nn.LSTMCell) else "gru" if isinstance(layer, nn.GRUCell) else "elman"
    inner = MultiHeadRNN(
        layer.input_size, layer.hidden_size, cell=cell, nonlinearity=getattr(layer, "nonlinearity", "tanh")
    ).to(layer.weight_ih)
    weights.of_torch_cell(cell, layer).copy_to(inner, 0)
    return TorchCell(inner, cell)


class TorchRNN(nn.Module):
    """``forward(input, hx=None)`` of torch.nn.LSTM, GRU and RNN.

    Args:
        inner: called as ``inner(x, states, sequence_lens)``, like ``MultiHeadRNN``.
        cell: its cell.
        batch_first: the layout of ``inner``, and of an input that is not packed.
    """

    records_calls = True
    flashrnn_path = ""

    def __init__(self, inner: nn.Module, cell: str, batch_first: bool) -> None:
        super().__init__()
        self.inner, self.cell, self.batch_first = inner, cell, batch_first

    def forward(self, input: Tensor | Packed, hx: Any = None) -> tuple[Any, Any]:
        lens = None
        if isinstance(input, Packed):
            x, lens = input.padded(self.batch_first), input.lens
        else:
            x = input
        unbatched = x.dim() == 2
        given = tensors_of(hx)
        self._check(x, given)
        y, final = self.inner(self._batched(x, unbatched), self._states(given, unbatched), lens)
        after = [h.to(x.dtype).squeeze(1) if unbatched else h.to(x.dtype) for h in tensors_of(final)]
        if unbatched:
            y = y.squeeze(0 if self.batch_first else 1)
        batch_axis = None if unbatched else 0 if self.batch_first else 1
        time_axis = 0 if unbatched else 1 if self.batch_first else 0
        state_axis = None if unbatched else 1
        record(
            LayerCall(
                self.flashrnn_path, _CELL_STATES[self.cell], given, after, x, batch_axis, time_axis, state_axis, lens
            )
        )
        if isinstance(input, Packed):
            y = input.with_padded(y, self.batch_first)
        return y, (after[0] if len(after) == 1 else tuple(after))

    def _check(self, x: Tensor, given: list[Tensor]) -> None:
        names = _CELL_STATES[self.cell]
        if x.dim() not in (2, 3):
            raise FlashRNNError(f"{self.flashrnn_path}: the input has {x.dim()} axes; 2 (unbatched) or 3 are right")
        if given and len(given) != len(names):
            raise FlashRNNError(f"{self.flashrnn_path}: hx holds {len(given)} tensors, not {', '.join(names)}")
        for state in given:
            if state.dim() != x.dim():
                raise FlashRNNError(
                    f"{self.flashrnn_path}: a state has {state.dim()} axes beside an input with {x.dim()}"
                )

    def _batched(self, x: Tensor, unbatched: bool) -> Tensor:
        return x.unsqueeze(0 if self.batch_first else 1) if unbatched else x

    def _states(self, given: list[Tensor], unbatched: bool) -> Any:
        if not given:
            return None
        states = [h.unsqueeze(1) if unbatched else h for h in given]
        return states[0] if len(states) == 1 else tuple(states)


class TorchCell(nn.Module):
    """``forward(input, hx=None)`` of torch.nn.LSTMCell, GRUCell and RNNCell: [B, in] or [in]."""

    records_calls = True
    flashrnn_path = ""

    def __init__(self, inner: MultiHeadRNN, cell: str) -> None:
        super().__init__()
        self.inner, self.cell = inner, cell

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        unbatched = input.dim() == 1
        if input.dim() not in (1, 2):
            raise FlashRNNError(f"{self.flashrnn_path}: the input has {input.dim()} axes; a cell takes 1 or 2")
        given = tensors_of(hx)
        x = input[None, None] if unbatched else input[None]
        states = [h[None, None] if unbatched else h[None] for h in given]
        _, final = self.inner(x, (states[0] if len(states) == 1 else tuple(states)) if states else None)
        after = [h.to(input.dtype)[0, 0] if unbatched else h.to(input.dtype)[0] for h in tensors_of(final)]
        axis = None if unbatched else 0
        record(LayerCall(self.flashrnn_path, _CELL_STATES[self.cell], given, after, input, axis, None, axis))
        return after[0] if len(after) == 1 else tuple(after)


class ProjectedLSTM(nn.Module):
    """An LSTM with ``proj_size`` as the op on ``u = o tanh(c)``, with ``h = W_hr u`` outside.

    The recurrent weight is ``W_hh W_hr``; ``u`` starts at zero, and a given h0 enters as ``W_hh h0`` in the first step.
    """

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        directions = 2 if layer.bidirectional else 1
        self.num_layers, self.batch_first = layer.num_layers, layer.batch_first
        self.spec = RNNSpec("lstm", 1, layer.hidden_size, directions, layout=int(layer.batch_first))
        suffixes = ["", "_reverse"][:directions]
        for k in range(layer.num_layers):
            w_hh = [getattr(layer, f"weight_hh_l{k}{s}").detach() for s in suffixes]
            w_hr = [getattr(layer, f"weight_hr_l{k}{s}").detach() for s in suffixes]
            ours = weights.of_torch_layer(layer, k, [weights.projected(a, b) for a, b in zip(w_hh, w_hr, strict=True)])
            tensors = {
                "weight_ih": ours.weight_ih,
                "weight_hh": ours.weight_hh,
                "bias": ours.bias,
                "weight_hr": torch.stack(w_hr),
                "weight_h0": torch.stack([weights.input_weight([w], 4) for w in w_hh]),
            }
            for name, tensor in tensors.items():
                self.register_buffer(f"{name}_l{k}", tensor.clone())

    def forward(self, x: Tensor, states: Any = None, lens: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x as for the layer, states h [L*N, B, proj] and c [L*N, B, hidden], lens [B]."""
        N, D = self.spec.num_directions, self.spec.head_dim
        B = x.shape[0 if self.batch_first else 1]
        y, h_n, c_n = x, [], []
        for k in range(self.num_layers):
            part = {n: self.get_buffer(f"{n}_l{k}") for n in ("weight_ih", "weight_hh", "bias", "weight_hr")}
            wx = F.linear(y, part["weight_ih"])
            c = x.new_zeros(N, B, D, dtype=state_dtype(x))
            u = torch.zeros_like(c)
            if states is not None:
                rows = slice(k * N, (k + 1) * N)
                wx = self._add_first(wx, states[0][rows].to(wx.dtype), self.get_buffer(f"weight_h0_l{k}"), lens)
                c = states[1][rows].to(c.dtype)
            y, final = call_op(self.spec, wx, part["weight_hh"], part["bias"], lens, torch.stack([u, c]))
            # [N, *, D] x [N, P, D]: each direction has its own projection
            pieces = [F.linear(part_y, w) for part_y, w in zip(y.chunk(N, -1), part["weight_hr"], strict=True)]
            y = torch.cat(pieces, -1)
            h = final[0].to(y.dtype) @ part["weight_hr"].transpose(1, 2)
            if states is not None and lens is not None:  # a row of no steps keeps the h0 that never was in u
                h = torch.where((lens > 0)[:, None], h, states[0][rows].to(h.dtype))
            h_n.append(h)
            c_n.append(final[1])
        return y, (torch.cat(h_n), torch.cat(c_n))

    def _add_first(self, wx: Tensor, h0: Tensor, weight: Tensor, lens: Tensor | None) -> Tensor:
        """Add ``W_hh h0`` [N, B, 4*D] to the step that each direction takes first."""
        added = h0 @ weight.transpose(1, 2)
        time = 1 if self.batch_first else 0
        pieces = []
        for n, (piece, extra) in enumerate(zip(wx.chunk(self.spec.num_directions, -1), added, strict=True)):
            T = wx.shape[time]
            if n == 0 or lens is None:
                first = piece.narrow(time, 0 if n == 0 else T - 1, 1) + extra.unsqueeze(time)
                rest = piece.narrow(time, 1 if n == 0 else 0, T - 1)
                pieces.append(torch.cat([first, rest] if n == 0 else [rest, first], time))
            else:
                here = torch.arange(T, device=wx.device)[:, None] == lens.clamp(0, T) - 1
                here = here.transpose(0, 1) if self.batch_first else here
                pieces.append(torch.where(here[..., None], piece + extra.unsqueeze(time), piece))
        return torch.cat(pieces, -1)
