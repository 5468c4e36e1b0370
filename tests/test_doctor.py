"""`doctor` tells what is there, with nothing installed and with packages that do not load, and never fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashrnn_deploy import doctor, gpus
from flashrnn_deploy.cli import main
from flashrnn_deploy.errors import FlashRNNError

PACKAGES = ("onnxruntime", "torch", "tensorrt", "tensorrt_rtx_bindings", "pycuda")


def package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)


def facts(stdout: str) -> dict[str, dict[str, object]]:
    return {fact["part"]: fact for fact in json.loads(stdout)}


def test_with_nothing_installed(tmp_path: Path) -> None:
    """No package, no program, no headers: every row says what to do, and the command succeeds."""
    program = f"""
import sys
for name in {PACKAGES}:
    sys.modules[name] = None
from flashrnn_deploy import doctor
from flashrnn_deploy.cli import main
doctor.HEADER_FOLDERS = ()
main(["doctor", "--json"])
"""
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    there = facts(done.stdout)
    assert list(there) == ["GPU", *PACKAGES, "nvcc", "g++", "cmake", "ninja", "TensorRT headers"]
    for part, fact in there.items():
        if part not in ("GPU", "TensorRT headers"):
            assert not fact["found"], part
            assert "install" in str(fact["cure"])
    assert there["tensorrt"]["cure"] == 'pip install "flashrnn-deploy[tensorrt]"'
    assert there["pycuda"]["cure"] == "pip install pycuda; where that does not compile: CUDA_ROOT in docs/tensorrt.md"
    assert "tensorrt-rtx-cu13-bindings" in str(there["tensorrt_rtx_bindings"]["cure"])


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked in a process of its own: one that crashes or does not load is a row, not the end."""
    package(tmp_path, "tensorrt", "__version__ = '10.14.1'")
    package(tmp_path, "tensorrt_rtx_bindings", "import os; os.abort()")
    package(tmp_path, "pycuda", "VERSION_TEXT = '2026.1'")
    (tmp_path / "pycuda" / "driver.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    package(tmp_path, "onnxruntime", "__version__ = '9.9'; get_available_providers = lambda: ['A', 'B']")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    rows = {name: doctor._package(name) for name in PACKAGES if name != "torch"}
    assert (rows["tensorrt"].found, rows["tensorrt"].what) == (True, "10.14.1")
    assert rows["onnxruntime"].what == "9.9: A, B"
    assert not rows["tensorrt_rtx_bindings"].found
    assert "does not load" in rows["tensorrt_rtx_bindings"].what
    assert not rows["pycuda"].found
    assert "libcuda.so.1: cannot open" in rows["pycuda"].what


def test_programs_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("nvcc", "Cuda compilation tools, release 12.6, V12.6.20"), ("g++", "g++ (Debian) 12.2.0")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, version in (("nvcc", "12.6"), ("g++", "12.2.0")):
        assert doctor._program(name).what == f"{version} at {tmp_path / name}"
    assert not doctor._program("cmake").found
    (tmp_path / "NvInferRuntime.h").write_text("")
    (tmp_path / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 8\n#define NV_TENSORRT_MINOR 5\n")
    fact = doctor._headers(["/nowhere", str(tmp_path)])
    assert fact.found
    assert fact.what == f"8.5 in {tmp_path}: build-plugins --tensorrt-include {tmp_path}"
    assert not doctor._headers(["/nowhere"]).found


def test_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "get", lambda name: gpus.GPUS["h200"])
    fact = doctor._gpu()
    assert fact.found
    assert fact.what.startswith("H200 SXM, compute capability 9.0, driver ")

    def none(name: str) -> gpus.GPU:
        raise FlashRNNError(
            "--gpu local needs an NVIDIA driver, but libcuda.so.1 does not load; name a GPU instead: t4"
        )

    monkeypatch.setattr(gpus, "get", none)
    assert doctor._gpu().what == "needs an NVIDIA driver, but libcuda.so.1 does not load"


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine, which runs the tests: torch and ONNX Runtime are there."""
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    there = facts(result.stdout)
    assert there["torch"]["found"]
    assert "CPUExecutionProvider" in str(there["onnxruntime"]["what"])
    rows = [doctor.Fact("GPU", True, "H200"), doctor.Fact("tensorrt", False, "for build-engine", "pip install it")]
    monkeypatch.setattr(doctor, "examine", lambda: rows)
    table = CliRunner().invoke(main, ["doctor"])
    assert table.exit_code == 0
    for words in (("GPU", "yes", "H200"), ("tensorrt", "no", "for build-engine", "pip install it")):
        assert any(all(word in line for word in words) for line in table.stdout.splitlines())
