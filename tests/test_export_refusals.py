"""What cannot be exported faithfully is refused by name, and nothing is written; state in attributes becomes inputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.cli import main
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export
from flashrnn_deploy.exporters.opset17 import lower_to_17
from flashrnn_deploy.graph import opset_of, shape_of
from flashrnn_deploy.nn import MultiHeadRNN

FACTORIES = """
import torch
from torch import nn
from flashrnn_deploy.nn import MultiHeadRNN

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = MultiHeadRNN(4, 6, 2)
    def forward(self, x):
        return self.rnn(x)[0]

class Loop(Net):
    def forward(self, x):
        state, rows = None, []
        for t in range(x.shape[0]):
            y, state = self.rnn(x[t : t + 1], state)
            rows.append(y)
        return torch.cat(rows)

class Keeps(Net):
    def __init__(self):
        super().__init__()
        self.state = None
    def forward(self, x):
        y, self.state = self.rnn(x, self.state)
        return y

class Branches(Net):
    def forward(self, x):
        return self.rnn(x)[0] if x.sum() > 0 else x[..., :3].repeat(1, 1, 2)

def net(): return Net(), (torch.randn(7, 3, 4),)
def alone(): return Net()
def loop(): return Loop(), (torch.randn(7, 3, 4),)
def keeps(): return Keeps(), (torch.randn(7, 3, 4),)
def branches(): return Branches(), (torch.ones(7, 3, 4),)
def raises(): raise ValueError("two\\nlines")
def number(): return 3
def no_rnn(): return nn.Linear(4, 2), (torch.randn(7, 3, 4),)
def wrong_args(): return Net(), (torch.randn(7, 3, 4), 1, 2)
def wrong_size(): return Net(), (torch.randn(7, 3, 5),)
not_callable = 3
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    (tmp_path / "broken.py").write_text("import torch\n1 / 0\n")
    (tmp_path / "weights.pt").write_bytes(b"no checkpoint")
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pt")
    torch.save(nn.GRU(4, 6), tmp_path / "whole.pt")
    np.save(tmp_path / "array.npy", np.zeros(3))
    return path


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("missing.py:net", [], "no such file"),
        ("factories.py", [], "is not FILE.py:FACTORY"),
        ("weights.pt:net", [], "is not a Python file"),
        ("broken.py:net", [], r"ZeroDivisionError: division by zero \(broken.py:2\)"),
        ("factories.py:nope", [], "has no factory 'nope'; it defines Net, .*net, alone"),
        ("factories.py:not_callable", [], "has no factory 'not_callable'"),
        ("factories.py:raises", [], r"raised ValueError: two lines \(factories.py:\d+\)"),
        ("factories.py:number", [], "returned int; it must return a module"),
        ("factories.py:alone", [], r"returned a Net alone; return \(module, args\)"),
        ("factories.py:no_rnn", [], "ran no MultiHeadRNN layer|no recurrent layer"),
        ("factories.py:wrong_args", [], "do not fit Net.forward"),
        ("factories.py:wrong_size", [], r"x must be \[T, B, 4\], not \[7, 3, 5\]"),
        (
            "factories.py:loop",
            [],
            r"input 'x' axis 0 \(time\) would be frozen at 7 by factories.py:\d+ in forward.*--static x:0",
        ),
        ("factories.py:keeps", [], "keeps state between calls in state.*--expose-states"),
        ("factories.py:branches", [], r"torch.export cannot trace Branches: .*\(factories.py:\d+ in forward\)"),
        ("factories.py:net", ["--dtype", "float64"], "dtype float64 is not one of"),
        ("factories.py:net", ["--opset", "16"], "opset 16 is not one of 17 to 23"),
        ("factories.py:net", ["--dynamic", "y:0=t"], "no input named 'y'; the inputs are x"),
        ("factories.py:net", ["--dynamic", "x:3=t"], "input 'x' has 3 axes"),
        ("factories.py:net", ["--dynamic", "x:0"], "the dimension needs a name"),
        ("factories.py:net", ["--static", "x"], "not of the form NAME:AXIS"),
        ("factories.py:net", ["--static", "x:--1"], "not of the form NAME:AXIS"),
        ("factories.py:net", ["--static", "x:\N{SUPERSCRIPT TWO}"], "not of the form NAME:AXIS"),
        ("factories.py:net", ["--static", "x:0", "--dynamic", "x:0=t"], "--static x:0 and --dynamic x:0=t contradict"),
        ("factories.py:net", ["--dynamic", "x:0=t", "--dynamic", "x:-3=s"], "x:0=t and --dynamic x:-3=s contradict"),
        ("factories.py:net", ["--dynamic", "x:2=features"], r"axis 2 \(features\) would be frozen at 4"),
        ("factories.py:net", ["--weights", "none.pt"], "no such file"),
        ("factories.py:net", ["--weights", "weights.pt"], "is not a file of weights"),
        (
            "factories.py:net",
            ["--weights", "array.npy"],
            r"array.npy is not a file of weights: .* no PyTorch checkpoint",
        ),
        (
            "factories.py:net",
            ["--weights", "whole.pt"],
            r"holds other objects than tensors \(torch.nn.modules.rnn.GRU\); save the module's state_dict",
        ),
        ("factories.py:net", ["--weights", "other.pt"], "does not fit the module"),
    ],
)
def test_one_line_and_no_file(
    factories: Path, monkeypatch: pytest.MonkeyPatch, source: str, options: list[str], words: str
) -> None:
    monkeypatch.chdir(factories.parent)
    before = sorted(factories.parent.iterdir())
    result = CliRunner().invoke(main, ["export", source, "-o", "out.onnx", *options])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert re.search(words, lines[0]), lines[0]
    assert [p for p in sorted(factories.parent.iterdir()) if p.name != "__pycache__"] == before


def test_static_axis_is_kept(factories: Path, tmp_path: Path) -> None:
    arguments = ["export", f"{factories}:loop", "-o", str(tmp_path / "o.onnx"), "--static", "x:0"]
    arguments += ["--report", str(tmp_path / "r.json")]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["inputs"][0]["shape"] == [7, "batch", 4]
    assert len(report["nodes"]) == 7


def test_state_in_an_attribute_becomes_input_and_output() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = MultiHeadRNN(4, 6, 2)
            self.state: Any = None
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y, self.state = self.rnn(x, self.state)
            return y + self.calls

    torch.manual_seed(0)
    net, x = Keeps().eval(), torch.randn(10, 3, 4)
    with pytest.raises(FlashRNNError, match="calls, state"):
        export(net, (x[:5],))
    model = export(net, (x[:5],), expose_states=True).model
    assert net.state is None
    assert net.calls == 0, "the user's module is not changed"
    names = [v.name for v in model.graph.input]
    assert names[0] == "x"
    assert set(names[1:]) == {"state_h", "state_c", "calls"}
    runner = make_runner("onnxruntime", model)
    states = {n: np.zeros((1, 3, 6), np.float32) for n in ("state_h", "state_c")} | {"calls": np.zeros(1, np.float32)}
    for part in (x[:4], x[4:7], x[7:]):
        outputs = runner.infer({"x": part.numpy(), **states})
        with torch.no_grad():
            np.testing.assert_allclose(outputs["output"], net(part).numpy(), atol=1e-6)
        states = {name: outputs[f"{name}_out"] for name in states}


class Two(nn.Module):
    """Two layers and what ``result`` makes of them."""

    def __init__(self, result: Any, cell: str = "gru") -> None:
        super().__init__()
        self.a, self.b, self.result = MultiHeadRNN(4, 4, 2, cell), MultiHeadRNN(4, 4, 2, cell), result

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        return self.result(self, x, z)


def test_one_tensor_as_two_arguments() -> None:
    """The example's x is z: the file must still tell them apart."""
    torch.manual_seed(0)
    net, same = Two(lambda self, x, z: self.b(z, self.a(x)[1])[0]), torch.zeros(5, 3, 4)
    model = export(net, (same, same)).model
    assert [v.name for v in model.graph.input] == ["x", "z"]
    x, z = torch.randn(6, 2, 4), torch.randn(6, 2, 4)
    with torch.no_grad():
        expected = net(x, z).numpy()
    actual = make_runner("onnxruntime", model).infer({"x": x.numpy(), "z": z.numpy()})["output"]
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_states_of_a_layer_that_is_called_twice() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = MultiHeadRNN(4, 4, 2, "gru")

        def forward(self, x: torch.Tensor, hx: torch.Tensor, z: torch.Tensor, hz: torch.Tensor) -> Any:
            a, ha = self.rnn(x, hx)
            b, hb = self.rnn(z, hz)
            return a - b, ha, hb

    x, h = torch.zeros(5, 3, 4), torch.zeros(1, 3, 4)
    result = export(Shared(), (x, h, x, h))
    assert result.report["states"] == {"hx": "hx_out", "hz": "hz_out"}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda self, x, z: self.a(x[:100])[0], r"axis 0 \(time\) would hold for sizes up to \d+ only"),
        (lambda self, x, z: self.a(x * 2 if x.shape[0] > 20 else x)[0], "up to 20 only"),
        (lambda self, x, z: self.a(x * 2 if x.shape[0] >= 6 else x)[0], "from 6 only"),
        (lambda self, x, z: self.a(x * 2 if x.shape[0] % 2 else x)[0], "does not compute what the module does"),
        (lambda self, x, z: self.a(nn.functional.dropout(x, 0.5))[0], "gives two results for one input"),
    ],
)
def test_code_that_divides_into_cases(result: Any, words: str) -> None:
    with pytest.raises(FlashRNNError, match=words):
        export(Two(result), (torch.zeros(7, 3, 4), torch.zeros(7, 3, 4)))


def test_state_that_an_example_of_zeros_hides() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = MultiHeadRNN(4, 4, 2)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
            return self.rnn(x - self.mean)[0]

    with pytest.raises(FlashRNNError, match="Mean keeps state between calls in mean"):
        export(Mean(), (torch.zeros(5, 2, 4),))


def test_observations_of_rank_two_share_the_batch() -> None:
    """A control policy: one step, 16 environments."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = MultiHeadRNN(4, 8, cell="gru"), nn.Linear(8, 2)

        def forward(self, observation: torch.Tensor, h: torch.Tensor) -> Any:
            y, h = self.rnn(observation[None], h)
            return self.out(y[0]), h

    result = export(Policy(), (torch.zeros(16, 4), torch.zeros(1, 16, 8)))
    assert [i["shape"] for i in result.report["inputs"]] == [["batch", 4], [1, "batch", 8]]
    assert result.report["states"] == {"h": "h_out"}


@pytest.mark.parametrize(
    ("net", "args", "words"),
    [
        (MultiHeadRNN(4, 4).double(), (torch.zeros(5, 3, 4).double(),), "is float64"),
        (MultiHeadRNN(4, 4), (torch.zeros(0, 3, 4),), r"an example argument is empty \(\[0, 3, 4\]\)"),
    ],
)
def test_modules_that_are_refused_before_tracing(net: nn.Module, args: Any, words: str) -> None:
    with pytest.raises(FlashRNNError, match=words):
        export(net, args)


def test_float16_with_a_transpose_between_two_layers() -> None:
    """A file that crashed the process in an optimizer of ONNX Runtime 1.32."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = MultiHeadRNN(4, 4, 2), MultiHeadRNN(4, 4, 2, "slstm", batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)[0].transpose(0, 1))[0]

    export(Mixed(), (torch.zeros(5, 3, 4),), dtype="float16")


def test_axes_that_are_always_equal() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = MultiHeadRNN(4, 6, 2)

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.einsum("tbh,ts->sbh", self.rnn(x)[0], weight)

    args = (torch.randn(7, 3, 4), torch.randn(7, 5))
    with pytest.raises(FlashRNNError, match="cannot trace Square"):  # they are traced at different sizes
        export(Square(), args, dynamic=["weight:0=rows", "weight:1=columns"])
    model = export(Square(), args, dynamic=["weight:0=time", "weight:1=columns"]).model
    assert [shape_of(v) for v in model.graph.input] == [["time", "batch", 4], ["time", "columns"]]
    assert shape_of(model.graph.output[0]) == ["columns", "batch", 6]


def test_example_sizes_do_not_matter() -> None:
    net = MultiHeadRNN(4, 6, 2, batch_first=True).eval()
    for shape in ((1, 1, 4), (3, 3, 4), (4, 6, 4)):
        model = export(net, (torch.zeros(shape), None, torch.tensor([1] * shape[0]))).model
        assert [shape_of(v) for v in model.graph.input] == [["batch", "time", 4], ["batch"]]
        assert shape_of(model.graph.output[0]) == ["batch", "time", 6]


def test_dynamic_shapes_of_a_factory() -> None:
    dim = torch.export.Dim
    net = MultiHeadRNN(4, 6, 2).eval()
    states = tuple(torch.zeros(1, 3, 6) for _ in range(2))
    shapes = {"x": {0: dim("frames"), 1: dim("streams")}, "states": ({1: dim("streams")}, {1: dim("streams")})}
    for given in (shapes, tuple(shapes.values())):
        model = export(net, (torch.zeros(7, 3, 4), states), dynamic_shapes=given).model
        assert [shape_of(v) for v in model.graph.input] == [["frames", "streams", 4], *[[1, "streams", 6]] * 2]
    with pytest.raises(FlashRNNError, match="dynamic_shapes names 'y'"):
        export(net, (torch.zeros(7, 3, 4),), dynamic_shapes={"y": None})


class WithOperators(nn.Module):
    """What changed between opsets 17 and 18: reductions, splits, padding."""

    def __init__(self, resize: bool = False) -> None:
        super().__init__()
        self.rnn, self.resize = MultiHeadRNN(4, 6, 2), resize

    def forward(self, x: torch.Tensor) -> Any:
        y = self.rnn(x)[0]
        a, b = y.split(3, -1)
        c, d = y.chunk(2, -1)
        pooled = torch.cat([y.mean(0), y.amax(0), y.sum(1).mean(0, keepdim=True).expand(y.shape[1], -1)], -1)
        if self.resize:
            index = torch.zeros_like(y, dtype=torch.int64)
            return torch.zeros_like(y).scatter_reduce(0, index, y, "amax")
        return nn.functional.pad(a * b, (1, 2)), c - d, pooled


def test_opset_17_of_what_torch_writes_as_18() -> None:
    result = export(WithOperators(), (torch.randn(7, 3, 4),))
    assert opset_of(result.model) == 17, result.report["warnings"]


def test_opset_18_where_17_cannot_say_it() -> None:
    result = export(WithOperators(resize=True), (torch.randn(7, 3, 4),))
    assert opset_of(result.model) == 18
    assert any("needs opset 18: its reduction" in text for text in result.report["warnings"])
    with pytest.raises(FlashRNNError, match=r"--opset 17: .*needs opset 18"):
        export(WithOperators(resize=True), (torch.randn(7, 3, 4),), opset=17)
    with pytest.raises(ValueError, match="opset 18"):
        lower_to_17(export(MultiHeadRNN(4, 6), (torch.randn(7, 3, 4),)).model)


@pytest.mark.parametrize("opset", range(17, 24))
def test_every_opset(opset: int) -> None:
    net = MultiHeadRNN(4, 6, 2, "slstm", bidirectional=True).eval()
    assert opset_of(export(net, (torch.randn(7, 3, 4),), opset=opset).model) == opset


def test_several_layers_and_a_shared_one() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.first, self.shared = MultiHeadRNN(4, 4, cell="gru"), MultiHeadRNN(4, 4, cell="elman")

        def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.shared(self.shared(self.first(self.embed(tokens))[0])[0])[0]
            return {"y": y, "last": y[-1]}

    result = export(Net(), (torch.zeros(7, 3, dtype=torch.int64),))
    assert [n["name"] for n in result.report["nodes"]] == ["first.l0", "shared.l0", "shared.l1"]
    assert [(o["name"], o["shape"]) for o in result.report["outputs"]] == [
        ("y", ["time", "batch", 4]),
        ("last", ["batch", 4]),
    ]


def test_no_module_is_changed_by_an_export() -> None:
    torch.manual_seed(0)
    net = MultiHeadRNN(4, 6, 2, num_layers=2, dropout=0.5).train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    export(net, (torch.randn(7, 3, 4),), dtype="float16")
    assert net.training
    for name, value in net.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])
