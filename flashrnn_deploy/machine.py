"""What a measurement was made on: versions of the engines, and the processor or GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from flashrnn_deploy import __version__, gpus

_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "torch", "tensorrt")


def describe_machine(device: str) -> dict[str, str]:
    """Names and versions, for "cpu" or "cuda".

    Raises:
        FlashRNNError: "cuda", and the driver finds no GPU that the kernels know.
    """
    facts = {"device": gpus.get("local").product if device == "cuda" else processor()}
    if device == "cuda":
        facts["driver"] = nvidia_driver()
    facts |= {"python": platform.python_version(), "flashrnn-deploy": __version__}
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return facts | {name: installed[name] for name in _PACKAGES if name in installed}


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
