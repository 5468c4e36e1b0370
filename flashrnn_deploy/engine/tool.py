"""Building an engine through ``flashrnn_edge``, the C++ program of samples/cpp_edge, where TensorRT has no Python."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashrnn_deploy.engine import sidecar
from flashrnn_deploy.engine.api import clipped, one_line
from flashrnn_deploy.engine.profiles import Profile
from flashrnn_deploy.errors import FlashRNNError

PROGRAM = "flashrnn_edge"
NEITHER = (
    'this needs tensorrt, which is not installed: pip install "flashrnn-deploy[tensorrt]"; or put flashrnn_edge on '
    "PATH, which builds where TensorRT has no Python: cmake -S samples/cpp_edge -B build-edge && cmake --build "
    "build-edge"
)


def find_tool() -> str:
    """Path of the program.

    Raises:
        FlashRNNError: it is not on PATH.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise FlashRNNError(NEITHER)
    return program


def workspace_hint(workspace: int | None) -> str:
    """What to add to a failure of TensorRT, which does not say that it had too little memory."""
    return "" if workspace is None else f"; --workspace {workspace} may be too little: raise it, or leave it out"


def build_with_tool(
    program: str,
    path: Path,
    output: Path,
    plugins: Sequence[Path],
    profiles: Mapping[str, Profile],
    workspace: int | None,
    tf32: bool,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Write an engine and its sidecar; what the sidecar says.

    Raises:
        FlashRNNError: the program takes one library only, or fails.
    """
    if len(plugins) > 1:
        raise FlashRNNError(f"{program} takes one --plugins LIB; TensorRT's Python module takes more")
    command = [program, "build", str(path), "-o", str(output), "-v"]
    for library in plugins:
        command += ["--plugin", str(library)]
    for name, profile in profiles.items():
        if not profile.max:
            continue  # a scalar has one shape
        shapes = ("x".join(map(str, shape)) for shape in (profile.min, profile.opt, profile.max))
        command += ["--shape", f"{name}={':'.join(shapes)}"]
    if workspace is not None:
        command += ["--workspace", str(workspace)]
    if tf32:
        command.append("--tf32")
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(one_line(line))
                log(lines[-1])
        except BaseException:  # SIGTERM reaches this process alone, and a tool that goes on would be waited for
            process.kill()
            raise
    if process.returncode:
        errors = (
            [line for line in lines if line.startswith("error: ")] or lines[-1:] or [f"status {process.returncode}"]
        )
        raise FlashRNNError(
            f"{program} cannot build an engine of {path}: {clipped(errors[-1].removeprefix('error: '))}"
            f"{workspace_hint(workspace)}"
        )
    report: dict[str, Any] = json.loads(sidecar.path_of(output).read_text(encoding="utf-8"))
    return report
