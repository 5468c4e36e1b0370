"""The quickstart's files and figures, and the commands that it names next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashrnn_deploy.cli import main


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "out"
    result = CliRunner().invoke(main, ["quickstart", "-o", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "accuracy at 256 steps" in result.output
    return folder


def test_learns_and_agrees(made: Path) -> None:
    report = json.loads((made / "report.json").read_text())
    assert report["accuracy"] > 0.97
    assert report["steps_tested"] == 8 * report["steps_trained"]
    assert report["max_error_against_torch"] <= report["tolerance"]
    assert report["max_difference_streamed_and_whole"] <= 1e-6
    assert report["file_bytes"] == (made / "parity.onnx").stat().st_size
    assert 0 < report["whole_us_per_step"] < report["streamed_us_per_step"]
    assert (made / "parity.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in made.iterdir()) == [
        "parity.onnx", "parity.png", "parity.pt", "parity.py", "report.json",
    ]  # fmt: skip


def test_files_are_ready_for_the_other_commands(made: Path, tmp_path: Path) -> None:
    factory = f"{made / 'parity.py'}:model"
    commands = (
        ["verify", str(made / "parity.onnx"), "--against", factory],
        ["export", factory, "-o", str(tmp_path / "again.onnx"), "--weights", str(made / "parity.pt")],
        ["verify", str(tmp_path / "again.onnx"), "--against", str(made / "parity.onnx")],
    )
    for command in commands:
        result = CliRunner().invoke(main, command, catch_exceptions=False)
        assert result.exit_code == 0, (command, result.output)


def test_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = CliRunner().invoke(main, ["quickstart", "-o", str(tmp_path / "q")])
    assert result.exit_code == 1
    assert "pip install" in result.stderr
    assert "flashrnn-deploy[export]" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "q").exists()
