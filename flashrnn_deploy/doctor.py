"""The `doctor` command: which GPU, engines, compilers and headers are here, and what to install for the rest."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashrnn_deploy import gpus
from flashrnn_deploy.engine.api import RTX_PACKAGES
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.machine import nvidia_driver
from flashrnn_deploy.tensorrt_headers import CURE, read_headers
from flashrnn_deploy.toolchain import CURES

HEADER_FOLDERS = (
    "/usr/include/x86_64-linux-gnu",
    "/usr/include/aarch64-linux-gnu",
    "/usr/include",
    "/usr/local/include",
    "/usr/local/cuda/include",
    "/usr/local/tensorrt/include",
    "/opt/tensorrt/include",
    "/usr/src/tensorrt/include",
)
_NEED = {
    "onnxruntime": "export, verify, run and bench on a CPU",
    "torch": "export, quickstart",
    "tensorrt": "build-engine, run --backend tensorrt",
    "tensorrt_rtx_bindings": "build-engine --rtx",
    "pycuda": "run --backend tensorrt",
}
_INSTALL = {
    "onnxruntime": 'pip install "flashrnn-deploy[export]", or [cuda] with a GPU',
    "torch": 'pip install "flashrnn-deploy[export]"',
    "tensorrt": 'pip install "flashrnn-deploy[tensorrt]"',
    "tensorrt_rtx_bindings": f"pip install {RTX_PACKAGES}",
    "pycuda": "pip install pycuda; where that does not compile: CUDA_ROOT in docs/tensorrt.md",
}
_DISTRIBUTIONS = {"onnxruntime": ("onnxruntime", "onnxruntime-gpu")}
_IMPORT_SECONDS = 120


@dataclass(frozen=True)
class Fact:
    """One part of the machine: whether it is there, what it is, and how to get it where it is not."""

    part: str
    found: bool
    what: str
    cure: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Fact]:
    """Everything, in the order of the table."""
    programs = [_program(name) for name in ("nvcc", "g++", "cmake", "ninja")]
    return [_gpu(), *map(_package, _NEED), *programs, _headers(HEADER_FOLDERS)]


def _gpu() -> Fact:
    try:
        gpu = gpus.get("local")
    except FlashRNNError as error:
        why = str(error).removeprefix("--gpu local: ").removeprefix("--gpu local ").split("; ")[0]
        return Fact("GPU", False, why, "install NVIDIA's driver; without a GPU everything else runs on the CPU")
    return Fact("GPU", True, f"{gpu.product}, compute capability {gpu.capability}, driver {nvidia_driver()}")


def _package(name: str) -> Fact:
    """One Python package: its version, and whether it loads, asked of another process, which a crash does not hurt."""
    try:
        there = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        return Fact(name, False, f"for {_NEED[name]}", _INSTALL[name])
    code = f"import {name} as m; print(m.__version__)"
    if name == "onnxruntime":
        code += "; print(', '.join(m.get_available_providers()))"
    if name == "pycuda":  # the module alone needs no driver
        code = "import pycuda.driver, pycuda; print(pycuda.VERSION_TEXT)"
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Fact(name, False, f"{_versions(name)}does not load: {error}", _INSTALL[name])
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ends with status {done.returncode}"]
        return Fact(name, False, f"{_versions(name)}does not load: {said[-1][:200]}", _INSTALL[name])
    return Fact(name, True, ": ".join(done.stdout.split("\n")).strip(": "))


def _versions(name: str) -> str:
    names = _DISTRIBUTIONS.get(name, (name,))
    found = {d.version for d in importlib.metadata.distributions() if d.metadata["Name"] in names}
    return "".join(f"{version} " for version in sorted(found))


def _program(name: str) -> Fact:
    path = shutil.which(name)
    if path is None:
        return Fact(name, False, "for build-plugins" + " with a GPU" * (name == "nvcc"), CURES[name])
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Fact(name, False, f"{path} does not run: {error}", CURES[name])
    version = re.search(r"release (\d[\d.]*)" if name == "nvcc" else r"\d+\.\d[\w.]*", done.stdout)
    return Fact(name, True, f"{(version[1] if name == 'nvcc' else version[0]) if version else '?'} at {path}")


def _headers(folders: Iterable[str]) -> Fact:
    for folder in folders:
        with contextlib.suppress(FlashRNNError):
            headers = read_headers(Path(folder))
            what = f"{headers.version} in {folder}: build-plugins --tensorrt-include {folder}"
            return Fact("TensorRT headers", True, what)
    return Fact("TensorRT headers", False, "for build-plugins --tensorrt-include", CURE)
