"""Names of axes, arguments and results; what cannot be read is refused before anything is traced."""

from __future__ import annotations

import json
from collections import namedtuple
from typing import Any

import pytest
import torch
from exported import check, rare, rows, trained
from torch import nn
from torch.export import Dim

from flashrnn_deploy import streaming
from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.chunks import run_chunks
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export
from flashrnn_deploy.graph import shape_of
from flashrnn_deploy.shapes import axes_of
from flashrnn_deploy.shapes import tensors_of as graph_tensors

X = rows(1, 5, 3, 4)


class Net(nn.Module):
    """A GRU, and what ``result`` makes of its hidden sequence and the input."""

    def __init__(self, result: Any = lambda y, x: y) -> None:
        super().__init__()
        self.rnn, self.result = nn.GRU(4, 6), result

    def forward(self, x: torch.Tensor) -> Any:
        return self.result(self.rnn(x)[0], x)


class Nested(Net):
    def forward(self, parts: dict[str, torch.Tensor], more: list[torch.Tensor]) -> Any:
        return self.rnn(parts["x"] + more[0])[0]


@pytest.mark.parametrize(
    ("shapes", "dims"),
    [
        ({"x": {0: "frames", 1: Dim("rows")}}, ["frames", "rows", 4]),
        ({"x": {-3: Dim("frames"), 1: 3}}, ["frames", 3, 4]),
        rare(({0: Dim.DYNAMIC, 1: Dim.AUTO, 2: Dim.STATIC},), ["time", "batch", 4]),
        rare([(Dim.DYNAMIC(min=2), None, None)], ["time", 3, 4]),
        rare({}, [5, 3, 4]),
    ],
)
def test_dynamic_shapes(shapes: Any, dims: list[Any]) -> None:
    assert shape_of(export(Net(), (X,), dynamic_shapes=shapes).model.graph.input[0]) == dims


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (3, "dict or a tuple with an entry per argument, not int 3"),
        (Dim.AUTO, "dict or a tuple with an entry per argument"),
        (({0: "t"}, None), "2 entries; forward was called with 1: x"),
        ({0: {0: "t"}}, "names 0; forward was called with x"),
        ({"x": 3}, "'x' is a tensor with 3 axes, not int 3"),
        ({"x": {0, 1}}, "'x' is a tensor with 3 axes, not set"),
        ({"x": {3: "t"}}, "'x' has 3 axes and no axis 3"),
        ({"x": {-4: "t"}}, "'x' has 3 axes and no axis -4"),
        ({"x": {"0": "t"}}, "'x' has 3 axes and no axis '0'"),
        ({"x": ("t",)}, "'x' has 3 axes, but 1 entries"),
        ({"x": {0: 7}}, "'x' axis 0 is 7, but the example has 5 there"),
        ({"x": {0: 1.5}}, "'x' axis 0 must be a Dim, a name or None, not float 1.5"),
        ({"x": {0: True}}, "must be a Dim, a name or None, not bool True"),
        ({"x": {0: "a b"}}, "the dimension 'a b' must be a plain name"),
        ({"x": {0: 2 * Dim("half")}}, "must be a plain name"),
    ],
)
def test_malformed_dynamic_shapes(shapes: Any, words: str) -> None:
    with pytest.raises(FlashRNNError, match=words):
        export(Net(), (X,), dynamic_shapes=shapes)


def test_sizes_beyond_a_bound_are_not_asked_for() -> None:
    """A table of positions ends where the user says that time does."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.table = nn.GRU(4, 6), nn.Embedding(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.rnn(x + self.table(torch.arange(x.shape[0]))[:, None])[0]
            return y

    with pytest.raises(FlashRNNError, match="index out of range"):
        export(Positions(), (X,), dynamic_shapes={"x": {0: Dim("time")}})
    bounded = export(Positions(), (X,), dynamic_shapes={"x": {0: Dim("time", max=8)}})
    assert bounded.report["inputs"][0]["shape"] == ["time", 3, 4]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"parts": {"y": None}}, "'parts' has the keys x"),
        ({"parts": [None]}, "'parts' has the keys x"),
        ({"more": []}, "'more' has 1 parts"),
        ({"more": Dim("t")}, "'more' has 1 parts"),
        ({"more": [3]}, "'more_0' is a tensor"),
    ],
)
def test_dynamic_shapes_of_nested_arguments(shapes: Any, words: str) -> None:
    with pytest.raises(FlashRNNError, match=words):
        export(Nested(), ({"x": X}, [X]), dynamic_shapes=shapes)


def test_axes_of_any_name_are_time_and_batch() -> None:
    net = trained(Net())
    model = export(net, (X,), dynamic_shapes={"x": {0: "frames", 1: "rows"}}, expose_states=True).model
    tensors = graph_tensors(model)
    axes, pairs = axes_of(model, tensors), streaming.state_pairs(model)
    assert (axes["x"].time, axes["x"].batch) == (0, 1)
    assert (axes["rnn.l0.states"].time, axes["rnn.l0.states"].batch) == (None, 2)
    streaming.check_chunkable(model, tensors, axes, pairs)
    x, runner = rows(2, 9, 2, 4), make_runner("onnxruntime", model)
    feeds = {"x": x.numpy(), "rnn.l0.states": torch.zeros(1, 1, 2, 6).numpy()}
    parts = run_chunks(runner, feeds, 4, axes, pairs, {})["output"]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(parts), net(x), atol=1e-6, rtol=0)


def test_width_that_becomes_time() -> None:
    """Half of the width is time: no axis of the image is. torch's bound, where the half would be 1, is none of ours."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2)
            self.rnn, self.out = nn.LSTM(6, 4, bidirectional=True, batch_first=True), nn.Linear(8, 5)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            seen = self.pool(self.conv(image)).flatten(1, 2).transpose(1, 2)
            return self.out(self.rnn(seen)[0]).log_softmax(-1)

    images = [(rows(k, *shape),) for k, shape in enumerate([(2, 1, 4, 12), (3, 1, 4, 21), (1, 1, 4, 3)])]
    result = check(
        trained(Reader()), images[0], images[1:], dynamic_shapes={"image": {0: Dim("batch"), 3: Dim("width")}}
    )
    axes = json.loads({p.key: p.value for p in result.model.metadata_props}["flashrnn.axes"])
    assert axes == {name: {"time": None, "batch": 0} for name in ("image", "output")}


def test_a_fixed_number_of_steps_is_noted() -> None:
    """Words of sentences: axis 2 is the time of the layer, and dynamic only where it is named."""

    class Words(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return self.rnn(x.flatten(0, 1).transpose(0, 1))[0]

    notes = export(Words(), (rows(1, 2, 3, 5, 4),)).report["warnings"]
    assert any("rnn.l0 runs 5 steps whatever is fed" in note for note in notes)


Pair = namedtuple("Pair", "y x")


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (lambda y, x: {1: y, "1": x, None: y + 1, "": x + 1}, ["1", "1_2", "None", "output"]),
        rare(lambda y, x: {("a", 1): y, "b c\n": x}, ["('a',_1)", "b_c_"]),
        rare(lambda y, x: {"a_0": y, "a": [x, x + 1], "b": {"c": y}}, ["a_0", "a_0_2", "a_1", "b_c"]),
        rare(lambda y, x: {"x": y, "none": None}, ["x_2"]),
        rare(Pair, ["y", "x_2"]),
    ],
)
def test_names_of_results(result: Any, names: list[str]) -> None:
    exported = check(trained(Net(result)), (X,), [(rows(2, 8, 2, 4),)])
    assert [v.name for v in exported.model.graph.output] == names


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda y, x: (y, x.shape[0]), "returns a int as 'output_1'"),
        (lambda y, x: {"y": y, "name": "abc"}, "returns a str as 'name'"),
        (lambda y, x: Net(), "returns a Net as 'output'"),
        (lambda y, x: None, "returned NoneType, which holds no tensor"),
    ],
)
def test_results_that_are_no_tensors(result: Any, words: str) -> None:
    with pytest.raises(FlashRNNError, match=words):
        export(Net(result), (X,))


def test_arguments_called_like_operators() -> None:
    """torch.onnx names values after operators; ours must not become two values of one name."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 6)

        def forward(self, add: torch.Tensor, mean: torch.Tensor) -> Any:
            return {"mul": self.rnn(add + add.mean(0) + mean)[0] * 2, "rnn.weight_ih_l0": add * mean}

    check(trained(Named()), (X, X + 1), [(rows(2, 8, 2, 4), rows(3, 8, 2, 4))])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.jit.trace(Net().eval(), X), "the module is TorchScript"),
        (lambda: torch.jit.script(nn.GRU(4, 6)), "the module is TorchScript"),
        (lambda: nn.Sequential(torch.jit.script(nn.GRU(4, 6))), "'0' in Sequential is TorchScript"),
        (lambda: nn.Sequential(nn.GRU(4, 6), nn.LazyLinear(3)), "'1' in Sequential has no weight 'weight' before"),
        (lambda: nn.GRU(4, 6, device="meta"), "the module has no numbers in 'weight_ih_l0'"),
    ],
)
def test_modules_whose_layers_cannot_be_seen(make: Any, words: str) -> None:
    with pytest.raises(FlashRNNError, match=words):
        export(make(), (X,))


@pytest.mark.parametrize("wrap", [torch.compile, rare(nn.DataParallel)])
def test_wrapped_modules(wrap: Any) -> None:
    """What a wrapper holds is exported, under its own names."""
    result = export(wrap(Net()), (X,), expose_states=True)
    assert [v.name for v in result.model.graph.input] == ["x", "rnn.l0.states"]


@pytest.mark.parametrize("where", ["rnn.weight_hh_l0", "rnn.bias_hh_l0"])
def test_weights_that_are_no_numbers(where: str) -> None:
    net = trained(Net())
    net.get_parameter(where).data.fill_(torch.nan)
    notes = export(net, (X,)).report["warnings"]
    assert any(f"{where} holds" in note and "NaN" in note for note in notes)
    assert any("not compared, since the module gives nothing but NaN: output" in note for note in notes)
