"""The op in PyTorch: a differentiable loop over time, and the operator that stands for it in an exported graph.

Letters as in ``op.py``: ``T`` steps, ``B`` batch, ``N`` directions, ``H`` heads, ``D`` head_dim, ``G`` gates,
``S`` states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flashrnn_deploy.op import DOMAIN, FULL_LENGTH, RNNSpec

# One step of each cell: x (input side and biases) and rh (R h') are [N, H, B, G*D], states [N, H, B, D].
# The equations and their sources are in cells.py; a test holds the two together.


def _bound(x: Tensor, clip: float) -> Tensor:
    return x.clamp(-clip, clip) if clip else x


def _lstm(spec: RNNSpec, x: Tensor, rh: Tensor, q: Tensor | None, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    i, f, z, o = _bound(x + rh, spec.clip).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(z)
    return torch.sigmoid(o) * torch.tanh(_bound(c, spec.clip)), c


def _gru(spec: RNNSpec, x: Tensor, rh: Tensor, q: Tensor | None, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    assert q is not None
    (x_r, x_u, x_n), (rh_r, rh_u, rh_n) = x.chunk(3, -1), rh.chunk(3, -1)
    r, u = torch.sigmoid(_bound(x_r + rh_r, spec.clip)), torch.sigmoid(_bound(x_u + rh_u, spec.clip))
    n = torch.tanh(_bound(x_n + r * (rh_n + q), spec.clip))
    return (u * state[0] + (1 - u) * n,)


def _elman(spec: RNNSpec, x: Tensor, rh: Tensor, q: Tensor | None, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    pre = _bound(x + rh, spec.clip)
    return (torch.relu(pre) if spec.relu else torch.tanh(pre),)


def _slstm(spec: RNNSpec, x: Tensor, rh: Tensor, q: Tensor | None, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _, c, n, m = state
    i, f, z, o = (x + rh).chunk(4, -1)
    a = F.logsigmoid(f) + m
    m = torch.where(n == 0, i, torch.maximum(i, a))
    i, f = torch.exp(i - m).clamp(max=1), torch.exp(a - m).clamp(max=1)
    c = f * c + i * torch.tanh(z)
    n = (f * n + i).clamp(min=spec.normalizer_floor)
    return torch.sigmoid(o) * c / n, c, n, m


_STEPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {"lstm": _lstm, "gru": _gru, "elman": _elman, "slstm": _slstm}


class _ClipGradient(torch.autograd.Function):
    """Identity whose gradient is clamped to [-bound, bound]."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].clamp(-ctx.bound, ctx.bound), None


def state_dtype(x: Tensor) -> torch.dtype:
    """The dtype of states and arithmetic for an input ``x``: float32, or float64 for a float64 ``x``."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def recurrence(
    spec: RNNSpec,
    wx: Tensor,
    r: Tensor,
    b: Tensor,
    sequence_lens: Tensor | None,
    initial_states: Tensor,
    *,
    gradient_clip: float | None = None,
    checkpoint_steps: int | None = None,
    all_states: bool = False,
) -> tuple[Tensor, Tensor]:
    """The op of docs/op.md as a differentiable loop over time.

    Args:
        spec: what the node says; the dtype of the tensors counts, not ``spec.dtype``.
        wx: input projection [T, B, N*H*D*G] ([B, T, ...] in layout 1).
        r: recurrent weight [N, G, H, D, D] as (out, in).
        b: biases [N, Gb, H, D].
        sequence_lens: valid steps of each row, [B] or [1], clamped to 0..T; None means that every row is full.
        initial_states: [S, N, B, H*D].
        gradient_clip: clamp the gradient that flows back through ``R h'`` to this absolute value.
        checkpoint_steps: keep activations only every that many steps and recompute the rest in the backward pass.
        all_states: return every state at every step in place of ``y``: [S, T, N, B, H*D].

    Returns:
        ``y`` [T, B, N*H*D] (layout 1: [B, T, ...]) in the dtype of ``wx``, and ``final_states`` [S, N, B, H*D].
        Computes and keeps states in float32 (float64 where ``wx`` is float64); ``R h'`` takes ``h`` rounded to the
        dtype of ``r``.
    """
    precision = state_dtype(wx)
    step, cell = _STEPS[spec.cell], spec.definition
    N, H, D, G, S = spec.num_directions, spec.num_heads, spec.head_dim, cell.num_gates, cell.num_states
    x = wx.transpose(0, 1) if spec.layout else wx
    T, B = x.shape[:2]
    x = x.to(precision).view(T, B, N, H, D, G).permute(0, 2, 3, 1, 5, 4)  # [T, N, H, B, G, D]
    biases = b.to(precision).permute(0, 2, 1, 3)  # [N, H, Gb, D]
    x = (x + biases[:, :, None, :G]).flatten(-2)
    q = biases[:, :, None, G] if cell.num_biases > G else None
    weight = r.to(precision).permute(0, 2, 4, 1, 3).reshape(N, H, D, G * D)
    lens = None if sequence_lens is None else sequence_lens.clamp(0, T).expand(B)
    valid = None if lens is None else torch.arange(T, device=wx.device)[:, None] < lens
    source = _source_steps(spec, T, B, lens, wx.device)
    if source is not None:
        x = _take_steps(x, source)

    def run_steps(x: Tensor, valid: Tensor | None, *state: Tensor) -> tuple[Tensor, ...]:
        rows = []
        for t, x_t in enumerate(x.unbind(0)):
            h = state[0] if r.dtype == precision else state[0].to(r.dtype).to(precision)
            if gradient_clip is not None:
                h = _ClipGradient.apply(h, gradient_clip)  # type: ignore[no-untyped-call]
            new = step(spec, x_t, h @ weight, q, state)
            if valid is not None:
                ok = valid[t][:, None]
                state = tuple(torch.where(ok, a, old) for a, old in zip(new, state, strict=True))
                rows.append(state if all_states else (torch.where(ok, new[0], 0),))
            else:
                state = new
                rows.append(state if all_states else new[:1])
        return (torch.stack([torch.stack(row) for row in rows], 1), *state)

    state = tuple(initial_states.to(precision).view(S, N, B, H, D).transpose(2, 3).unbind(0))
    outputs = []
    size = checkpoint_steps or T
    for start in range(0, T, max(size, 1)):
        x_piece, valid_piece = x[start : start + size], None if valid is None else valid[start : start + size]
        if checkpoint_steps:
            done = checkpoint(run_steps, x_piece, valid_piece, *state, use_reentrant=False)
        else:
            done = run_steps(x_piece, valid_piece, *state)
        outputs.append(done[0])
        state = done[1:]
    final = torch.stack(state).transpose(2, 3).reshape(S, N, B, H * D)
    y = torch.cat(outputs, 1) if outputs else x.new_zeros(S if all_states else 1, 0, N, H, B, D)
    if all_states:
        return y.transpose(3, 4).reshape(S, T, N, B, H * D), final
    y = y[0] if source is None else _take_steps(y[0], source)
    y = y.permute(0, 3, 1, 2, 4).reshape(T, B, N * H * D).to(wx.dtype)
    return (y.transpose(0, 1) if spec.layout else y), final


def _source_steps(spec: RNNSpec, T: int, B: int, lens: Tensor | None, device: torch.device) -> Tensor | None:
    """[T, N, B]: the time step that each step of the loop works on, or None where that is every step itself.

    A backward direction runs forward over rows reversed within their own lengths; reversing is its own inverse.
    """
    backward = [(n + spec.reverse) % 2 == 1 for n in range(spec.num_directions)]
    if not any(backward):
        return None
    t = torch.arange(T, device=device)[:, None].expand(T, B)
    last = torch.full((B,), T - 1, device=device) if lens is None else lens - 1
    reversed_t = torch.where(t <= last, last - t, t)
    return torch.stack([reversed_t if back else t for back in backward], 1)


def _take_steps(x: Tensor, source: Tensor) -> Tensor:
    """Reorder ``x`` [T, N, H, B, ...] in time by ``source`` [T, N, B]."""
    N, B = source.shape[1:]
    n, row = torch.arange(N, device=x.device)[:, None], torch.arange(B, device=x.device)
    return x.transpose(2, 3)[source, n, row].transpose(2, 3)


# The custom operator stands in an exported graph where the loop would be unrolled. One operator serves the four cells.


@torch.library.custom_op(f"{DOMAIN}::rnn", mutates_args=())
def rnn_operator(
    wx: Tensor,
    r: Tensor,
    b: Tensor,
    sequence_lens: Tensor,
    initial_states: Tensor,
    cell: str,
    layout: int,
    reverse: int,
    clip: float,
    relu: int,
    normalizer_floor: float,
) -> tuple[Tensor, Tensor]:
    """``recurrence`` as one operator, see there; inference only."""
    N, _, H, D, _ = r.shape
    spec = RNNSpec(cell, H, D, N, "float32", layout, reverse, clip, relu, normalizer_floor)
    y, final_states = recurrence(spec, wx, r, b, sequence_lens, initial_states)
    return y.clone(), final_states.clone()


@rnn_operator.register_fake
def _(
    wx: Tensor, r: Tensor, b: Tensor, sequence_lens: Tensor, initial_states: Tensor, *attributes: Any
) -> tuple[Tensor, Tensor]:
    N, _, H, D, _ = r.shape
    return wx.new_empty(*wx.shape[:2], N * H * D), torch.empty_like(initial_states)


def call_op(
    spec: RNNSpec,
    wx: Tensor,
    r: Tensor,
    b: Tensor,
    sequence_lens: Tensor | None,
    initial_states: Tensor,
    *,
    gradient_clip: float | None = None,
    checkpoint_steps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``recurrence``, or the operator that stands for it while a graph is being exported."""
    if not torch.compiler.is_exporting():
        with torch.autocast(wx.device.type, enabled=False):  # the op has its own rounding points
            return recurrence(
                spec,
                wx,
                r,
                b,
                sequence_lens,
                initial_states,
                gradient_clip=gradient_clip,
                checkpoint_steps=checkpoint_steps,
            )
    if sequence_lens is None:
        sequence_lens = torch.full((1,), FULL_LENGTH, dtype=torch.int32)
    not_attributes = ("num_heads", "head_dim", "num_directions", "dtype")
    attributes = {name: value for name, value in asdict(spec).items() if name not in not_attributes}
    result: tuple[Tensor, Tensor] = torch.ops.flashrnn.rnn(
        wx, r, b.float(), sequence_lens.to(torch.int32), initial_states.float(), **attributes
    )
    return result
