"""An engine that was built for another place is refused before TensorRT sees it (case D3)."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import engines
import fake_tensorrt
import models
import numpy as np
import pytest
from click.testing import CliRunner

from flashrnn_deploy.backends.trt import TrtRunner
from flashrnn_deploy.cli import main
from flashrnn_deploy.engine import sidecar
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.info import describe_file
from flashrnn_deploy.op import RNNSpec

MODEL = models.network(RNNSpec("gru", 2, 4))
REBUILD = (
    "rebuild it with: flashrnn-deploy build-engine m.onnx --plugins libflashrnn.so"
    " --shapes x=1x1x5:100x4x5:512x16x5 --shapes state0=1x1x1x8:1x1x4x8:1x1x16x8 -o "
)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> fake_tensorrt.Cuda:
    return fake_tensorrt.install(monkeypatch)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.library(tmp_path_factory.mktemp("plugin") / "libflashrnn.so")


def change(path: Path, /, **fields: Any) -> None:
    file = sidecar.path_of(path)
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_what_matches_runs(tmp_path: Path, plugin: Path) -> None:
    TrtRunner(engines.write(MODEL, tmp_path / "m.engine", plugin=plugin), [plugin]).close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensorrt": "10.13.0"}, "TensorRT 10.13.0 for compute capability 9.0; this is TensorRT 10.14.1 on compute"),
        ({"tensorrt": "8.5.3"}, "was built with TensorRT 8.5.3 for compute capability 9.0; this is TensorRT 10.14.1"),
        (
            {"compute_capability": "8.6"},
            "for compute capability 8.6; this is TensorRT 10.14.1 on compute capability 9.0",
        ),
        ({"compute_capability": None, "targets": ["8.6", "12.0"]}, "for compute capability 8.6 or 12.0; this is"),
        ({"plugin": {"version": "2", "namespace": ""}}, "version 2 of the plugins in the namespace ''; this"),
        ({"plugin": {"version": "1", "namespace": "x"}}, "version 1 of the plugins in the namespace 'x'; this"),
        ({"engine": {"sha256": "0", "bytes": 1}}, "its sidecar says 1: it is damaged, or of another build"),
    ],
)
def test_what_differs_is_refused(
    tmp_path: Path, plugin: Path, fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one sentence with the command that builds it again, and before TensorRT is called."""
    import tensorrt

    def never(*_: Any) -> None:
        raise AssertionError("TensorRT was called")

    monkeypatch.setattr(tensorrt, "Runtime", never)
    monkeypatch.setattr(tensorrt, "get_plugin_registry", never)
    engine = engines.write(MODEL, tmp_path / "m.engine", plugin=plugin)
    change(engine, **fields)
    with pytest.raises(FlashRNNError) as error:
        TrtRunner(engine, [plugin])
    assert message in str(error.value)
    assert str(error.value).endswith(REBUILD + str(engine))


def test_rtx_engine_names_its_flag(tmp_path: Path) -> None:
    engine = engines.write(MODEL, tmp_path / "m.engine", rtx=True, compute_capability="8.6")
    here = sidecar.Running("1.7.1", True, "9.0")
    with pytest.raises(
        FlashRNNError, match=r"was built with TensorRT-RTX 10\.14\.1.* --shapes .* --rtx -o .*m\.engine$"
    ):
        engines.check(engine, sidecar.read(engine), here)


def test_the_command_that_built_it(tmp_path: Path) -> None:
    """Word by word as it was given, and quoted for a shell; the engine is the one at hand."""
    words = ["build-engine", "my model.onnx", "--plugins", "../lib/libflashrnn.so", "--shapes", "time=1:2:3", "--tf32"]
    engine = engines.write(MODEL, tmp_path / "m.engine", command=words)
    with pytest.raises(FlashRNNError) as error:
        engines.check(engine, sidecar.read(engine), sidecar.Running("1.7.1", True, "9.0"))
    line = str(error.value).partition("rebuild it with: ")[2]
    assert shlex.split(line) == ["flashrnn-deploy", *words, "-o", str(engine)]


def test_fixed_sizes_are_in_a_command_that_is_guessed(tmp_path: Path) -> None:
    """An axis that was given one size is no less dynamic in the file."""
    engine = engines.write(MODEL, tmp_path / "m.engine", ("time=9", "batch=2"))
    with pytest.raises(FlashRNNError, match=r"--shapes x=9x2x5:9x2x5:9x2x5 --shapes state0="):
        engines.check(engine, sidecar.read(engine), sidecar.Running("1.7.1", True, "9.0"))


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "[1]", '{"format": 1}', '{"format": "x", "engine": {}}', "my notes"]
)
def test_only_a_sidecar_is_replaced(tmp_path: Path, text: str) -> None:
    """The user's own file, or the report of a library's build."""
    engine = engines.write(MODEL, tmp_path / "m.engine")
    sidecar.check_replaceable(engine)
    file = sidecar.path_of(engine)
    file.write_text(text)
    with pytest.raises(
        FlashRNNError, match=rf"-o {engine} would replace {file}, which is not the sidecar of an engine"
    ):
        sidecar.check_replaceable(engine)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_damaged_engine(tmp_path: Path, plugin: Path, damage: str) -> None:
    engine = engines.write(MODEL, tmp_path / "m.engine", plugin=plugin)
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    engine.write_bytes({"flipped": bytes(data), "truncated": data[:-7], "empty": b""}[damage])
    with pytest.raises(
        FlashRNNError, match=r"m\.engine (has \d+ bytes, and|does not have the SHA-256).*damaged.*rebuild"
    ):
        TrtRunner(engine, [plugin])


def test_library(tmp_path: Path, plugin: Path) -> None:
    engine = engines.write(MODEL, tmp_path / "m.engine", plugin=plugin)
    other = engines.library(tmp_path / "libother.so", engines.INFO.format("10.13") + engines.CREATORS)
    with pytest.raises(
        FlashRNNError, match=r"library libflashrnn\.so of SHA-256 .*libother\.so is another build.*rebuild"
    ):
        TrtRunner(engine, [other])
    with pytest.raises(
        FlashRNNError, match=r"plugins, version 1, namespace '': pass the library libflashrnn\.so .*--plugins"
    ):
        TrtRunner(engine)
    with pytest.raises(FlashRNNError, match=r"there is no plugin library .*missing\.so"):
        TrtRunner(engine, [tmp_path / "missing.so"])
    change(engine, library=None, plugin=None)
    TrtRunner(engine).close()  # no FlashRNN op inside


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no sidecar m.engine.json, .*--trust-engine"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: maximum recursion"),
        (b"\xff\xfe", "is not JSON"),
        ("[]", "is not the sidecar of an engine"),
        ('{"format": 2}', "has format 2, and this version of flashrnn-deploy reads format 1"),
        ('{"format": 1}', "damaged at 'engine'"),
    ],
)
def test_sidecar_that_cannot_be_read(tmp_path: Path, text: Any, message: str) -> None:
    engine = engines.write(MODEL, tmp_path / "m.engine")
    file = sidecar.path_of(engine)
    file.unlink()
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FlashRNNError, match=message):
        TrtRunner(engine)


@pytest.mark.parametrize(
    "field",
    ["states", "axes", "dtypes", "tensorrt", "rtx", "compute_capability", "model", "lengths", "targets", "command"],
)
def test_fields_of_another_kind(tmp_path: Path, field: str) -> None:
    engine = engines.write(MODEL, tmp_path / "m.engine")
    for value in (1.5, [[1]], {"x": 3}, {"x": {"time": [0]}}):
        if field in ("dtypes", "model") and isinstance(value, dict):
            continue
        change(engine, **{field: value})
        with pytest.raises(FlashRNNError, match=f"is damaged at '{field}'; rebuild it with"):
            sidecar.read(engine)


def test_info(tmp_path: Path, plugin: Path) -> None:
    engine = engines.write(MODEL, tmp_path / "m.engine", plugin=plugin)
    result = CliRunner().invoke(main, ["info", str(engine)])
    assert result.exit_code == 0, result.output
    for text in ("TensorRT engine", "10.14.1", "libflashrnn.so"):
        assert text in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    sizes = ["[1,", "1,", "5]", "[100,", "4,", "5]", "[512,", "16,", "5]"]
    assert ["x", "float32", *sizes, "0", "1", "-"] in rows
    assert next(row for row in rows if row[:1] == ["state0"])[-1] == "state1"
    facts = json.loads(CliRunner().invoke(main, ["info", str(engine), "--json"]).stdout)
    assert facts == {"kind": "TensorRT engine", "file": str(engine), **sidecar.read(engine)}
    sidecar.path_of(engine).write_text("{")
    assert CliRunner().invoke(main, ["info", str(engine)]).exit_code == 1


def test_command_line(tmp_path: Path, plugin: Path) -> None:
    """One line, exit 1, nothing written; --trust-engine runs what has no sidecar, with a note."""
    engine = engines.write(MODEL, tmp_path / "m.engine", plugin=plugin)
    np.save(tmp_path / "x.npy", np.ones((3, 2, models.IN), np.float32))
    np.save(tmp_path / "s.npy", np.zeros((1, 1, 2, 8), np.float32))
    sidecar.path_of(engine).unlink()
    inputs = ["--input", f"x={tmp_path}/x.npy", "--input", f"state0={tmp_path}/s.npy"]
    command = [
        "run",
        str(engine),
        *inputs,
        "--backend",
        "tensorrt",
        "--plugins",
        str(plugin),
        "-o",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "--trust-engine" in result.stderr
    assert not (tmp_path / "out").exists()
    trusted = CliRunner().invoke(main, [*command, "--trust-engine"])
    assert trusted.exit_code == 0, trusted.output
    assert "run on trust" in trusted.stderr
    assert (tmp_path / "out" / "out.npy").is_file()


def test_files_are_checked_before_the_gpu(tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged engine and a missing library are told apart where there is neither TensorRT nor a GPU."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    engine = engines.write(MODEL, tmp_path / "m.engine", plugin=plugin)
    with pytest.raises(FlashRNNError, match=r"pass the library libflashrnn\.so that it was built with"):
        TrtRunner(engine)
    engine.write_bytes(engine.read_bytes() + b"more")
    with pytest.raises(FlashRNNError, match="it is damaged"):
        TrtRunner(engine, [plugin])
    assert "it is damaged" in describe_file(engine)["warnings"][0]
    sidecar.path_of(engine).unlink()
    with pytest.raises(FlashRNNError, match=r"m\.engine has no sidecar"):
        describe_file(engine)


def test_a_model_is_no_engine(tmp_path: Path) -> None:
    path = models.save(MODEL, tmp_path / "m.onnx")
    result = CliRunner().invoke(main, ["run", str(path), "--backend", "tensorrt", "-o", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "is a model and --backend tensorrt runs engines: build one with: flashrnn-deploy build-eng" in result.stderr
