"""The command line itself: names, exit codes, one line per mistake, tracebacks for bugs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import flashrnn_deploy
from flashrnn_deploy.cli import main
from flashrnn_deploy.errors import FlashRNNError

REPORT = {
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["time", "batch", 3]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["time", "batch", 8]}],
    "opset": 17,
    "nodes": [{"name": "rnn", "op": "FlashGRU", "cell": "gru"}],
    "states": {"h0": "h1"},
    "warnings": ["slow without\na library"],
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand-ins for the exporters and the quickstart; what they are called with."""
    seen: list[Any] = []

    def record(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
            seen.append((name, args, kwargs))
            return REPORT

        return call

    exporters = types.ModuleType("flashrnn_deploy.exporters")
    quickstart = types.ModuleType("flashrnn_deploy.quickstart")
    exporters.export_file, exporters.convert_file = record("export"), record("convert")  # type: ignore[attr-defined]
    quickstart.run = record("quickstart")  # type: ignore[attr-defined]
    for name, module in (("exporters", exporters), ("quickstart", quickstart)):
        monkeypatch.setitem(sys.modules, f"flashrnn_deploy.{name}", module)
        monkeypatch.setattr(flashrnn_deploy, name, module, raising=False)
    return seen


def test_python_m_is_the_same_command() -> None:
    for arguments in (["--help"], ["--version"], ["run", "--help"]):
        code = "from flashrnn_deploy.cli import main; main(prog_name='python -m flashrnn_deploy')"
        module, direct = (
            subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True)
            for start in (["-m", "flashrnn_deploy"], ["-c", code])
        )
        assert module.returncode == direct.returncode == 0
        assert module.stdout == direct.stdout != ""


def test_every_command_is_there() -> None:
    assert {"quickstart", "export", "run", "verify", "info", "solve", "convert"} <= set(main.commands)


@pytest.mark.parametrize(
    "arguments",
    [["nope"], ["run"], ["run", "m.onnx"], ["run", "m.onnx", "-o", "d", "--backend", "x"], ["export", "f.py:make"]],
)
def test_usage_errors_exit_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == 2


@pytest.mark.parametrize("command", [["run", "none.onnx", "-o", "d"], ["verify", "none.onnx"], ["info", "none.onnx"]])
def test_missing_files_exit_1(command: list[str]) -> None:
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot read")
    assert len(result.stderr.splitlines()) == 1


def test_export(calls: list[Any], tmp_path: Path) -> None:
    options = "--weights w.pt --dtype float16 --opset 18 --dynamic x:0=t --dynamic x:1=b --static y:2 --expose-states"
    target, report = tmp_path / "m.onnx", tmp_path / "r.json"
    arguments = ["export", "net.py:make", "-o", str(target), *options.split(), "--report", str(report)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    expected = {
        "weights": Path("w.pt"),
        "dtype": "float16",
        "opset": 18,
        "dynamic": ("x:0=t", "x:1=b"),
        "static": ("y:2",),
        "expose_states": True,
    }
    assert calls == [("export", ("net.py:make", target), expected)]
    assert json.loads(report.read_text()) == REPORT
    for text in ("[time, batch, 3]", "FlashGRU", "h0", "opset 17"):
        assert text in result.stdout
    assert result.stderr == "note: slow without a library\n"


def test_export_defaults(calls: list[Any]) -> None:
    CliRunner().invoke(main, ["export", "net.py:make", "-o", "m.onnx"])
    defaults = {"weights": None, "dtype": None, "opset": None, "dynamic": (), "static": (), "expose_states": False}
    assert calls == [("export", ("net.py:make", Path("m.onnx")), defaults)]


def test_convert(calls: list[Any]) -> None:
    result = CliRunner().invoke(main, ["convert", "in.onnx", "-o", "out.onnx", "--expose-states", "--opset", "17"])
    assert calls == [("convert", (Path("in.onnx"), Path("out.onnx")), {"expose_states": True, "opset": 17})]
    assert "FlashGRU" in result.stdout


def test_quickstart(calls: list[Any]) -> None:
    CliRunner().invoke(main, ["quickstart"])
    CliRunner().invoke(main, ["quickstart", "-o", "there"])
    assert [args for _, args, _ in calls] == [(Path("quickstart"),), (Path("there"),)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FlashRNNError("first\n  second"), "error: first second\n"),
        (ModuleNotFoundError(name="torch"), 'torch, which is not installed: pip install "flashrnn-deploy[export]"'),
        (ModuleNotFoundError(name="tensorrt"), 'pip install "flashrnn-deploy[tensorrt]"'),
        (
            ModuleNotFoundError(name="pycuda.driver"),
            "error: this needs pycuda, which is not installed: pip install pycuda; where that does not compile: "
            "flashrnn-deploy doctor\n",
        ),
        (
            MemoryError("Unable to allocate 298. GiB"),
            "this needs more memory than there is: Unable to allocate 298. GiB",
        ),
    ],
)
def test_mistakes_are_one_line(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules["flashrnn_deploy.exporters"], "export_file", fail)
    result = CliRunner().invoke(main, ["export", "net.py:make", "-o", "m.onnx"])
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("error", [KeyError("bug"), ModuleNotFoundError(name="yaml")])
def test_bugs_keep_their_traceback(calls: list[Any], monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules["flashrnn_deploy.exporters"], "export_file", fail)
    with pytest.raises(type(error)):
        CliRunner().invoke(main, ["export", "net.py:make", "-o", "m.onnx"], catch_exceptions=False)


def test_an_empty_path_is_none(tmp_path: Path) -> None:
    """What an unset variable of the shell leaves; Path("") would be the current folder."""
    result = CliRunner().invoke(main, ["build-plugins", "m.onnx", "--gpu", "cpu", "-o", ""])
    assert result.exit_code == 2
    assert "the path is empty" in result.stderr


def test_solve() -> None:
    layer = {"cell": "lstm", "heads": "1", "head-dim": "768", "batch": "16", "dtype": "bfloat16", "gpu": "h200"}
    command = ["solve", *(part for name, value in layer.items() for part in (f"--{name}", value))]
    result = CliRunner().invoke(main, [*command, "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["gpu"] == "h200"
    assert facts["predicted_step_us"] > 0
    assert "candidates removed" not in CliRunner().invoke(main, command).stdout
    explained = CliRunner().invoke(main, [*command, "--explain"]).stdout
    assert "candidates removed" in explained
    assert all(entry["constraint"] in explained for entry in facts["explain"])
    cut, examined = map(int, re.findall(r"(\d+) could not be better than what was known, (\d+) were", explained)[0])
    assert examined > 0
    assert cut + examined + sum(entry["removed"] for entry in facts["explain"]) == facts["candidates"]


def test_solve_tells_what_the_alternating_mode_has_and_no_more() -> None:
    """It has no tiles to choose: JSON keeps the fields, the table leaves them out."""
    command = ["solve", "--cell", "lstm", "--head-dim", "3072", "--gpu", "h200"]
    facts = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert (facts["kernel"], facts["on_chip_bytes"]) == ("streaming", 31457280)
    assert {"ring_depth", "units_per_block"} < set(facts["config"])
    assert facts["sizes"]["num_blocks"] == 0
    told = CliRunner().invoke(main, command).stdout
    assert all(text in told for text in ("mode: alternating, padded_head_dim: 3072", "streaming", "31457280"))
    assert not any(name in told for name in ("units_per_block", "ring_depth", "num_blocks", "shared_memory_bytes"))
    other = CliRunner().invoke(main, [*command, "--head-dim", "768"]).stdout
    assert all(name in other for name in ("units_per_block", "num_blocks"))
    assert "kernel" not in other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--cell", "gpt"], "unknown cell"),
        (["--gpu", "abacus"], "abacus"),
        (["--dtype", "int8"], "dtype int8"),
        (["--batch", "0"], "batch"),
        (["--batch", "1000000000000"], "batch must be at least 1 and at most 2147483647"),
        (["--head-dim", "2147483648"], "head_dim must be at most 2147483647"),
        (["--head-dim", "65536", "--heads", "65536"], "hidden_size must be at most 2147483647"),
        (["--gpu", "cpu", "--batch", "4"], "the CPU has one kernel for any layer and batch"),
    ],
)
def test_solve_refuses(changes: list[str], message: str) -> None:
    command = ["solve", "--cell", "lstm", "--head-dim", "64", "--gpu", "h200", *changes]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", ["1" + "0" * 20, "\N{ARABIC-INDIC DIGIT SIX}", "6_4", " 64", "6.4"])
@pytest.mark.parametrize("command", ["solve --head-dim", "build-plugins --jobs", "run --chunk", "convert --opset"])
def test_numbers_are_of_ascii_digits(command: str, number: str) -> None:
    result = CliRunner().invoke(main, [*command.split(), number])
    assert result.exit_code == 2
    assert f"'{number}' is no whole number of up to 18 digits" in result.stderr


def test_solve_takes_names_in_any_case() -> None:
    """And a table in a pipe ends its lines where their text does."""
    lower, upper = (
        CliRunner().invoke(main, ["solve", "--cell", cell, "--head-dim", "64", "--gpu", gpu]).stdout
        for cell, gpu in (("lstm", "h200"), ("LSTM", "H200"))
    )
    assert lower == upper
    assert "predicted_step_us" in lower
    assert all(line == line.rstrip() for line in lower.splitlines())


def test_a_report_replaces_no_other_file(tmp_path: Path) -> None:
    """The source, the result or a weight file named as the report is refused before anything is written."""
    source, target = tmp_path / "old.onnx", tmp_path / "new.onnx"
    source.write_bytes(b"precious")
    for report in (source, target, tmp_path / "weights.bin"):
        result = CliRunner().invoke(main, ["convert", str(source), "-o", str(target), "--report", str(report)])
        assert result.exit_code == 1
        assert "the report is JSON" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["old.onnx"]
    assert source.read_bytes() == b"precious"


def test_an_input_in_the_output_directory(tmp_path: Path) -> None:
    """An output of the same name would replace it."""
    arguments = ["run", "m.onnx", "--input", f"x={tmp_path / 'x.npy'}", "-o", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "lies in the output directory" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM handler")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_terminated_command_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    """A job control system ends a program by SIGTERM, a closed terminal by SIGHUP; the report's temporary file is there
    while the factory runs."""
    number = getattr(signal, name)
    factory = tmp_path / "slow.py"
    factory.write_text("import time\n\n\ndef make():\n    time.sleep(300)\n")
    arguments = ["export", f"{factory}:make", "-o", str(tmp_path / "m.onnx"), "--report", str(tmp_path / "r.json")]
    command = [sys.executable, "-B", "-m", "flashrnn_deploy", *arguments]
    # The default, which nohup would change for the tests and their programs.
    with subprocess.Popen(command, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)) as program:
        deadline = time.monotonic() + 120
        while os.listdir(tmp_path) == ["slow.py"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(os.listdir(tmp_path)) == 2
        program.send_signal(number)
        assert program.wait(120) == 128 + number
    assert os.listdir(tmp_path) == ["slow.py"]
