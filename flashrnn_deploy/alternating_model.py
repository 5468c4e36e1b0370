"""What a step takes in the alternating mode, where R comes from memory, in the kernel that the library takes.

Which one that is depends on ``alternating_choice.h``, whose numbers ``_all_steps_us`` and ``_per_step_us`` repeat: a
test compares both. The predictions are finer. Measured on an H200, LSTM and GRU: 40 layers in the kernels for all
steps, within 25 %; one kernel per step within a third. Other devices scale by clock and memory bandwidth, and
everything here is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.op import RNNSpec

STREAMING_SHARE = 0.8
"""Of the bandwidth of DRAM, for R that does not stay on chip."""

_GROUP_UNITS, _WARPS, _SLICE_BYTES, _MOST_GROUPS = 8, 8, 128, 512
_STAGE_BYTES = _WARPS * 2048
"""Of a block: 16 rows of R for each of its warps, a slice of each row."""
_RING = 4
"""Stages that are being copied."""
_STREAMING, _TILED = (1.0, 0.7), (3.0, 0.5)
"""What a run through D takes: the start, and each slice."""


@dataclass(frozen=True)
class Alternating:
    """What a call of the alternating mode runs."""

    kernel: str  # "streaming", "tiled" or "one kernel per step"
    on_chip_bytes: int  # of R, in the blocks of one launch: those that share a head's rows of the batch hold copies


@dataclass(frozen=True)
class _Kernel:
    """A kernel for all steps: rows of the batch in a tile, groups of 8 units in a pass, stages held in registers."""

    rows: int
    pass_groups: int
    held: int = 0
    tiled: bool = False

    def tiles(self, spec: RNNSpec, groups: int) -> int:
        """Of 16 rows of R, in a pass over so many groups."""
        return -(-min(groups, self.pass_groups) * spec.definition.num_gates // 2)

    def slices(self, spec: RNNSpec) -> int:
        """Of D, of a warp or of a part of the block."""
        return -(-spec.head_dim * _element_bytes(spec) // (_SLICE_BYTES * (2 if self.tiled else _WARPS)))


@dataclass(frozen=True)
class _Share:
    """How blocks share a layer: ``divide`` in alternating_choice.h."""

    units: int  # of a block
    rows: int  # of a block in a tile
    passes: int
    tiles: int  # of the batch, of one block
    blocks: int  # of a launch, at most
    launches: int

    @property
    def turns(self) -> int:
        """How often a block runs through D in a step."""
        return self.passes * self.tiles


def cost(spec: RNNSpec, batch: int, gpu: GPU) -> dict[str, int]:
    """Hundredths of a cycle per step, by cause."""
    kernel = choose(spec, batch, gpu)
    if kernel is None:
        parts = _one_per_step(spec, batch, gpu)
    else:
        share = _share(spec, batch, gpu, kernel)
        if kernel.tiled:
            parts = _tiled(spec, share, gpu)
        else:
            streaming = _streaming_float32 if spec.dtype == "float32" and batch > 1 else _streaming
            parts = streaming(spec, share, kernel, gpu)
    return {cause: round(ns * gpu.clock_mhz / 10) for cause, ns in parts.items()}


def describe(spec: RNNSpec, batch: int, gpu: GPU) -> Alternating:
    """The kernel that the library takes, and how much of R it keeps: the streaming one alone keeps any."""
    kernel = choose(spec, batch, gpu)
    if kernel is None:
        return Alternating("one kernel per step", 0)
    if kernel.tiled:
        return Alternating("tiled", 0)
    share = _share(spec, batch, gpu, kernel)
    head_blocks = -(-spec.head_dim // share.units)
    head_bytes = spec.macs_per_step * _element_bytes(spec) // (spec.num_directions * spec.num_heads)
    kept = min(head_blocks * _kept_bytes(spec, share, kernel, gpu), head_bytes)
    return Alternating("streaming", share.blocks // head_blocks * kept)


def choose(spec: RNNSpec, batch: int, gpu: GPU) -> _Kernel | None:
    """The kernel for all steps that the library takes, None where it runs one kernel per step."""
    if gpu.compute_capability < 80 or spec.head_dim % _GROUP_UNITS:
        return None
    kernels = (k for k in _kernels(spec, batch, gpu) if _pays(spec, batch, gpu, k))
    return next((k for k in kernels if k.tiled or _free_bytes(spec, _share(spec, batch, gpu, k), k, gpu) >= 0), None)


def _kernels(spec: RNNSpec, batch: int, gpu: GPU) -> list[_Kernel]:
    """Those that alternating_launch.cuh tries, in order."""
    wide, narrow = 16 // spec.definition.num_gates, 8 // spec.definition.num_gates
    if spec.dtype == "float32":
        return [_Kernel(1, wide, 5) if batch == 1 else _Kernel(4, wide, 1) if batch <= 4 else _Kernel(8, narrow)]
    if batch <= 8:
        return [_Kernel(8, wide, 3 if spec.definition.num_gates == 1 else 5)]
    streaming, most, tiles = (_Kernel(16, wide), 2, [16]) if batch <= 16 else (_Kernel(32, narrow), 1, [64, 32])
    found = []
    if _share(spec, batch, gpu, streaming).turns > most:
        found = [_Kernel(rows, wide, tiled=True) for rows in tiles if rows <= 32 or batch > 32]
    return [k for k in found if _tile_bytes(k.rows) <= gpu.smem_per_block] + [streaming]


def _tile_bytes(rows: int) -> int:
    """Shared memory of two slots of each part's ring, and of the sums."""
    return 4 * _SLICE_BYTES * (128 + rows) + 4 * 132 * rows + 2048


def _pays(spec: RNNSpec, batch: int, gpu: GPU, kernel: _Kernel) -> bool:
    return _all_steps_us(spec, batch, gpu, kernel) < _per_step_us(spec, batch, gpu.sms)


def _all_steps_us(spec: RNNSpec, batch: int, gpu: GPU, kernel: _Kernel) -> float:
    share, (start, each) = _share(spec, batch, gpu, kernel), _TILED if kernel.tiled else _STREAMING
    return 1.5 + share.launches * share.turns * (start + each * kernel.slices(spec))


def _per_step_us(spec: RNNSpec, batch: int, sms: int) -> float:
    G, units = spec.definition.num_gates, spec.num_directions * spec.hidden_size / sms
    cycles = max(0.2614 * G * spec.head_dim, 170 + 105 * G)
    arithmetic = units * (-(-batch // 8) * (batch > 1)) * cycles / 1980
    return 4.0 + max(arithmetic, _num_bytes(spec) * 132 / sms / 4e6)


def _kept_bytes(spec: RNNSpec, share: _Share, kernel: _Kernel, gpu: GPU) -> int:
    """Room for R in a block of the streaming kernel, in registers and shared memory: whole stages."""
    held = min(kernel.held, kernel.tiles(spec, share.units // _GROUP_UNITS))
    return (held + max(0, _free_bytes(spec, share, kernel, gpu) // _STAGE_BYTES)) * _STAGE_BYTES


def _free_bytes(spec: RNNSpec, share: _Share, kernel: _Kernel, gpu: GPU) -> int:
    """Shared memory beside the ring, the sums, the table of tiles, the biases, and h in float32: AlternatingShared."""
    tiles = kernel.tiles(spec, kernel.pass_groups)
    sums, table = 16 * share.rows * (16 * tiles + 4), 16 * share.passes * tiles
    biases = 4 * share.units * len(spec.definition.biases)
    hidden = _WARPS * kernel.rows * _SLICE_BYTES if spec.dtype == "float32" else 0
    return gpu.smem_per_block - _RING * _STAGE_BYTES - sums - table - biases - hidden


def _element_bytes(spec: RNNSpec) -> int:
    return 4 if spec.dtype == "float32" else 2


def _num_bytes(spec: RNNSpec) -> int:
    return spec.macs_per_step * _element_bytes(spec)


def _share(spec: RNNSpec, batch: int, gpu: GPU, kernel: _Kernel) -> _Share:
    def places(taken: int, most: int) -> int:
        return min(max(gpu.sms // taken, 1), most)

    heads, groups = spec.num_directions * spec.num_heads, -(-spec.head_dim // _GROUP_UNITS)
    tiles = -(-batch // kernel.rows)
    each = -(-groups // places(heads, groups))
    blocks = -(-groups // each)
    tiles_each = -(-tiles // places(heads * blocks, tiles))
    of_groups = heads * -(-tiles // tiles_each)
    at_once = places(blocks, min(of_groups, _MOST_GROUPS))
    passes = -(-each // kernel.pass_groups)
    rows = min(kernel.rows, batch)
    return _Share(each * _GROUP_UNITS, rows, passes, tiles_each, blocks * at_once, -(-of_groups // at_once))


def _one_per_step(spec: RNNSpec, batch: int, gpu: GPU) -> dict[str, float]:
    """ns: launches follow each other 4.2 us apart, or 2 us behind the work of each."""
    share = 1.25 if _num_bytes(spec) <= gpu.l2_bytes else 0.75  # of the bandwidth of DRAM
    memory = _num_bytes(spec) / gpu.memory_gbs / share
    # A warp takes a unit and 8 rows of the batch: cycles of a multiprocessor per 256 of D, and to add up its lanes.
    G, tiles = spec.definition.num_gates, -(-batch // 8) * (batch > 1)
    cycles = (30 + 34 * G) * spec.head_dim / 256 + 170 + 105 * G
    arithmetic = spec.num_directions * spec.hidden_size * tiles * cycles / (gpu.sms * gpu.clock_mhz / 1000)
    work = max(memory, arithmetic)
    slower = "reading R from memory" if memory > arithmetic else "arithmetic"
    return {"launching kernels": max(2000.0, 4200 - work), slower: work}


def _streaming(spec: RNNSpec, share: _Share, kernel: _Kernel, gpu: GPU) -> dict[str, float]:
    """R stays in registers and in what the ring and the sums leave of the shared memory, or is streamed. Up to 8 rows a
    block's runs through D hide behind it.
    """
    kept = share.blocks * _kept_bytes(spec, share, kernel, gpu)
    memory = max(0, _num_bytes(spec) - kept) / gpu.memory_gbs / STREAMING_SHARE
    slice_ns = 1000.0 if kernel.rows == 32 else 350.0
    runs = share.launches * share.turns * (400 + slice_ns * kernel.slices(spec))
    return {
        "waiting for each other": 1300.0 * share.launches,
        "reading R from memory": memory,
        "arithmetic": max(0.0, runs - memory) if kernel.rows <= 8 else runs,
    }


def _streaming_float32(spec: RNNSpec, share: _Share, kernel: _Kernel, gpu: GPU) -> dict[str, float]:
    """Products on the FMA units, 4 or 8 rows at a time. Behind the first tile of the batch R is read from L2."""
    from_l2 = min(_num_bytes(spec), gpu.l2_bytes)
    memory = (from_l2 / 1.25 + (_num_bytes(spec) - from_l2) / STREAMING_SHARE) / gpu.memory_gbs
    units = share.units / share.passes
    products = units * spec.definition.num_gates * kernel.rows * spec.head_dim / 32 / gpu.clock_mhz * 1000
    runs = share.launches * share.turns * max(800 + 500 * kernel.slices(spec), products)
    slower = "reading R from memory" if memory > runs else "arithmetic"
    return {"waiting for each other": 1700.0 * share.launches, slower: max(memory, runs)}


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
