"""What a step takes in the alternating mode, where R comes from memory. It has two ways, and takes the faster one.

Measured on an H200: 24 layers in one kernel for all steps, within 24 %; those and 97 more in one kernel per step,
within a third. Other devices scale by clock and memory bandwidth, and everything here is an estimate.
"""

from __future__ import annotations

from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.op import RNNSpec

LAUNCH_NS = 4200
"""From one launch to the next."""


def cost(spec: RNNSpec, batch: int, gpu: GPU) -> dict[str, int]:
    """Hundredths of a cycle per step, by cause."""
    num_bytes = spec.macs_per_step * (4 if spec.dtype == "float32" else 2)
    share = 1.25 if num_bytes <= gpu.l2_bytes else 0.75  # of the bandwidth of DRAM
    ways = [_kernel_per_step(spec, batch, gpu, num_bytes / gpu.memory_gbs / share)]
    if gpu.compute_capability >= 80 and spec.head_dim % 8 == 0:
        from_l2 = min(num_bytes, gpu.l2_bytes)
        memory = (from_l2 / 1.25 + num_bytes - from_l2) / gpu.memory_gbs
        ways.append(_kernel_for_all_steps(spec, batch, gpu, memory))
    parts = min(ways, key=lambda way: sum(way.values()))
    return {cause: round(ns * gpu.clock_mhz / 10) for cause, ns in parts.items()}


def _kernel_per_step(spec: RNNSpec, batch: int, gpu: GPU, memory: float) -> dict[str, float]:
    """ns: launches follow each other 4.2 us apart, or 2 us behind the work of each. ``memory``: reading R."""
    # A warp takes a unit and 8 rows of the batch: cycles of a multiprocessor per 256 of D, and to add up its lanes.
    G, tiles = spec.definition.num_gates, -(-batch // 8) * (batch > 1)
    cycles = (30 + 34 * G) * spec.head_dim / 256 + 170 + 105 * G
    arithmetic = spec.num_directions * spec.hidden_size * tiles * cycles / (gpu.sms * gpu.clock_mhz / 1000)
    work = max(memory, arithmetic)
    slower = "reading R from memory" if memory > arithmetic else "arithmetic"
    return {"launching kernels": max(2000.0, LAUNCH_NS - work), slower: work}


def _kernel_for_all_steps(spec: RNNSpec, batch: int, gpu: GPU, memory: float) -> dict[str, float]:
    """ns: R is read once for the first tile of the batch, and the others' products follow."""
    fma = spec.dtype == "float32"
    rows = (1 if batch == 1 else 4 if batch <= 4 else 8) if fma else 16
    more_tiles = -(-batch // rows) - 1
    speed = gpu.sms * gpu.clock_mhz / 1000 * (32 if fma else 184)  # multiply-accumulates per ns
    tile = spec.macs_per_step * rows / speed
    if fma:
        return {"waiting for each other": 2000.0, "arithmetic": max(memory, (1 + more_tiles) * tile)}
    return {
        "waiting for each other": max(1500.0, 3500 - memory),
        "reading R from memory": memory,
        "arithmetic": more_tiles * tile + (0.45 * tile if batch > 8 else 0),  # more than half hides behind reading R
    }
