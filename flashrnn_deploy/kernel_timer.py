"""The timing program of ``plugins/timer``: which kernels agree with the alternating one, and how long each takes.

It needs no torch, and it is a process of its own with a limit on its time: a kernel that hangs, or breaks the GPU's
context, costs that kernel and not the build.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrnn_deploy import kernel_table
from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.compare import PAIR_TOLERANCE
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import printable
from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.kernel_config import KernelConfig
from flashrnn_deploy.op import DTYPES, RNNSpec
from flashrnn_deploy.tuned_file import LONGEST_REASON, Timing

STEPS = 1024
LARGEST_WX_BYTES = 2**29
LIMIT_S = 120.0
"""Seconds for one layer and batch, all candidates; the slowest seen take a few."""

ALTERNATING = -1
_LINE = re.compile(r"(begin|failed|error|us) (-?\d+) ?(.*)")


@dataclass(frozen=True)
class Job:
    """Configurations to time for a layer and batch."""

    spec: RNNSpec
    batch: int
    configs: tuple[KernelConfig, ...]

    @property
    def steps(self) -> int:
        """Time steps of a launch: enough for its start not to count, fewer where wx would be large."""
        spec = self.spec
        wx_bytes = self.batch * spec.num_directions * spec.hidden_size * spec.definition.num_gates * 4
        return max(16, min(STEPS, LARGEST_WX_BYTES // wx_bytes))


class Timer:
    """The timing program, one process for many jobs; a new one takes the place of one that ended or hung."""

    def __init__(self, program: Path, gpu: GPU, lines: Sequence[str], limit_s: float = LIMIT_S) -> None:
        self._program, self._gpu, self._limit_s = program, gpu, limit_s
        self._rows = {line: number for number, line in enumerate(lines)}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Timer:
        return self

    def __exit__(self, *unused: object) -> None:
        self._end()

    def time(self, job: Job) -> list[Timing]:
        """The configurations of a job, in its order."""
        left = {self._row(job.spec, config): config for config in job.configs}
        found: dict[KernelConfig, Timing] = {}
        while left:
            answers, last, fault = self._ask(job, list(left))
            if fault is None:
                found |= {config: _judged(config, answers.get(row, {}), job) for row, config in left.items()}
                break
            # Without the kernel that was running the others get another chance. Where none was, none has one.
            guilty = [last] if last in left else list(left)
            found |= {left[row]: _excluded(left[row], fault) for row in guilty}
            left = {row: config for row, config in left.items() if row not in guilty}
        return [found[config] for config in job.configs]

    def _row(self, spec: RNNSpec, config: KernelConfig) -> int:
        if config.mode == "alternating":
            return ALTERNATING
        return self._rows[kernel_table.render(kernel_table.row(spec, self._gpu, config))]

    def _ask(self, job: Job, rows: Sequence[int]) -> tuple[dict[int, dict[str, str]], int | None, str | None]:
        """What the program says of each row, the row it ran last, and why it ended early, if so."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        answers: dict[int, dict[str, str]] = {}
        last, late, other, done = None, threading.Event(), "no message", False

        def stop() -> None:
            late.set()
            process.kill()

        alarm = threading.Timer(self._limit_s, stop)
        alarm.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{_request(job, rows)}\n")
                process.stdin.flush()
            for line in process.stdout:
                if line == "done\n":
                    done = True
                    break
                if match := _LINE.fullmatch(line.rstrip("\n")):
                    last = int(match[2])
                    answers.setdefault(last, {})[match[1]] = match[3]
                else:
                    other = line.strip() or other
        finally:
            alarm.cancel()
        if not done or late.is_set():
            self._end()
        if done:
            return answers, last, None
        if late.is_set():
            return answers, last, f"does not end within {self._limit_s:g} s"
        said = answers.get(last, {}).get("failed") if last is not None else None
        return answers, last, f"ends the timing program: {said or other}"

    def _start(self) -> subprocess.Popen[str]:
        try:
            return subprocess.Popen(
                [str(self._program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise FlashRNNError(f"the timing program {self._program} does not start: {error.strerror}") from error

    def _end(self) -> None:
        if process := self._process:
            process.kill()
            with contextlib.suppress(BrokenPipeError), process:  # closes its pipes and waits for it
                pass
            self._process = None


def _request(job: Job, rows: Sequence[int]) -> str:
    """A job as plugins/timer/timer.cu reads it."""
    s = job.spec
    numbers = (
        list(CELLS).index(s.cell), list(DTYPES).index(s.dtype), job.steps, job.batch,
        s.num_directions, s.num_heads, s.head_dim, s.layout, s.reverse, s.clip, s.relu, s.normalizer_floor,
        PAIR_TOLERANCE[s.dtype], *rows,
    )  # fmt: skip
    return " ".join(map(str, numbers))


def _judged(config: KernelConfig, said: dict[str, str], job: Job) -> Timing:
    if "failed" in said:
        return _excluded(config, f"does not launch: {said['failed']}")
    error, allowed = float(said.get("error", "nan")), PAIR_TOLERANCE[job.spec.dtype]
    if not error <= allowed:
        return _excluded(config, f"wrong output: off by {error:.2g}, {allowed:g} is allowed")
    return Timing(config, round(float(said["us"]), 4))


def _excluded(config: KernelConfig, reason: str) -> Timing:
    """Without the time; what a program says is not to be trusted with a terminal or a file."""
    return Timing(config, None, printable(reason)[:LONGEST_REASON])
