"""Models that call ``flashrnn``: the FlashRNN package's function, judged by its vanilla code, and the drop-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import real_models
import torch
from exported import check, ops, outputs_of, rare, rows, trained
from torch import Tensor, nn

from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export
from flashrnn_deploy.nn import flashrnn as drop_in

H, D, IN = 2, 4, 5
FUNCTIONS = tuple(CELLS)


@pytest.fixture(scope="module")
def package_function() -> Callable[..., Any]:
    """``from flashrnn import flashrnn`` of the package on PyPI, read from its wheel."""
    pytest.importorskip("filelock", reason="the flashrnn package imports filelock")
    pytest.importorskip("packaging", reason="the flashrnn package imports packaging")
    with real_models.importable("flashrnn"):
        from flashrnn import flashrnn
    return flashrnn


class Net(nn.Module):
    """Linear -> flashrnn -> Linear."""

    def __init__(self, call: Callable[..., Any], function: str, **options: Any) -> None:
        super().__init__()
        cell = CELLS[function]
        self.call, self.function, self.options, self.gates = call, function, options, cell.num_gates
        self.w = nn.Linear(IN, cell.num_gates * H * D)
        self.R = nn.Parameter(torch.zeros(cell.num_gates, H, D, D))
        self.b = nn.Parameter(torch.zeros(cell.num_biases, H, D))

    def forward(self, x: Tensor, states: Tensor | None = None) -> Any:
        Wx = self.w(x).view(x.shape[0], x.shape[1], self.gates, H, D)
        every, last = self.call(Wx, self.R, self.b, states, function=self.function, **self.options)
        return every[0].flatten(-2), last


def arguments(function: str, T: int, B: int, states: bool) -> tuple[Any, ...]:
    x = rows(T, B, T, IN)
    if not states:
        return (x,)
    given = rows(B, CELLS[function].num_states, B, 1, H, D)
    if function == "slstm":
        given[2] = given[2].abs() + 1
    return x, given


@pytest.mark.parametrize("states", [rare(False), True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_package_against_its_vanilla_code(package_function: Any, function: str, states: bool) -> None:
    """A model as users write it, with the default backend that needs a GPU, judged by the vanilla backend."""
    net = trained(Net(package_function, function))
    judge = Net(package_function, function, backend="vanilla").eval()
    judge.load_state_dict(net.state_dict())
    result = export(net, arguments(function, 7, 3, states))
    assert ops(result) == [CELLS[function].op_type]
    assert result.report["states"] == ({"states": "states_out"} if states else {})
    for T, B in ((1, 1), (11, 2)):
        args = arguments(function, T, B, states)
        with torch.no_grad():
            expected = judge(*args)
        for array, tensor in zip(outputs_of(result, args).values(), expected, strict=True):
            np.testing.assert_allclose(array, tensor.numpy(), atol=1e-5)
    assert package_function.__code__.co_filename.endswith("flashrnn.py"), "the package's function is itself again"


@pytest.mark.parametrize("function", ["gru", "slstm", rare("lstm"), rare("elman")])
def test_drop_in(function: str) -> None:
    check(trained(Net(drop_in, function)), arguments(function, 7, 3, True), [arguments(function, 4, 2, True)])


class Slices(nn.Module):
    def __init__(self, take: Callable[[Any], Any], function: str = "slstm") -> None:
        super().__init__()
        self.net, self.take = Net(drop_in, function), take

    def forward(self, x: Tensor) -> Any:
        Wx = self.net.w(x).view(x.shape[0], x.shape[1], self.net.gates, H, D)
        return self.take(drop_in(Wx, self.net.R, self.net.b, function=self.net.function)[0])


@pytest.mark.parametrize(
    "take",
    [
        rare(lambda s: s[0]),
        lambda s: s[0, :, 2:],
        rare(lambda s: s[0][:, -1]),
        lambda s: s[:, :, -1],
        rare(lambda s: s[:, :, -1:]),
        lambda s: s[:, :, -1, 0],
    ],
    ids=["h", "h from step 2", "last h", "last states", "last states kept", "last states of a head"],
)
def test_parts_that_exist(take: Any) -> None:
    check(trained(Slices(take)), (rows(1, 3, 7, IN),), [(rows(2, 2, 4, IN),)])


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (lambda s: s[1], r"index 1 of the states at all steps \(test_flashrnn_package.py:\d+ in"),
        (lambda s: s[:, :, 0], "index"),
        (lambda s: s.sum(), "'sum'"),
        (lambda s: torch.stack([s, s]), "'stack'"),
        (lambda s: next(iter(s)), "iteration"),
        (lambda s: s[-4], "index -4"),
        (lambda s: s[False], "index False"),
    ],
)
def test_parts_that_do_not(take: Any, words: str) -> None:
    with pytest.raises(FlashRNNError, match=words):
        export(trained(Slices(take)), (rows(1, 3, 7, IN),))


def test_one_state_is_a_tensor() -> None:
    check(trained(Slices(lambda s: s.sum(0), "gru")), (rows(1, 3, 7, IN),), [(rows(2, 2, 4, IN),)])
