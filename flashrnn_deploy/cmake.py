"""Running CMake and Ninja in a build folder: output into a log, steps told, a failure in one line."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.toolchain import Tools

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all (0: not known yet) and what was done."""

_STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")
_TELLING = re.compile(r"error|undefined reference|No space left|cannot find", re.IGNORECASE)


@dataclass(frozen=True)
class Builder:
    """Builds CMake projects with these programs.

    Args:
        tools: the programs.
        toolchain: a CMake toolchain file, for another host architecture.
        jobs: compilers to run at once.
        allow_warnings: whether warnings stop the build.
        temporary: folder for the programs' temporary files.
        log_path: where all output goes.
        log_file: the same, open for writing.
        progress: told what is done.
        log: called with each line of output.
    """

    tools: Tools
    toolchain: Path | None
    jobs: int
    allow_warnings: bool
    temporary: Path
    log_path: Path
    log_file: IO[str]
    progress: Progress
    log: Callable[[str], None]

    def build(self, source: Path, folder: Path, values: Mapping[str, str]) -> None:
        """Configure and build the project in ``source``.

        Raises:
            FlashRNNError: a program fails; the message has its first lines that tell of an error.
        """
        tools = self.tools
        common = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": tools.ninja,
            "FLASHRNN_WERROR": "OFF" if self.allow_warnings else "ON",
        }
        if self.toolchain:
            common["CMAKE_TOOLCHAIN_FILE"] = str(self.toolchain.absolute())
        if tools.cxx:
            common["CMAKE_CXX_COMPILER"] = tools.cxx
        if tools.nvcc:
            common["CMAKE_CUDA_COMPILER"] = tools.nvcc
        flags = [f"-D{name}={value}" for name, value in (common | dict(values)).items()]
        self.progress(0, 0, "configuring")
        self._call([tools.cmake, "-S", str(source), "-B", str(folder), "-G", "Ninja", *flags])
        self._call([tools.ninja, "-C", str(folder), "-j", str(self.jobs)])

    def kernel_values(self, configs: Path, text: str) -> dict[str, str]:
        """Writes a data file of kernels, where it is new, and returns CMake's variables for it.

        Kernels are dealt to so many files that every job has work, four in a file at most.
        """
        if not configs.is_file() or configs.read_text(encoding="utf-8") != text:
            configs.parent.mkdir(exist_ok=True)
            configs.write_text(text, encoding="utf-8")
        per_file = min(4, max(1, -(-text.count("KERNEL(") // self.jobs)))
        return {"FLASHRNN_KERNEL_CONFIGS": str(configs), "FLASHRNN_KERNELS_PER_FILE": str(per_file)}

    def _call(self, command: Sequence[str]) -> None:
        environment = os.environ | {"TMPDIR": str(self.temporary), "NINJA_STATUS": "[%f/%t] "}
        lines: list[str] = []
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=environment,
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    self.log_file.write(line)
                    lines.append(line.rstrip())
                    self.log(lines[-1])
                    if (step := _STEP.match(line)) and "globbed" not in line:
                        what = step[3].split("/")[-1].removesuffix(".o").strip()
                        self.progress(int(step[1]), int(step[2]), what)
            except BaseException:
                process.terminate()  # Ninja ends its compilers
                raise
        self.log_file.flush()
        if process.returncode:
            raise FlashRNNError(_failure(lines, self.log_path))


def _failure(lines: Sequence[str], log_path: Path) -> str:
    """The first lines that tell of an error, else the last ones."""
    telling = [n for n, line in enumerate(lines) if _TELLING.search(line) and "FAILED" not in line and len(line) < 400]
    start = telling[0] if telling else max(0, len(lines) - 4)
    said = " | ".join(line.strip() for line in lines[start : start + 4] if line.strip())[:600]
    cure = (
        " (--allow-warnings goes on where a newer compiler warns)" if any("[-Werror" in line for line in lines) else ""
    )
    return f"the build fails: {said}{cure}; the whole log is in {log_path}"
