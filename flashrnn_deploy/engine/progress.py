"""TensorRT's progress monitor, which is also the only way to stop a build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make_monitor(trt: Any, log: Any, progress: Callable[[int, int, str], None]) -> Any:
    """An ``IProgressMonitor`` that tells of the outermost phases, or None where this TensorRT has none (before 10).

    Args:
        trt: the module.
        log: of ``api.make_log``; what ``progress`` raises is kept in its ``interrupt``, which stops the build.
        progress: called with steps done, steps in all and the phase.
    """
    if not hasattr(trt, "IProgressMonitor"):
        return None

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.outer: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self.outer[phase_name] = num_steps
                self._tell(0, phase_name)

        def phase_finish(self, phase_name: str) -> None:
            self.outer.pop(phase_name, None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.outer:
                self._tell(step + 1, phase_name)
            return log.interrupt is None

        def _tell(self, done: int, phase_name: str) -> None:
            try:
                progress(done, self.outer[phase_name], phase_name.lower())
            except BaseException as error:  # out of a callback it would be lost, or end the process inside C++
                log.interrupt = error

    return Monitor()
