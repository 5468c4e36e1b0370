"""torch.nn's recurrent layers and cells: exported, and equal to themselves at sizes that were never traced."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from exported import check, ops, outputs_of, rare, rows, trained
from torch import nn
from torch.nn.utils import prune

from flashrnn_deploy import streaming
from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.chunks import run_chunks
from flashrnn_deploy.exporters import export
from flashrnn_deploy.exporters.calls import tensors_of
from flashrnn_deploy.exporters.validate import to_numpy
from flashrnn_deploy.exporters.weights import biases
from flashrnn_deploy.graph import shape_of
from flashrnn_deploy.shapes import axes_of
from flashrnn_deploy.shapes import tensors_of as graph_tensors

IN, HIDDEN = 5, 6
SIZES = ((1, 1), (11, 2), (4, 5))  # (T, B); traced at (7, 3)
KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
OPS = {"lstm": "FlashLSTM", "gru": "FlashGRU", "rnn": "FlashElman", "relu": "FlashElman"}


def arguments(layer: nn.RNNBase, T: int, B: int, states: bool) -> tuple[Any, ...]:
    x = rows(1, B, T, IN) if layer.batch_first else rows(1, T, B, IN)
    if not states:
        return (x,)
    N = layer.num_layers * (2 if layer.bidirectional else 1)
    h = rows(2, N, B, layer.proj_size or HIDDEN)
    return (x, (h, rows(3, N, B, HIDDEN))) if isinstance(layer, nn.LSTM) else (x, h)


def check_layer(kind: str, states: bool = False, atol: float = 1e-5, **options: Any) -> Any:
    scale = 0.3 if kind == "relu" else 0.7  # a ReLU network with larger weights explodes
    layer = trained(KINDS[kind](IN, HIDDEN, **options), scale=scale)
    others = [arguments(layer, T, B, states) for T, B in SIZES]
    result = check(layer, arguments(layer, 7, 3, states), others, atol)
    assert ops(result) == [OPS[kind]] * layer.num_layers
    lead = ["batch", "time"] if layer.batch_first else ["time", "batch"]
    assert [i["shape"] for i in result.report["inputs"][:1]] == [[*lead, IN]]
    assert result.report["outputs"][0]["shape"][:2] == lead
    return result


MATRIX = [(k, n, b) for k, n, b in itertools.product(KINDS, (1, 2), (False, True))]
QUICK = [("lstm", 2, True), ("gru", 2, False), ("rnn", 1, False)]


@pytest.mark.parametrize(("kind", "num_layers", "bidirectional"), QUICK)
def test_default_state(kind: str, num_layers: int, bidirectional: bool) -> None:
    check_layer(kind, num_layers=num_layers, bidirectional=bidirectional)


@pytest.mark.full
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "num_layers", "bidirectional"), MATRIX)
def test_matrix(kind: str, num_layers: int, bidirectional: bool, bias: bool, batch_first: bool, states: bool) -> None:
    check_layer(kind, states, num_layers=num_layers, bidirectional=bidirectional, bias=bias, batch_first=batch_first)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("relu", {"bidirectional": True, "batch_first": True}),
        ("lstm", {"bidirectional": True, "num_layers": 2}),
        rare("gru", {"bidirectional": True, "num_layers": 2}),
    ],
)
def test_final_states_in_torch_order(kind: str, options: dict[str, Any]) -> None:
    """l0 forward, l0 backward, l1 forward, l1 backward: every row of h_n differs, and equals torch's."""
    result = check_layer(kind, states=True, **options)
    names = ["hx"] if kind != "lstm" else ["hx_h", "hx_c"]
    assert result.report["states"] == {n: f"{n}_out" for n in names}


@pytest.mark.parametrize("bias", [True, rare(False)])
def test_gru_reset_form(bias: bool) -> None:
    """The candidate's recurrent bias is inside the reset: summing the two biases is wrong by 0.1."""
    layer = trained(nn.GRU(IN, HIDDEN, bias=bias))
    if bias:
        layer.bias_hh_l0.data[2 * HIDDEN :] = 1.5
    check(layer, arguments(layer, 7, 3, True), [arguments(layer, 11, 2, True)], atol=1e-6)


def test_candidate_biases_are_never_summed() -> None:
    b_ih, b_hh = torch.arange(6.0), torch.arange(6.0) * 10
    assert biases("gru", [b_ih], [b_hh], 3).flatten().tolist() == [0, 11, 22, 33, 4, 5, 40, 50]
    assert biases("lstm", [b_ih[:4]], [b_hh[:4]], 4).flatten().tolist() == [0, 11, 22, 33]


@pytest.mark.parametrize("states", [rare(False), True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_projection(bidirectional: bool, states: bool) -> None:
    """h of size 3 and c of size 6; a given h0 acts on the first step only, the last one of a backward row."""
    result = check_layer("lstm", states, proj_size=3, bidirectional=bidirectional, num_layers=2 - bidirectional)
    N = 2
    sizes = [o["shape"] for o in result.report["outputs"][1:]]
    assert sizes == [[N, "batch", 3], [N, "batch", 6]]


def test_projection_in_chunks() -> None:
    layer = trained(nn.LSTM(IN, HIDDEN, proj_size=3))
    model = export(layer, (rows(0, 7, 3, IN),), expose_states=True).model
    axes, pairs = axes_of(model, graph_tensors(model)), streaming.state_pairs(model)
    assert len(pairs) == 1
    feeds = {"input": rows(5, 20, 2, IN).numpy(), next(iter(pairs)): np.zeros((2, 1, 2, HIDDEN), np.float32)}
    runner = make_runner("onnxruntime", model)
    parts = run_chunks(runner, feeds, 7, axes, pairs, {})
    with torch.no_grad():
        np.testing.assert_allclose(parts["output"], layer(rows(5, 20, 2, IN))[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["lstm", "relu"])
def test_unbatched(kind: str) -> None:
    layer = trained(KINDS[kind](IN, HIDDEN, 2), scale=0.4)

    def args(T: int) -> tuple[Any, ...]:
        h = rows(2, 2, HIDDEN)
        return rows(1, T, IN), (h, rows(3, 2, HIDDEN)) if kind == "lstm" else h

    result = check(layer, args(7), [args(1), args(11)])
    assert result.report["inputs"][0]["shape"] == ["time", IN]
    assert result.report["inputs"][1]["shape"] == [2, HIDDEN]


CELLS: dict[str, Any] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn": nn.RNNCell,
    "relu": lambda *a: nn.RNNCell(*a, nonlinearity="relu"),
}


@pytest.mark.parametrize("kind", ["lstm", "gru", "relu", rare("rnn")])
def test_cells_step(kind: str) -> None:
    """A model of one step: the batch is dynamic, states are named and paired."""
    cell = trained(CELLS[kind](IN, HIDDEN))

    def args(B: int) -> tuple[Any, ...]:
        h = rows(2, B, HIDDEN)
        return (rows(1, B, IN), (h, rows(3, B, HIDDEN)) if kind == "lstm" else h)

    result = check(cell, args(3), [args(1), args(5)])
    names = ["hx_h", "hx_c"] if kind == "lstm" else ["hx"]
    assert result.report["states"] == {n: f"{n}_out" for n in names}
    assert [i["shape"] for i in result.report["inputs"]] == [["batch", IN], *[["batch", HIDDEN]] * len(names)]
    assert ops(result) == [OPS[kind]]


def test_cell_without_batch_or_state() -> None:
    result = check(trained(nn.GRUCell(IN, HIDDEN)), (rows(1, IN),), [(rows(2, IN),)])
    assert result.report["inputs"][0]["shape"] == [IN]


def test_two_cells_on_top_of_each_other() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.LSTMCell(IN, HIDDEN), nn.LSTMCell(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor, states: list[Any]) -> Any:
            first = self.a(x, states[0])
            second = self.b(first[0], states[1])
            return second[0] * 2, [first, second]

    def args(B: int) -> tuple[Any, ...]:
        return rows(0, B, IN), [(rows(k, B, HIDDEN), rows(k + 5, B, HIDDEN)) for k in (1, 2)]

    result = check(trained(Stack()), args(3), [args(1), args(4)])
    assert len(result.report["states"]) == 4
    assert result.report["states"]["states_0_h"] == "states_0_h_out"


def test_dropout_is_that_of_eval() -> None:
    layer = trained(nn.LSTM(IN, HIDDEN, 2, dropout=0.9))
    layer.train()
    result = export(layer, (rows(1, 7, 3, IN),))
    assert layer.training
    with torch.no_grad():
        expected = layer.eval()(rows(2, 9, 2, IN))[0].numpy()
    np.testing.assert_allclose(outputs_of(result, (rows(2, 9, 2, IN),))["output"], expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [rare("float16"), "bfloat16"])
def test_half_precision(dtype: str) -> None:
    """States stay float32 in the file, h_n feeds a half-precision layer behind, and the module is the judge."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(IN, HIDDEN), nn.Linear(HIDDEN, 2)

        def forward(self, x: torch.Tensor, state: Any) -> Any:
            y, (h, c) = self.rnn(x, state)
            return self.out(h[-1]), y, (h, c)

    args = (rows(1, 7, 3, IN), (rows(2, 1, 3, HIDDEN), rows(3, 1, 3, HIDDEN)))
    result = export(trained(Net()), args, dtype=dtype)
    kinds = {v["name"]: v["dtype"] for v in (*result.report["inputs"], *result.report["outputs"])}
    assert {n for n, d in kinds.items() if d == "FLOAT"} == {"state_h", "state_c", "state_h_out", "state_c_out"}
    assert result.report["states"] == {"state_h": "state_h_out", "state_c": "state_c_out"}


def test_normalised_weights() -> None:
    """weight_norm makes the weight on every read: the file holds the current one."""
    layer = trained(nn.LSTM(IN, HIDDEN))
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    layer.parametrizations.weight_hh_l0.original0.data.mul_(0.5)
    check(layer, (rows(1, 7, 3, IN),), [(rows(2, 4, 2, IN),)])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (nn.utils.weight_norm, "weight_hh_l0"),
        rare(nn.utils.weight_norm, "weight_hr_l0"),
        rare(nn.utils.spectral_norm, "weight_ih_l0"),
        rare(lambda layer, name: prune.l1_unstructured(layer, name, 0.5), "weight_hh_l0"),
    ],
)
def test_old_normalised_weights(change: Any, name: str) -> None:
    """torch's older hooks make the weight in a call, so that the one at hand may be out of date: it is made anew."""
    layer, args = trained(nn.LSTM(IN, HIDDEN, proj_size=3)), (rows(1, 7, 3, IN),)
    change(layer, name)
    with torch.no_grad():
        next(p for n, p in layer.named_parameters() if n.startswith(f"{name}_")).mul_(0.5)
    result = export(layer, args)
    x = (rows(2, 4, 2, IN),)
    for actual, expected in zip(outputs_of(result, x).values(), tensors_of(layer.eval()(*x)), strict=True):
        np.testing.assert_allclose(actual, to_numpy(expected), atol=1e-5)
    assert hasattr(layer, f"{name}_g") or hasattr(layer, f"{name}_orig"), "the user's module is not changed"


def test_control_policy_with_resets() -> None:
    """MLP, GRU, MLP; 16 environments, 200 single steps, two of them reset by a mask at step 50."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.rnn, self.after = nn.Linear(12, 32), nn.GRU(32, 256), nn.Linear(256, 4)

        def forward(self, obs: torch.Tensor, h: torch.Tensor, keep: torch.Tensor) -> Any:
            y, h = self.rnn(torch.relu(self.before(obs))[None], h * keep[None, :, None])
            return self.after(y[0]), h

    torch.manual_seed(0)
    policy = Policy().eval()
    result = export(policy, (torch.zeros(16, 12), torch.zeros(1, 16, 256), torch.ones(16)))
    assert result.report["states"] == {"h": "h_out"}
    assert [shape_of(v) for v in result.model.graph.input] == [["batch", 12], [1, "batch", 256], ["batch"]]
    runner = make_runner("onnxruntime", result.model)
    h = h_free = torch.zeros(1, 16, 256)
    h_file = np.zeros((1, 16, 256), np.float32)
    for t in range(200):
        obs, keep = rows(t, 16, 12), torch.ones(16)
        if t == 50:
            keep[[3, 9]] = 0
        with torch.no_grad():
            action, h = policy(obs, h, keep)
            _, h_free = policy(obs, h_free, torch.ones(16))
        out = runner.infer({"obs": obs.numpy(), "h": h_file, "keep": keep.numpy()})
        h_file = out["h_out"]
        np.testing.assert_allclose(out["output"], action.numpy(), atol=1e-5)
        np.testing.assert_allclose(h_file, h.numpy(), atol=1e-5)
        if t == 50:
            others = [k for k in range(16) if k not in (3, 9)]
            np.testing.assert_allclose(h_file[:, others], h_free.numpy()[:, others], atol=1e-5)
            assert np.abs(h_file - h_free.numpy())[:, [3, 9]].max() > 0.01
