"""Swapping layers: what the user's code sees of them, and what cannot be exported faithfully."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exported import check, ops, rare, rows, trained
from torch import Tensor, nn

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export
from flashrnn_deploy.exporters.swap import swap

IN, HIDDEN = 5, 6


class Around(nn.Module):
    """A layer and the user's code around it."""

    def __init__(self, layer: nn.Module, body: Any) -> None:
        super().__init__()
        self.rnn, self.body = layer, body

    def forward(self, *args: Any) -> Any:
        return self.body(self.rnn, *args)


def test_code_that_looks_at_the_layer() -> None:
    """``isinstance``, sizes, weights and methods are those of torch's layer: another branch would be silently wrong."""

    def body(rnn: Any, x: Tensor) -> Any:
        rnn.flatten_parameters()
        y, state = rnn(x)
        h = state[0] if isinstance(rnn, nn.LSTM) else state
        return y.view(*y.shape[:2], 2, rnn.hidden_size), h * rnn.weight_hh_l0[0, 0], rnn.mode == "LSTM"

    def tensors(rnn: Any, x: Tensor) -> Any:
        y, h, flag = body(rnn, x)
        return (y, h) if flag else y

    layer = trained(nn.LSTM(IN, HIDDEN, bidirectional=True))
    check(Around(layer, tensors), (rows(1, 7, 3, IN),), [(rows(2, 4, 2, IN),)])


def test_nothing_is_left_behind() -> None:
    layer = trained(nn.LSTM(IN, HIDDEN))
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    result = export(layer, (rows(1, 7, 3, IN),))
    assert dict(layer.named_modules()) == {"": layer}
    assert layer.state_dict().keys() == before.keys()
    assert "forward" not in vars(layer)
    weights = sum(v.numel() for v in before.values()) - 4 * HIDDEN  # two biases become one
    assert sum(max(1, _size(t.dims)) for t in result.model.graph.initializer if len(t.dims)) <= weights + 64


def _size(dims: Any) -> int:
    n = 1
    for d in dims:
        n *= d
    return n


def test_shared_and_nested_layers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ModuleList([nn.GRU(IN, IN), nn.LSTM(IN, IN)])
            self.again = self.list[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.list[1](self.list[0](x)[0])[0])[0]

    result = check(trained(Net()), (rows(1, 7, 3, IN),), [(rows(2, 4, 2, IN),)])
    assert [n["name"] for n in result.report["nodes"]] == ["list.0.l0", "list.1.l0", "list.0.l1"]


def test_forward_hooks_still_run() -> None:
    net = Around(trained(nn.GRU(IN, HIDDEN)), lambda rnn, x: rnn(x)[0])
    net.rnn.register_forward_hook(lambda layer, args, result: (result[0] * 2, result[1]))
    check(net, (rows(1, 7, 3, IN),), [(rows(2, 4, 2, IN),)])


class Doubled(nn.GRU):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x * 2)


class Renamed(nn.GRU):
    """Adds nothing to forward."""


def test_subclasses() -> None:
    check(trained(Renamed(IN, HIDDEN)), (rows(1, 7, 3, IN),), [(rows(2, 4, 2, IN),)])
    net = nn.Sequential(Doubled(IN, HIDDEN))
    with pytest.raises(FlashRNNError, match=r"^0: Doubled changes the forward of GRU.*registry.register"):
        export(net, (rows(1, 7, 3, IN),))


def test_swap_returns_what_it_replaced() -> None:
    net = nn.Sequential(nn.Linear(3, IN), nn.GRU(IN, HIDDEN))
    assert swap(net) == ["1"]
    assert isinstance(net[1], nn.GRU)


def _loop_over_time(rnn: Any, x: Tensor) -> Tensor:
    h, ys = None, []
    for t in range(x.shape[0]):
        h = rnn(x[t], h)
        ys.append(h)
    return torch.stack(ys)


def _loop_batch_first(rnn: Any, x: Tensor) -> Tensor:
    h = None
    for step in x.unbind(1):
        h = rnn(step, h)
    return h


def _loop_over_numbers(rnn: Any, x: Tensor) -> Tensor:
    h, ys = None, []
    for step in x.split(1, dim=1):
        h = rnn(step, h)
        ys.append(h)
    return torch.stack(ys, 1)


def _loop_of_layer(rnn: Any, x: Tensor) -> Tensor:
    y, h = rnn(x[:1])
    for t in range(1, x.size(0)):
        y, h = rnn(x[t : t + 1], h)
    return y


@pytest.mark.parametrize(
    ("layer", "body", "x", "axis"),
    [
        (nn.GRUCell(IN, HIDDEN), _loop_over_time, (7, 3, IN), 0),
        (nn.GRUCell(IN, HIDDEN), _loop_batch_first, (3, 7, IN), 1),
        (nn.RNNCell(1, HIDDEN), _loop_over_numbers, (3, 7), 1),
        (nn.GRUCell(IN, HIDDEN), _loop_over_time, (7, IN), 0),
        (nn.GRU(IN, HIDDEN), _loop_of_layer, (7, 3, IN), 0),
    ],
    ids=["cell", "batch first", "rank 2", "unbatched", "layer"],
)
def test_a_loop_over_time_is_refused(layer: nn.Module, body: Any, x: tuple[int, ...], axis: int) -> None:
    """It would freeze the number of steps, silently where an input has no axis that looks like time."""
    words = (
        rf"axis {axis} \(time\) would be frozen at \d+ by test_swap.py:\d+ in (_loop|forward).*--static args_0:{axis}"
    )
    with pytest.raises(FlashRNNError, match=words):
        export(Around(layer, body), (rows(1, *x),))


def test_a_loop_over_a_declared_axis() -> None:
    layer = trained(nn.GRUCell(IN, HIDDEN))

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = layer

        def forward(self, x: Tensor) -> Tensor:
            return _loop_over_time(self.rnn, x)

    result = check(Loop(), (rows(1, 4, 3, IN),), [(rows(2, 4, 2, IN),)], static=["x:0"])
    assert ops(result) == ["FlashGRU"] * 4


def test_state_in_an_attribute_of_a_torch_layer() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.state = nn.LSTM(IN, HIDDEN), None

        def forward(self, x: Tensor) -> Tensor:
            y, self.state = self.rnn(x, self.state)
            return y

    net = trained(Keeps())
    with pytest.raises(FlashRNNError, match=r"keeps state between calls in state.*--expose-states"):
        export(net, (rows(1, 7, 3, IN),))
    result = export(net, (rows(1, 7, 3, IN),), expose_states=True)
    assert result.report["states"] == {"state_h": "state_h_out", "state_c": "state_c_out"}
    assert net.state is None


def test_state_shared_by_two_layers_has_no_pair() -> None:
    """One initial state of two layers: no output continues it, and none is claimed to."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.GRU(IN, HIDDEN), nn.GRU(IN, HIDDEN)

        def forward(self, x: Tensor, h: Tensor) -> Any:
            return self.a(x, h)[1], self.b(x, h)[1]

    result = export(trained(Two()), (rows(1, 7, 3, IN), rows(2, 1, 3, HIDDEN)))
    assert result.report["states"] == {}


@pytest.mark.parametrize("function", [torch.tanh, rare(nn.Linear(HIDDEN, HIDDEN)), rare(lambda h: h.flip(-1) * 0.5)])
def test_an_input_that_only_influences_a_state_is_none(function: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.function = nn.GRU(IN, HIDDEN), function

        def forward(self, x: Tensor, context: Tensor) -> Any:
            return self.rnn(x, self.function(context))

    result = export(Net(), (rows(1, 7, 3, IN), torch.zeros(1, 3, HIDDEN)), static=["context:0"])
    assert result.report["states"] == {}


@pytest.mark.parametrize("how", [rare("float"), "inverted", "bool"])
def test_masks_that_reset_a_state(how: str) -> None:
    def body(rnn: Any, x: Tensor, h: Tensor, mask: Tensor) -> Any:
        if how == "bool":
            return rnn(x, torch.where(mask[:, None], h, torch.zeros_like(h)))
        return rnn(x, h * ((1 - mask) if how == "inverted" else mask)[:, None])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRUCell(IN, HIDDEN)

        def forward(self, x: Tensor, h: Tensor, mask: Tensor) -> Any:
            return body(self.rnn, x, h, mask)

    def args(B: int) -> tuple[Any, ...]:
        mask = torch.arange(B) % 2 == 0
        return rows(1, B, IN), rows(2, B, HIDDEN), mask if how == "bool" else mask.float()

    result = check(trained(Net()), args(4), [args(3), args(7)])
    assert result.report["states"] == {"h": "h_out"}
    assert [i["shape"] for i in result.report["inputs"]] == [["batch", IN], ["batch", HIDDEN], ["batch"]]
