"""The programs that a build of the plugin library needs: which are there, of which version, and what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.gpus import GPU

LEAST_CMAKE = (3, 18)
LEAST_NVCC = (11, 4)
FIRST_NVCC = {80: (11, 0), 86: (11, 1), 87: (11, 4), 89: (11, 8), 90: (12, 1), 100: (12, 8), 120: (12, 8), 110: (13, 0)}
"""The first CUDA version whose nvcc compiles the kernels for a compute capability: the one that knows it (CUDA release
notes; older ones know 7.5), and for 9.0, known since 11.8, the one with ``st.async`` (PTX ISA 8.1)."""

_USUAL_NVCC = Path("/usr/local/cuda/bin/nvcc")
CURES = {
    "cmake": "apt install cmake (or pip install cmake)",
    "ninja": "apt install ninja-build (or pip install ninja)",
    "g++": "apt install g++",
    "nvcc": "install the CUDA toolkit, https://developer.nvidia.com/cuda-downloads, or pass --nvcc PATH; "
    "--gpu cpu needs none",
}


@dataclass(frozen=True)
class Tools:
    """Paths of the programs.

    ``cxx`` is None where a toolchain file or the environment's CXX names one, ``nvcc`` where no GPU is built for.
    """

    cmake: str
    ninja: str
    cxx: str | None
    nvcc: str | None
    nvcc_version: str | None


def find_tools(gpus: Sequence[GPU], nvcc: Path | None = None, toolchain: Path | None = None) -> Tools:
    """Look up CMake, Ninja, a C++ compiler (unless a toolchain file or CXX names one) and, for GPUs, nvcc.

    Raises:
        FlashRNNError: one is missing or too old, or nvcc does not know a GPU; the message names what was found and
            what to install.
    """
    if toolchain is not None and not toolchain.is_file():
        raise FlashRNNError(f"--toolchain {toolchain}: there is no such file; it is a CMake toolchain file")
    cxx = os.environ.get("CXX", "").strip() if toolchain is None else ""
    if cxx and shutil.which(cxx) is None and shutil.which(cxx.split()[0]) is None:
        raise FlashRNNError(f"CXX={cxx} of the environment is no program: set it to a C++ compiler, or unset it")
    needed = ["cmake", "ninja", *([] if toolchain or cxx else ["g++"])]
    found = {name: shutil.which(name) for name in needed}
    if "g++" in needed and found["g++"] is None:
        found["g++"] = shutil.which("c++") or shutil.which("clang++")
    if gpus:
        found["nvcc"] = _find_nvcc(nvcc)
    if missing := [name for name, path in found.items() if path is None]:
        there = ", ".join(str(path) for path in found.values() if path) or "none of them"
        cures = [_cure(name) for name in missing]
        raise FlashRNNError(
            f"build-plugins needs {', '.join(found)}; found {there}; missing {', '.join(missing)}: {'; '.join(cures)}"
        )
    cmake, ninja = str(found["cmake"]), str(found["ninja"])
    if (version := _version(cmake, r"version (\d+)\.(\d+)")) < LEAST_CMAKE:
        raise FlashRNNError(f"CMake {_text(version)} at {cmake} is too old, 3.18 is needed: pip install cmake")
    nvcc_path = found.get("nvcc")
    nvcc_version = _check_nvcc(nvcc_path, gpus) if nvcc_path else None
    return Tools(cmake, ninja, found.get("g++"), nvcc_path, nvcc_version)


def _find_nvcc(given: Path | None) -> str | None:
    if given is None:
        return shutil.which("nvcc")
    path = shutil.which(str(given.absolute()))
    if path is None:
        raise FlashRNNError(f"--nvcc {given}: there is no such program; give the path of nvcc itself")
    return path


def _cure(name: str) -> str:
    if name == "nvcc" and _USUAL_NVCC.is_file():
        return f"nvcc is not on PATH, but {_USUAL_NVCC} is there: pass --nvcc {_USUAL_NVCC}"
    return CURES[name]


def _check_nvcc(nvcc: str, gpus: Sequence[GPU]) -> str:
    """The version of nvcc, as text, where it is new enough and knows the GPUs."""
    version = _version(nvcc, r"release (\d+)\.(\d+)")
    if version < LEAST_NVCC:
        raise FlashRNNError(f"nvcc {_text(version)} at {nvcc} is too old: install CUDA {_text(LEAST_NVCC)} or newer")
    known = {int(number) for number in re.findall(r"compute_(\d+)", _output(nvcc, "--list-gpu-arch"))}
    for gpu in gpus:
        first = FIRST_NVCC.get(gpu.compute_capability, LEAST_NVCC)
        if gpu.compute_capability in known and version < first:
            raise FlashRNNError(
                f"nvcc {_text(version)} at {nvcc} lacks instructions that the kernels for {gpu.name} need: install "
                f"CUDA {_text(first)} or newer, or pass another --nvcc PATH"
            )
        if gpu.compute_capability not in known:
            raise FlashRNNError(
                f"nvcc {_text(version)} at {nvcc} does not know {gpu.arch} ({gpu.name}); it knows "
                f"{', '.join(f'sm_{k}' for k in sorted(known)) or 'no GPU'}: install CUDA {_text(first)} or newer"
                f"{' (not so new that it dropped this GPU)' if version >= first else ''}, or pass another --nvcc PATH"
            )
    return _text(version)


def _version(program: str, pattern: str) -> tuple[int, ...]:
    output = _output(program, "--version")
    if not (match := re.search(pattern, output)):
        raise FlashRNNError(f"{program} --version says nothing that looks like a version: {output[:200]!r}")
    return tuple(int(part) for part in match.groups())


def _output(program: str, *arguments: str) -> str:
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FlashRNNError(f"{program} {' '.join(arguments)} does not run: {error}") from error
    if done.returncode:
        text = (done.stderr or done.stdout)[:200]
        raise FlashRNNError(f"{program} {' '.join(arguments)} fails with status {done.returncode}: {text}")
    return done.stdout


def _text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
