"""State in buffers and attributes becomes inputs and outputs, of every type; what cannot is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from exported import rare, rows, trained
from torch import Tensor, nn

from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export
from flashrnn_deploy.exporters.validate import to_numpy


class Keeps(nn.Module):
    """A GRU and one buffer, which ``step(net, x)`` reads and writes."""

    def __init__(self, step: Any, buffer: Tensor | None) -> None:
        super().__init__()
        self.rnn, self.step = nn.GRU(4, 6), step
        self.register_buffer("kept", buffer)

    def forward(self, x: Tensor) -> Any:
        return self.step(self, x)


def count(net: Any, x: Tensor) -> Tensor:
    net.kept += 1
    return net.rnn(x)[0] + net.kept


def position(net: Any, x: Tensor) -> Tensor:
    t = net.kept + torch.arange(x.shape[0])
    net.kept = net.kept + x.shape[0]
    return net.rnn(x + t.float().sin()[:, None, None])[0]


def first(net: Any, x: Tensor) -> Tensor:
    y = net.rnn(torch.where(net.kept, x, x * 2))[0]
    net.kept = torch.ones_like(net.kept)
    return y


def average(net: Any, x: Tensor) -> Tensor:
    net.kept.mul_(0.9).add_(0.1 * x.mean((0, 1)))
    return net.rnn(x - net.kept)[0]


def window(net: Any, x: Tensor) -> Tensor:
    both = torch.cat([net.kept, x])
    net.kept = both[-2:]
    return net.rnn(both[2:] + both[:-2])[0]


def hidden(net: Any, x: Tensor) -> Tensor:
    y, h = net.rnn(x, net.kept)
    net.kept.copy_(h)
    return y


@pytest.mark.parametrize(
    ("step", "buffer"),
    [
        (count, torch.tensor(0)),
        (first, torch.tensor(False)),
        (average, torch.zeros(4)),
        (window, torch.zeros(2, 3, 4)),
        (hidden, torch.zeros(1, 3, 6)),
        rare(count, torch.tensor(0.5)),
        rare(count, torch.zeros(6, dtype=torch.int32)),
        rare(position, torch.tensor(0)),
        rare(position, torch.zeros(1, dtype=torch.int64)),
    ],
)
def test_buffers(step: Any, buffer: Tensor) -> None:
    """The file, fed with its own states, equals the module that keeps them."""
    net = trained(Keeps(step, buffer))
    result = export(net, (rows(1, 5, 3, 4),), expose_states=True)
    pairs = result.report["states"]
    assert pairs["kept"] == "kept_out"
    runner, states = make_runner("onnxruntime", result.model), {"kept": to_numpy(buffer)}
    for name in pairs.keys() - {"kept"}:
        states[name] = np.zeros((1, 1, 3, 6), np.float32)
    layer = copy.deepcopy(net)
    for k, steps in enumerate((4, 3, 3)):
        x = rows(k, steps, 3, 4)
        outputs = runner.infer({"x": x.numpy(), **states})
        with torch.no_grad():
            np.testing.assert_allclose(outputs["output"], layer(x).numpy(), atol=1e-5)
        assert outputs["kept_out"].shape == tuple(buffer.shape)
        states = {name: outputs[after] for name, after in pairs.items()}
        for name in states.keys() - {"kept"}:  # the module starts its default states anew
            states[name] = np.zeros_like(states[name])


class Normalised(nn.Module):
    def __init__(self, train: bool) -> None:
        super().__init__()
        self.rnn, self.norm, self.force = nn.GRU(4, 6), nn.BatchNorm1d(6), train

    def forward(self, x: Tensor) -> Tensor:
        if self.force:
            self.norm.train()
        return self.norm(self.rnn(x)[0].permute(1, 2, 0))


@pytest.mark.parametrize("expose", [False, True])
def test_training_mode_is_left_or_refused(expose: bool) -> None:
    x = (rows(1, 5, 3, 4),)
    with pytest.raises(FlashRNNError, match="forward puts 'norm' into training mode"):
        export(Normalised(train=True), x, expose_states=expose)
    net = Normalised(train=False).train()
    report = export(net, x, expose_states=expose).report
    assert [i["name"] for i in report["inputs"]] == (["x", "rnn.l0.states"] if expose else ["x"])
    assert net.norm.training, "the user's module is not changed"


def grows(net: Any, x: Tensor) -> Tensor:
    net.kept = torch.cat([net.kept, x])
    return net.rnn(net.kept)[0][-x.shape[0] :]


def branches(net: Any, x: Tensor) -> Tensor:
    y = net.rnn(x if net.kept else x * 2)[0]
    net.kept = torch.ones_like(net.kept)
    return y


def number(net: Any, x: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    return net.rnn(x)[0] * net.calls


def drops_weights(net: Any, x: Tensor) -> Tensor:
    weight = net.rnn._parameters.pop("weight_hh_l0") if "weight_hh_l0" in net.rnn._parameters else net.rnn.weight_hh_l0
    net.rnn.weight_hh_l0 = weight.detach() * 0.5
    return net.rnn(x)[0]


@pytest.mark.parametrize(
    ("step", "buffer", "words"),
    [
        (drops_weights, None, "forward changes the weight rnn.weight_hh_l0"),
        (number, None, "calls is a Python number that changes from call to call"),
        (grows, torch.zeros(1, 3, 4), "kept has another shape after every call"),
        (branches, torch.tensor(False), "torch.export cannot trace"),
    ],
)
def test_states_that_are_refused(step: Any, buffer: Tensor, words: str) -> None:
    with pytest.raises(FlashRNNError, match=words):
        export(Keeps(step, buffer), (rows(1, 5, 3, 4),), expose_states=True)


class Logs(nn.Module):
    """Keeps attention weights and the last step for a plot, in attributes that no call reads."""

    def __init__(self, stateful: bool) -> None:
        super().__init__()
        self.rnn, self.score, self.cell = nn.GRU(4, 6), nn.Linear(6, 1), nn.GRUCell(6, 6)
        self.weights: Tensor | None = None
        self.h: Tensor | None = None
        self.stateful = stateful

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        self.weights = torch.softmax(self.score(y), 0)
        self.last = y[-1]
        z: Tensor = (self.weights * y).sum(0)
        if self.stateful:
            self.h = self.cell(z, torch.zeros_like(z) if self.h is None else self.h)
            return self.h
        return z


def test_attributes_that_are_only_written_are_no_state() -> None:
    module = trained(Logs(stateful=False))
    exported = export(module, (torch.randn(5, 2, 4),))
    assert exported.report["warnings"][0].startswith("the file does not hold weights, last: forward writes it")
    assert [i["name"] for i in exported.report["inputs"]] == ["x"]
    assert module.weights is None, "the user's module is as it was"
    assert not hasattr(module, "last")
    assert not module._forward_hooks


@pytest.mark.filterwarnings("error::FutureWarning")
def test_attributes_beside_a_state() -> None:
    module, args = trained(Logs(stateful=True)), (torch.randn(5, 2, 4),)
    with pytest.raises(FlashRNNError, match="keeps state between calls in h, which"):
        export(module, args)
    exported = export(module, args, expose_states=True)
    assert list(exported.report["states"]) == ["h", "rnn.l0.states"]


class Frames(nn.Module):
    """[B, T, K, 4] -> [B, T, 6]: one layer within each of the T frames, one over them."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.over = nn.GRU(4, 5, batch_first=True), nn.GRU(5, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        _, h = self.within(x.flatten(0, 1))
        y: Tensor = self.over(h[-1].reshape(*x.shape[:2], 5))[0]
        return y


def test_a_batch_that_holds_time_keeps_its_zeros() -> None:
    args = (rows(1, 2, 7, 3, 4),)
    net = trained(Frames())
    result = export(net, args, expose_states=True)
    assert result.report["states"] == {"over.l0.states": "over.l0.final_states"}
    assert list(result.report["states_kept"]) == ["within.l0"]
    assert "its batch is time*batch, so that its state cannot be an input" in result.report["states_kept"]["within.l0"]
    x, state = rows(2, 3, 5, 3, 4), np.zeros((1, 1, 3, 6), np.float32)
    runner, parts = make_runner("onnxruntime", result.model), []
    for chunk in (x[:, :2], x[:, 2:]):
        outputs = runner.infer({"x": chunk.numpy(), "over.l0.states": state})
        state = outputs["over.l0.final_states"]
        parts.append(outputs["output"])
    with torch.no_grad():
        np.testing.assert_allclose(np.concatenate(parts, 1), net(x).numpy(), atol=1e-5)
