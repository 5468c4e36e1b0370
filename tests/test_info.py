"""`info`: what it says of models and libraries."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import models
import numpy as np
import pytest
from click.testing import CliRunner
from models import network
from onnx import helper, numpy_helper

from flashrnn_deploy import info
from flashrnn_deploy.backends.ort import register
from flashrnn_deploy.cli import main
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec

SPEC = RNNSpec("lstm", 3, 4, num_directions=2, dtype="float16", layout=1, clip=0.5)


def test_a_model(tmp_path: Path) -> None:
    path = models.save(network(SPEC), tmp_path / "m.onnx")
    result = CliRunner().invoke(main, ["info", str(path), "--json"])
    facts = json.loads(result.stdout)
    assert facts["nodes"] == {"MatMul": 2, "flashrnn::FlashLSTM": 1}
    (node,) = facts["flashrnn"]
    assert {k: node[k] for k in ("name", "op", "cell", "num_heads", "head_dim", "num_directions")} == {
        "name": "rnn",
        "op": "FlashLSTM",
        "cell": "lstm",
        "num_heads": 3,
        "head_dim": 4,
        "num_directions": 2,
    }
    assert (node["dtype"], node["layout"], node["clip"]) == ("float16", 1, 0.5)
    assert node["macs_per_step"] == facts["macs_per_step"] == 2 * 4 * 3 * 4 * 4
    # w_in, w_out, r, b; the lengths are no parameter
    assert facts["parameters"] == 5 * 96 + 24 * 3 + 2 * 4 * 3 * 16 + 2 * 4 * 12
    assert facts["inputs"][0] == {
        "name": "x",
        "dtype": "float16",
        "shape": ["batch", "time", 5],
        "time_axis": 1,
        "batch_axis": 0,
    }
    assert facts["states"] == {"state0": "state1"}
    assert facts["opsets"] == {"ai.onnx": 17, "flashrnn": 1}
    assert facts["engines"]["onnxruntime"].startswith("yes, on the function body")


def test_the_table(tmp_path: Path) -> None:
    path = models.save(network(SPEC, out="out\x1b[31m[bold]"), tmp_path / "m.onnx")
    result = CliRunner().invoke(main, ["info", str(path)])
    assert result.exit_code == 0, result.output
    for text in ("FlashLSTM", "head_dim", "state0: state1", "float16", "out\\x1b[31m[bold]"):
        assert text in result.stdout
    assert "time_axis" in result.stdout
    assert "relu" not in result.stdout  # columns of defaults only are left out
    assert "\x1b[31m" not in result.stdout


def test_other_models(tmp_path: Path) -> None:
    facts = info.model_info(models.save(network(SPEC, body=False), tmp_path / "m.onnx"))
    assert facts["engines"]["onnxruntime"].startswith("only with a plugin library")
    model = network(SPEC)
    del model.graph.node[1]
    weight = numpy_helper.from_array(np.zeros(7, np.float32))
    model.graph.node.insert(0, helper.make_node("Constant", [], ["extra"], value=weight))
    facts = info.model_info(models.save(model, tmp_path / "m.onnx"))
    assert facts["engines"]["onnxruntime"] == "yes, no FlashRNN op inside"
    assert facts["flashrnn"] == []
    assert facts["parameters"] == 5 * 96 + 24 * 3 + 2 * 4 * 3 * 16 + 2 * 4 * 12 + 7


def test_neither_model_nor_library(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "bad.so").write_text("hello")
    for name, message in (("text", "is not an ONNX file"), ("none", "No such file"), ("bad.so", "cannot load")):
        result = CliRunner().invoke(main, ["info", str(tmp_path / name)])
        assert result.exit_code == 1
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a library")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ('const char *flashrnn_info(void) { return "{\\"architectures\\": [90]}"; }', ""),
        ('const char *flashrnn_info(void) { return "[]"; }', "no JSON object"),
        ('const char *flashrnn_info(void) { return "x"; }', "gives no JSON"),
        ("const char *flashrnn_info(void) { return 0; }", "gives no JSON"),
        ("int other;", "is not a FlashRNN plugin library: it has no function flashrnn_info"),
    ],
)
def test_a_library(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "lib.c").write_text(code + "\n")
    library = tmp_path / "lib.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "lib.c"], check=True)
    if message:
        with pytest.raises(FlashRNNError, match=message):
            info.describe_file(library)
        return
    result = CliRunner().invoke(main, ["info", str(library), "--json"])
    assert json.loads(result.stdout) == {"kind": "plugin library", "file": str(library), "architectures": [90]}
    assert "architectures" in CliRunner().invoke(main, ["info", str(library)]).stdout


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a library")
def test_a_library_that_was_cut_off_or_is_for_another_processor(tmp_path: Path) -> None:
    """The loader would map the file and end the process by SIGBUS."""
    (tmp_path / "lib.c").write_text('const char *flashrnn_info(void) { return "{}"; }\n')
    whole, part = tmp_path / "lib.so", tmp_path / "part.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", whole, tmp_path / "lib.c"], check=True)
    data = whole.read_bytes()
    for size in (40, 100, 3000, len(data) // 2, len(data) - 1):
        part.write_bytes(data[:size])
        for act in (lambda: info.describe_file(part), lambda: register(None, part)):
            with pytest.raises(FlashRNNError, match=rf"part.so is cut off: {size} .*copy or build it again"):
                act()
    machine = {"x86_64": 183, "aarch64": 62}[platform.machine()]
    part.write_bytes(data[:18] + machine.to_bytes(2, "little") + data[20:])
    with pytest.raises(
        FlashRNNError, match=rf"part.so is for (x86_64|aarch64), and this machine is {platform.machine()}"
    ):
        info.describe_file(part)
    part.write_bytes(b"text\n")
    with pytest.raises(FlashRNNError, match="cannot load the library"):
        info.describe_file(part)


def test_double_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for names, warned in ((("onnxruntime",), False), (("onnxruntime", "onnxruntime-gpu"), True)):
        folder = tmp_path / str(len(names))
        for name in names:
            home = folder / f"{name.replace('-', '_')}-1.2.3.dist-info"
            home.mkdir(parents=True)
            (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
        monkeypatch.setattr("sys.path", [str(folder)])
        text = info.double_install()
        assert ("onnxruntime 1.2.3 and onnxruntime-gpu 1.2.3 are both installed" in text) is warned
        assert bool(text) is warned
