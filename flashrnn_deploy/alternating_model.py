"""What a step takes in the alternating mode, where R comes from memory. It has three kernels and takes the fastest.

Measured on an H200, LSTM and GRU: 37 layers in the kernels for all steps, within 25 %; one kernel per step within a
third. Other devices scale by clock and memory bandwidth, and everything here is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.op import RNNSpec

LAUNCH_NS = 4200
"""From one launch to the next."""

STREAMING_SHARE = 0.8
"""Of the bandwidth of DRAM, for R that does not stay on chip."""

_GROUP_UNITS, _WARPS, _SLICE_BYTES, _MOST_GROUPS = 8, 8, 128, 512


def cost(spec: RNNSpec, batch: int, gpu: GPU) -> dict[str, int]:
    """Hundredths of a cycle per step, by cause."""
    ways = [_kernel_per_step(spec, batch, gpu)]
    if gpu.compute_capability >= 80 and spec.head_dim % _GROUP_UNITS == 0:
        ways.append(_kernel_for_all_steps(spec, batch, gpu))
    parts = min(ways, key=lambda way: sum(way.values()))
    return {cause: round(ns * gpu.clock_mhz / 10) for cause, ns in parts.items()}


def _num_bytes(spec: RNNSpec) -> int:
    return spec.macs_per_step * (4 if spec.dtype == "float32" else 2)


def _kernel_per_step(spec: RNNSpec, batch: int, gpu: GPU) -> dict[str, float]:
    """ns: launches follow each other 4.2 us apart, or 2 us behind the work of each."""
    share = 1.25 if _num_bytes(spec) <= gpu.l2_bytes else 0.75  # of the bandwidth of DRAM
    memory = _num_bytes(spec) / gpu.memory_gbs / share
    # A warp takes a unit and 8 rows of the batch: cycles of a multiprocessor per 256 of D, and to add up its lanes.
    G, tiles = spec.definition.num_gates, -(-batch // 8) * (batch > 1)
    cycles = (30 + 34 * G) * spec.head_dim / 256 + 170 + 105 * G
    arithmetic = spec.num_directions * spec.hidden_size * tiles * cycles / (gpu.sms * gpu.clock_mhz / 1000)
    work = max(memory, arithmetic)
    slower = "reading R from memory" if memory > arithmetic else "arithmetic"
    return {"launching kernels": max(2000.0, LAUNCH_NS - work), slower: work}


@dataclass(frozen=True)
class _Share:
    """How blocks share a layer: ``share_of`` in alternating_launch.cuh."""

    units: int  # of a block
    rows: int  # of a block in a tile
    passes: int
    tiles: int  # of the batch, of one block
    launches: int

    @property
    def turns(self) -> int:
        """How often a block runs through D in a step."""
        return self.passes * self.tiles


def _share(spec: RNNSpec, batch: int, gpu: GPU, rows: int, pass_groups: int) -> _Share:
    def places(taken: int, most: int) -> int:
        return min(max(gpu.sms // taken, 1), most)

    heads, groups, tiles = spec.num_directions * spec.num_heads, -(-spec.head_dim // _GROUP_UNITS), -(-batch // rows)
    each = -(-groups // places(heads, groups))
    blocks = -(-groups // each)
    tiles_each = -(-tiles // places(heads * blocks, tiles))
    at_once = places(blocks, _MOST_GROUPS)
    launches = -(-heads * -(-tiles // tiles_each) // at_once)
    return _Share(each * _GROUP_UNITS, min(rows, batch), -(-each // pass_groups), tiles_each, launches)


def _kernel_for_all_steps(spec: RNNSpec, batch: int, gpu: GPU) -> dict[str, float]:
    """ns, of the kernel that alternating_launch.cuh takes for this batch."""
    G = spec.definition.num_gates
    if spec.dtype == "float32":
        if batch > 1:
            return _streaming_float32(spec, batch, gpu)
        return _streaming(spec, _share(spec, batch, gpu, 1, 16 // G), gpu, 0.0, 235)
    if batch <= 8:
        return _streaming(spec, _share(spec, batch, gpu, 8, 16 // G), gpu, 0.0, 235)
    rows, most_turns, pass_groups, slice_ns = (16, 2, 16 // G, 350.0) if batch <= 16 else (32, 1, 8 // G, 1000.0)
    share = _share(spec, batch, gpu, rows, pass_groups)
    if share.turns > most_turns:
        return _tiled(spec, _share(spec, batch, gpu, 64 if batch > 32 else rows, 16 // G), gpu)
    return _streaming(spec, share, gpu, slice_ns, 130)


def _streaming(spec: RNNSpec, share: _Share, gpu: GPU, slice_ns: float, kept_kb: int) -> dict[str, float]:
    """``slice_ns``: for each slice of D of a warp, beside reading R; ``kept_kb``: of R, in a multiprocessor."""
    element = 4 if spec.dtype == "float32" else 2
    slices = -(-spec.head_dim * element // (_WARPS * _SLICE_BYTES))
    streamed = max(0, _num_bytes(spec) - kept_kb * 1000 * gpu.sms)
    memory = streamed / gpu.memory_gbs / STREAMING_SHARE
    return {
        "waiting for each other": max(1000.0, 2600 - memory) * share.launches,
        "reading R from memory": memory,
        "arithmetic": slice_ns * slices * share.turns * share.launches,
    }


def _streaming_float32(spec: RNNSpec, batch: int, gpu: GPU) -> dict[str, float]:
    """Products on the FMA units, 4 or 8 rows at a time. Behind the first tile of the batch R is read from L2."""
    rows = 4 if batch <= 4 else 8
    from_l2 = min(_num_bytes(spec), gpu.l2_bytes)
    memory = (from_l2 / 1.25 + _num_bytes(spec) - from_l2) / gpu.memory_gbs
    tile = spec.macs_per_step * rows / (gpu.sms * gpu.clock_mhz / 1000 * 32)
    return {"waiting for each other": 1700.0, "arithmetic": max(memory, -(-batch // rows) * tile)}


def _tiled(spec: RNNSpec, share: _Share, gpu: GPU) -> dict[str, float]:
    """Per pass the sums and the cells; R goes on being read meanwhile. 58 bytes per ns come to a multiprocessor."""
    pairs = share.units * share.rows / share.passes / 256  # (unit, row) of a thread
    each_pass = 1240 + 330 * pairs
    row_bytes = 2 * spec.head_dim
    arriving = row_bytes * (share.units * spec.definition.num_gates + share.rows * share.passes) / 58
    memory = share.tiles * _num_bytes(spec) / gpu.memory_gbs / STREAMING_SHARE - 1240 * share.turns
    return {
        "waiting for each other": 1500.0 * share.launches,
        "arithmetic": each_pass * share.turns * share.launches,
        "reading R from memory": max(memory, arriving * share.tiles * share.launches),
    }
