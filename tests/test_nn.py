"""MultiHeadRNN, the recurrence and the flashrnn drop-in: equations, gradients, and torch.nn at one head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import pytest
import torch
from torch import nn

from flashrnn_deploy import reference
from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.nn import MultiHeadRNN, flashrnn
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.recurrence import recurrence

VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_directions": 2},
    {"reverse": 1},
    {"layout": 1},
    {"layout": 1, "num_directions": 2},
    {"num_heads": 1},
    {"head_dim": 1},
]


def specs() -> list[RNNSpec]:
    base = {"num_heads": 3, "head_dim": 5}
    found = [RNNSpec(cell, **{**base, **variant}) for cell in CELLS for variant in VARIANTS]
    found += [RNNSpec(cell, 3, 5, clip=0.4) for cell in ("lstm", "gru", "elman")]
    return [*found, RNNSpec("elman", 3, 5, relu=1), RNNSpec("slstm", 3, 5, normalizer_floor=1.0)]


def doubles(spec: RNNSpec, T: int, B: int, lens: Any = None) -> list[torch.Tensor]:
    tensors = [torch.from_numpy(a) for a in cases.tensors(spec, T, B, lens).values()]
    return [t.double() if t.is_floating_point() else t for t in tensors]


@pytest.mark.parametrize("spec", specs(), ids=str)
@pytest.mark.parametrize(("T", "B", "lens"), [(7, 4, [7, 0, 3, 9]), (1, 1, [2**31 - 1]), (0, 2, None), (3, 0, None)])
def test_recurrence_is_the_reference(spec: RNNSpec, T: int, B: int, lens: Any) -> None:
    wx, r, b, sequence_lens, states = doubles(spec, T, B, lens)
    expected = reference.run(spec, *(t.numpy() for t in (wx, r, b, sequence_lens, states)))
    for options in ({}, {"checkpoint_steps": 2, "gradient_clip": 1.0}):
        actual = recurrence(spec, wx, r, b, sequence_lens, states, **options)
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a.numpy(), e, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_recurrence_rounds_h_alone(dtype: torch.dtype) -> None:
    """In half precision the product takes a rounded h; states stay float32."""
    spec = RNNSpec("lstm", 2, 8, dtype=str(dtype).removeprefix("torch."))
    arrays = cases.tensors(spec, 20, 3)
    tensors = [
        torch.from_numpy(a.astype(np.float32)).to(dtype) if name in ("wx", "r") else torch.from_numpy(a)
        for name, a in arrays.items()
    ]
    y, final = recurrence(spec, *tensors)
    y_expected, final_expected = reference.run(spec, *arrays.values(), precision=np.float32)
    assert (y.dtype, final.dtype) == (dtype, torch.float32)
    np.testing.assert_allclose(final.numpy(), final_expected, atol=2e-6)
    np.testing.assert_array_equal(y.float().numpy()[-1], final[0, 0].to(dtype).float().numpy())
    assert np.abs(y.float().numpy() - y_expected.astype(np.float32)).max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("checkpoint_steps", [None, 2])
def test_gradients(cell: str, checkpoint_steps: int | None) -> None:
    spec = RNNSpec(cell, 2, 2, num_directions=2, normalizer_floor=0.1 if cell == "slstm" else 0.0)
    wx, r, b, lens, states = doubles(spec, 4, 2, [4, 2])
    leaves = [t.requires_grad_() for t in (wx, r, b, states)]

    def call(*inputs: torch.Tensor) -> Any:
        return recurrence(spec, *inputs[:3], lens, inputs[3], checkpoint_steps=checkpoint_steps)

    assert torch.autograd.gradcheck(call, leaves)


def test_gradient_clip_bounds_the_recurrent_signal() -> None:
    """Only what flows back through R h' is clamped: the state of step 0 gets at most the bound per path."""
    spec = RNNSpec("elman", 1, 3, relu=1)
    wx, r, b, _, states = doubles(spec, 6, 2)
    gradients = {}
    for clip in (None, 1e9, 1e-3):
        leaf = states.clone().requires_grad_()
        y, _ = recurrence(spec, wx.abs() + 1, r.abs() * 3, b.abs(), None, leaf, gradient_clip=clip)
        (y.sum() * 100).backward()
        gradients[clip] = leaf.grad
    assert torch.equal(gradients[None], gradients[1e9])
    assert gradients[None].abs().max() > 1
    assert 0 < gradients[1e-3].abs().max() <= 1e-3


TORCH = {"lstm": nn.LSTM, "gru": nn.GRU, "elman": nn.RNN}


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2}, {"bidirectional": True, "num_layers": 2}, {"batch_first": True}]
)
@pytest.mark.parametrize("cell", TORCH)
def test_one_head_is_torch(cell: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = TORCH[cell](4, 6, **options).double()
    ours = MultiHeadRNN(4, 6, cell=cell, **options).double()
    N, G = ours.spec.num_directions, ours.spec.definition.num_gates
    for k in range(ours.num_layers):
        w, r, b = [], [], []
        for suffix in [f"_l{k}", f"_l{k}_reverse"][:N]:
            w.append(getattr(theirs, f"weight_ih{suffix}").detach().view(G, 6, -1).transpose(0, 1).flatten(0, 1))
            r.append(getattr(theirs, f"weight_hh{suffix}").detach().view(G, 1, 6, 6))
            b_ih, b_hh = (getattr(theirs, f"bias_{side}{suffix}").detach().view(G, 1, 6) for side in ("ih", "hh"))
            b.append(torch.stack([*(b_ih + b_hh)[:2], b_ih[2], b_hh[2]]) if cell == "gru" else b_ih + b_hh)
        for name, value in (
            (f"weight_ih_l{k}", torch.cat(w)),
            (f"weight_hh_l{k}", torch.stack(r)),
            (f"bias_l{k}", torch.stack(b)),
        ):
            getattr(ours, name).data.copy_(value)
    x = torch.randn(5, 3, 4, dtype=torch.double)
    B = x.shape[0] if ours.batch_first else x.shape[1]
    shape = (ours.num_layers * N, B, 6)
    given = tuple(torch.randn(shape, dtype=torch.double) for _ in ours.spec.definition.states)
    states = given if cell == "lstm" else given[0]
    for arguments in ((x,), (x, states)):
        (y, final), (y_expected, final_expected) = ours(*arguments), theirs(*arguments)
        torch.testing.assert_close(y, y_expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(final, final_expected, atol=1e-12, rtol=0)


def test_dropout_acts_between_layers_in_training_only() -> None:
    torch.manual_seed(0)
    net, x = MultiHeadRNN(4, 6, num_layers=2, dropout=0.5), torch.randn(5, 3, 4)
    assert not torch.equal(net(x)[0], net(x)[0])
    net.eval()
    assert torch.equal(net(x)[0], net(x)[0])
    single = MultiHeadRNN(4, 6, num_layers=1, dropout=0.5)
    assert torch.equal(single(x)[0], single(x)[0])


def test_checkpointing_and_autocast_do_not_change_the_result() -> None:
    torch.manual_seed(0)
    plain = MultiHeadRNN(4, 8, num_heads=2, cell="slstm")
    chunked = MultiHeadRNN(4, 8, num_heads=2, cell="slstm", checkpoint_steps=3)
    chunked.load_state_dict(plain.state_dict())
    x = torch.randn(10, 2, 4)
    for net in (plain, chunked):
        net(x)[0].square().sum().backward()
    for a, b in zip(plain.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, (_, c, *_) = plain(x)
    assert (y.dtype, c.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.float(), plain(x)[0], atol=3e-2, rtol=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiHeadRNN(4, 6, num_heads=4), "hidden_size 6 is not a multiple of num_heads 4"),
        (lambda: MultiHeadRNN(4, 6, cell="lsdm"), "unknown cell"),
        (lambda: MultiHeadRNN(4, 6, cell="slstm", clip=1.0), "has no clip"),
        (lambda: MultiHeadRNN(4, 6, nonlinearity="gelu"), "'tanh' or 'relu'"),
        (lambda: MultiHeadRNN(4, 6, nonlinearity="relu"), "relu belongs to the elman cell"),
        (lambda: MultiHeadRNN(4, 6, num_layers=0), "num_layers"),
        (lambda: MultiHeadRNN(4, 6, checkpoint_steps=0), "checkpoint_steps"),
        (lambda: MultiHeadRNN(4, 6)(torch.zeros(5, 3, 5)), r"x must be \[T, B, 4\]"),
        (
            lambda: MultiHeadRNN(4, 6)(torch.zeros(5, 3, 4), torch.zeros(1, 3, 6)),
            "has the states h, c, but 1 are given",
        ),
        (lambda: MultiHeadRNN(4, 6, cell="gru")(torch.zeros(5, 3, 4), torch.zeros(1, 2, 6)), r"must be \[1, 3, 6\]"),
    ],
)
def test_refusals(make: Any, words: str) -> None:
    with pytest.raises(FlashRNNError, match=words):
        make()


def packed(function: str, dtype: torch.dtype = torch.double) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    cell, (B, T, H, D) = CELLS[function], (3, 5, 2, 4)
    states = torch.randn(cell.num_states, B, 1, H, D, dtype=dtype).abs() + 1
    Wx, b = torch.randn(B, T, cell.num_gates, H, D, dtype=dtype), torch.randn(cell.num_biases, H, D, dtype=dtype)
    return Wx, torch.randn(cell.num_gates, H, D, D, dtype=dtype) / 2, b, states


@pytest.mark.parametrize("function", CELLS)
def test_drop_in_returns_every_state(function: str) -> None:
    """One call against steps of one, and against the reference for the last h, in FlashRNN's own packing."""
    Wx, R, b, states = packed(function)
    every, last = flashrnn(Wx, R, b, states, function)
    S, B, T, H, D = CELLS[function].num_states, 3, 5, 2, 4
    assert (every.shape, last.shape) == ((S, B, T, H, D), (S, B, 1, H, D))
    for t in range(T):
        now, states = flashrnn(Wx[:, t : t + 1], R, b, states, function)
        torch.testing.assert_close(now, every[:, :, t : t + 1])
        torch.testing.assert_close(states, now)
    torch.testing.assert_close(states, last)


def test_drop_in_gru_packing() -> None:
    """FlashRNN's GRU: Wx holds r u n, R holds n r u, b holds q r u n."""
    Wx, R, b, states = packed("gru")
    every, _ = flashrnn(Wx, R, b, states, "gru")
    h = states[0, :, 0]
    for t in range(Wx.shape[1]):
        x = Wx[:, t]
        rh = torch.einsum("bhp,ghdp->gbhd", h, R)
        r, u = torch.sigmoid(x[:, 0] + rh[1] + b[1]), torch.sigmoid(x[:, 1] + rh[2] + b[2])
        h = u * h + (1 - u) * torch.tanh(x[:, 2] + b[3] + r * (rh[0] + b[0]))
        torch.testing.assert_close(every[0, :, t], h)


def test_drop_in_options() -> None:
    Wx, R, b, _ = packed("lstm", torch.float32)
    default, _ = flashrnn(Wx, R, b)
    zeros, _ = flashrnn(Wx, R, b, torch.zeros(2, 3, 1, 2, 4), "lstm", backend="cuda_fused")
    assert torch.equal(default, zeros)
    half, _ = flashrnn(Wx, R, b, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), default, atol=3e-2, rtol=0)
    config = SimpleNamespace(function="lstm", gradient_recurrent_clipval=0.1, forward_clipval=None)
    assert torch.equal(flashrnn(Wx, R, b, config=config)[0], default)
    for change in ({"forward_clipval": 1.0}, {"input_shape": "TBGHD"}, {"initial_val": 0.5}):
        changed = SimpleNamespace(function="lstm", gradient_recurrent_clipval=None, **change)
        with pytest.raises(FlashRNNError, match=next(iter(change))):
            flashrnn(Wx, R, b, config=changed)
    for bad, words in (((Wx[0], R, b), "Wx"), ((Wx, R[:3], b), "R must be"), ((Wx, R, b[:2]), "b must be")):
        with pytest.raises(FlashRNNError, match=words):
            flashrnn(*bad)
    with pytest.raises(FlashRNNError, match="rnn"):
        flashrnn(Wx, R, b, function="rnn")
