"""Older ONNX Runtimes, each in a folder of its own, for subprocesses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cpu_library import CACHE

OLD_RUNTIMES = ("1.17.3", "1.20.1")


def environment(version: str) -> dict[str, str]:
    """This process's environment with ONNX Runtime ``version`` first on the path; installed once into .cache/."""
    folder = CACHE / f"ort-{version}"
    if not (folder / "onnxruntime").is_dir():
        packages = [f"onnxruntime=={version}", "numpy<2"]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *packages]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"pip cannot install onnxruntime {version}: {done.stderr.strip()[-200:]}")
    return {**os.environ, "PYTHONPATH": str(folder)}
