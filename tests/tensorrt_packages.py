"""TensorRT from the package index, for tests: TensorRT-RTX's wheels, which need no GPU, and headers of TensorRT 10."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cpu_library import CACHE

RTX = ("tensorrt-rtx-cu13-libs==1.7.1.116", "tensorrt-rtx-cu13-bindings==1.7.1.116")
HEADERS = "kernel-lens==2.0.1"  # a wheel that ships NVIDIA's headers, under NVIDIA's licence for them


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"pip cannot {' '.join(arguments)}: {done.stderr.strip()[-200:]}")


def installed(name: str, module: str, *packages: str) -> Path:
    """A folder for ``sys.path`` with packages that are none of the test environment's, installed once into .cache/."""
    folder = CACHE / name
    if not (folder / module).is_dir():
        _pip("install", "-q", "--no-deps", "--only-binary", ":all:", "--target", str(folder), *packages)
    return folder


def rtx_folder() -> Path:
    """TensorRT-RTX, 96 MB of wheels."""
    return installed("tensorrt-rtx-1.7.1", "tensorrt_rtx_bindings", *RTX)


def headers_folder() -> Path:
    """TensorRT 10.14's headers."""
    folder = CACHE / "tensorrt-headers-10.14"
    include = folder / "kernel_lens" / "include" / "tensorrt"
    if not (include / "NvInferRuntime.h").is_file():
        _pip("download", "-q", "--no-deps", "--dest", str(folder), HEADERS)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if "/include/tensorrt/" in n])
        wheel.unlink()
    return include
