"""Anyone can register a layer; what is known is looked up by class and name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from exported import check, ops, rows, trained
from torch import Tensor, nn

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export, registry, swap
from flashrnn_deploy.nn import MultiHeadRNN

IN, HIDDEN = 5, 6


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(IN, HIDDEN)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        rows = []
        for step in x.unbind(0):
            h = self.cell(step, h)
            rows.append(h)
        return torch.stack(rows), h


class ByOp(nn.Module):
    def __init__(self, layer: Loop) -> None:
        super().__init__()
        self.rnn = nn.GRU(IN, HIDDEN)  # a stand-in may hold torch's layers: they are not swapped a second time
        self.ours = MultiHeadRNN(IN, HIDDEN, cell="gru")
        self.rnn.load_state_dict({f"{k}_l0": v for k, v in layer.cell.state_dict().items()})
        from flashrnn_deploy.exporters.weights import of_torch_layer

        of_torch_layer(self.rnn, 0).copy_to(self.ours, 0)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        y, h = self.ours(x, h[None])
        return y, h[0]


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(registry._builders)
    yield
    registry._builders.clear()
    registry._builders.update(before)


@pytest.mark.usefixtures("clean_registry")
def test_own_layer_with_states() -> None:
    net, args = trained(nn.ModuleList([Loop()])), (rows(1, 7, 3, IN), rows(2, 3, HIDDEN))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net[0]

        def forward(self, x: Tensor, h: Tensor) -> Any:
            return self.inner(x, h)

    with pytest.raises(FlashRNNError, match="frozen at 7"):
        export(Net(), args)
    registry.register(Loop)(ByOp)
    result = check(Net(), args, [(rows(3, 11, 2, IN), rows(4, 2, HIDDEN)), (rows(3, 1, 1, IN), rows(4, 1, HIDDEN))])
    assert ops(result) == ["FlashGRU"]
    assert result.report["states"] == {"h": "h_out"}
    assert result.report["nodes"][0]["name"] == "inner.l0"


@pytest.mark.usefixtures("clean_registry")
def test_own_layer_by_name_and_a_wrong_one() -> None:
    """A stand-in that computes something else does not get into a file."""

    @registry.register(f"{__name__}.Loop")
    def wrong(layer: Loop) -> nn.Module:
        made = ByOp(layer)
        made.ours.bias_l0.data += 0.1
        return made

    assert f"{__name__}.Loop" in registry.registered()
    with pytest.raises(FlashRNNError, match="does not compute what the module does"):
        export(trained(Loop()), (rows(1, 7, 3, IN), rows(2, 3, HIDDEN)))


@pytest.mark.usefixtures("clean_registry")
def test_refusal_of_a_builder_names_the_layer() -> None:
    @registry.register(Loop)
    def refuse(layer: Loop) -> nn.Module:
        raise FlashRNNError("peephole weights are not supported")

    with pytest.raises(FlashRNNError, match=r"^1\.0: peephole weights"):
        swap.swap(nn.Sequential(nn.Tanh(), nn.Sequential(Loop())))


def test_what_is_known_from_the_start() -> None:
    known = registry.registered()
    for name in ("torch.nn.modules.rnn.LSTM", "torch.nn.modules.rnn.GRUCell", "xlstm.blocks.slstm.cell.sLSTMCell_cuda"):
        assert name in known
    assert registry.find(nn.Linear(1, 1)) is None
    with pytest.raises(FlashRNNError, match=r"ran no recurrent layer: there is nothing to export.*rnn.LSTM"):
        export(nn.Linear(4, 2), (torch.zeros(3, 7, 4),))
