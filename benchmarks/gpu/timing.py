"""How the kernels and their peers are timed on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

STEPS = 1024


def median_us(run: Callable[[], Any], repeats: int = 15) -> float:
    """Microseconds per step."""
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:]) * 1000 / STEPS
