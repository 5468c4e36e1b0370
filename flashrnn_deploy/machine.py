"""What a measurement was made on: versions of the engines, and the processor or GPU."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from flashrnn_deploy import __version__, gpus

_ENGINES = ("onnxruntime", "torch", "tensorrt")


def describe_machine(device: str) -> dict[str, str]:
    """Names and versions, for "cpu" or "cuda"; of engines, those that this process has loaded.

    Raises:
        FlashRNNError: "cuda", and the driver finds no GPU that the kernels know.
    """
    facts = {"device": gpus.get("local").product if device == "cuda" else processor()}
    if device == "cuda":
        facts["driver"] = nvidia_driver()
    facts |= {"python": platform.python_version(), "flashrnn-deploy": __version__}
    engines = {name: sys.modules[name] for name in _ENGINES if name in sys.modules}
    return facts | {name: module.__version__ for name, module in engines.items()}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, and how many of its cores this process may use."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    name = found[1] if found else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def nvidia_driver(version: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of NVIDIA's driver as its kernel module tells it, or "unknown"."""
    found = re.search(r"\d+\.\d+(\.\d+)?", version.read_text()) if version.is_file() else None
    return found[0] if found else "unknown"
