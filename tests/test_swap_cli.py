"""Modules of torch.nn from the command line; and torch's other exporter, whose files ``convert`` takes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from exported import ops, outputs_of, rare, rows, trained
from torch import nn

from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.cli import main
from flashrnn_deploy.exporters import convert_file, export
from flashrnn_deploy.graph import walk_nodes
from flashrnn_deploy.nn import MultiHeadRNN
from flashrnn_deploy.op import is_flashrnn

FACTORIES = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.out = nn.LSTM(4, 6, **options), nn.Linear(options.get("proj_size", 6), 2)
    def forward(self, x):
        return self.out(self.rnn(x)[0])

class Packing(Net):
    def forward(self, x, lengths):
        y, _ = self.rnn(pack_padded_sequence(x, lengths, enforce_sorted=False))
        return self.out(pad_packed_sequence(y, total_length=x.shape[0])[0])

class Peephole(nn.LSTM):
    def forward(self, x):
        return super().forward(x)

def net(): return Net(num_layers=2), (torch.zeros(7, 3, 4),)
def projected(): return Net(proj_size=3, num_layers=2), (torch.zeros(7, 3, 4),)
def twice():
    class Twice(Net):
        def forward(self, x):
            return self.out(self.rnn(x)[0] + self.rnn(x * 2)[0])
    return Twice(), (torch.zeros(7, 3, 4),)
def cell():
    class Cell(Net):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTMCell(4, 6)
        def forward(self, x):
            return self.out(self.rnn(x)[0])
    return Cell(), (torch.zeros(3, 4),)
def packing(): return Packing(), (torch.zeros(7, 3, 4), torch.tensor([7, 5, 3]))
def alone():
    torch.manual_seed(0)
    return nn.GRU(4, 6, batch_first=True)
def peephole(): return Peephole(4, 6), (torch.zeros(7, 3, 4),)
def direct():
    class Direct(nn.GRU):
        pass
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 6)
        def forward(self, x):
            p = [self.rnn.weight_ih_l0, self.rnn.weight_hh_l0, self.rnn.bias_ih_l0, self.rnn.bias_hh_l0]
            y = torch.gru(x, x.new_zeros(1, x.shape[1], 6), p, True, 1, 0.0, False, False, False)[0]
            return y + self.rnn(x)[0]
    return Calls(), (torch.zeros(7, 3, 4),)
"""


def run(*arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return path


@pytest.mark.parametrize(
    ("name", "options", "states"),
    [
        ("net", ["--expose-states"], 2),
        ("packing", ["--expose-states"], 1),
        ("alone", [], 0),
        ("projected", ["--expose-states"], 2),
        ("twice", ["--expose-states"], 2),
        rare("projected", [], 0),
        rare("cell", ["--expose-states"], 1),
    ],
)
def test_export_and_verify(factories: Path, name: str, options: list[str], states: int) -> None:
    """The judge of ``verify`` is torch's own layer in float64, default states fed to it too."""
    source, file, report = f"{factories}:{name}", factories.parent / "m.onnx", factories.parent / "r.json"
    done = run("export", source, "-o", file, "--report", report, *options)
    assert done.exit_code == 0, done.output
    assert len(json.loads(report.read_text())["states"]) == states
    done = run("verify", file, "--against", source)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("peephole", "the module: Peephole changes the forward of LSTM"),
        ("direct", "frozen at 7"),
    ],
)
def test_refused_and_no_file(factories: Path, name: str, words: str) -> None:
    file = factories.parent / "m.onnx"
    done = run("export", f"{factories}:{name}", "-o", file)
    assert done.exit_code == 1
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not file.exists()


LAYERS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(5, 6, 2, bidirectional=True),
    "gru": lambda: nn.GRU(5, 6, bidirectional=True),
    "rnn": lambda: nn.RNN(5, 6, 2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["lstm", rare("gru"), rare("rnn")])
def test_both_exporters_of_torch(name: str, tmp_path: Path) -> None:
    """``export`` uses torch.export; the file of torch's TorchScript exporter becomes the same through ``convert``."""
    layer = trained(LAYERS[name]())
    example = rows(1, 7, 3, 5)
    ours = export(layer, (example,))
    names, dynamic = ["input"], {"input": {0: "time", 1: "batch"}}
    torch.onnx.export(
        layer, (example,), str(tmp_path / "old.onnx"), dynamo=False, input_names=names, dynamic_axes=dynamic
    )
    convert_file(tmp_path / "old.onnx", tmp_path / "new.onnx")
    theirs = onnx.load(tmp_path / "new.onnx")
    assert [n.op_type for n in walk_nodes(theirs) if is_flashrnn(n)] == ops(ours)
    x = rows(2, 11, 2, 5)
    runner = make_runner("onnxruntime", theirs)
    pairs = zip(runner.infer({"input": x.numpy()}).values(), outputs_of(ours, (x,)).values(), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_the_other_exporter_has_no_multi_head_layer(tmp_path: Path) -> None:
    """Its tracer runs the loop of MultiHeadRNN and freezes T: the file has no op, and only ``export`` writes one."""
    net = MultiHeadRNN(5, 6, 2).eval()
    torch.onnx.export(net, (rows(1, 4, 3, 5),), str(tmp_path / "old.onnx"), dynamo=False)
    assert not [n for n in walk_nodes(onnx.load(tmp_path / "old.onnx")) if is_flashrnn(n)]
    assert ops(export(net, (rows(1, 4, 3, 5),))) == ["FlashLSTM"]
