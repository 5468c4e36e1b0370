"""Which specialised CUDA kernels a build holds: one configuration per layer, GPU and batch bucket, as lines of text.

The lines are what plugins/kernels/cuda/config.h describes. A layer that gets no line runs on the alternating kernel,
which every build holds and which fits any size. Nothing here needs a GPU or a compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from flashrnn_deploy import kernel_config
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.kernel_config import KernelConfig, Solution
from flashrnn_deploy.op import LARGEST_SIZE, RNNSpec

BATCHES = (1, 4, 16, 64)
"""Batch sizes that configurations are chosen for by default; each serves the batches above the one before it."""

LARGEST_BATCH = LARGEST_SIZE
HEADER = "// Kernels of this build, one a line (plugins/kernels/cuda/config.h). Written by build-plugins.\n"
KEYS = ("cell", "dtype", "compute_capability", "min_batch", "max_batch", "clips")
FIELDS = (*KEYS, *(f.name for f in fields(KernelConfig)))
"""The values of one line, in order."""


@dataclass(frozen=True)
class Layer:
    """One FlashRNN node of a model that a build is for."""

    model: str
    node: str
    spec: RNNSpec


@dataclass(frozen=True)
class Choice:
    """What runs a layer on a GPU for the batches ``min_batch`` to ``max_batch``, predicted for ``batch``."""

    layer: Layer
    gpu: GPU
    batch: int
    min_batch: int
    max_batch: int
    solution: Solution
    measured_us: float | None = None  # microseconds per step, where the configuration was chosen by timing

    @property
    def line(self) -> str:
        """The kernel's line, empty for the alternating kernel."""
        return render(self.row) if self.solution.config.mode != "alternating" else ""

    @property
    def row(self) -> dict[str, Any]:
        """The line's values by name."""
        return row(self.layer.spec, self.gpu, self.solution.config, self.min_batch, self.max_batch)


Member = tuple[RNNSpec, GPU]
Measured = Callable[[RNNSpec, int, GPU], Mapping[KernelConfig, float]]
"""Measured microseconds per step of configurations of one layer, batch and GPU, infinite where one does not work; empty
where nothing was timed."""


def plan(
    layers: Sequence[Layer],
    gpus: Sequence[GPU],
    batches: Iterable[int] = BATCHES,
    measured: Measured = lambda spec, batch, gpu: {},
) -> list[Choice]:
    """A configuration for each layer, GPU and batch bucket.

    The fastest of those ``measured``, the alternating mode where none of them works, what is predicted where none was
    measured.

    A kernel is looked up by compute capability, cell, dtype, clipping and head_dim, so layers (and GPUs) that agree in
    these share one: that with the smallest sum of steps. Measurements count where each of them was timed.

    Raises:
        FlashRNNError: a batch is less than 1, or none is given.
    """
    buckets = check_batches(batches)
    chosen: dict[tuple[RNNSpec, GPU, int], tuple[Solution, float | None]] = {}
    for members in sharing(layers, gpus):
        for batch in buckets:
            times = {(spec, gpu): measured(spec, batch, gpu) for spec, gpu in members}
            fastest = _fastest([times[member] for member in members])
            if fastest and any(math.isinf(each[fastest]) for each in times.values()):
                spec, gpu = members[0]
                config, fastest = kernel_config.alternating(spec, batch, gpu).config, None
            else:
                config = fastest or predicted_best(members, batch)
            for spec, gpu in times:
                solution = kernel_config.predict(spec, batch, gpu, config)
                chosen[spec, gpu, batch] = solution, times[spec, gpu][config] if fastest else None
    ends = {batch: LARGEST_BATCH if batch == buckets[-1] else batch for batch in buckets}
    begins = dict(zip(buckets, (1, *(batch + 1 for batch in buckets)), strict=False))
    return [
        Choice(layer, gpu, batch, begins[batch], ends[batch], *chosen[layer.spec, gpu, batch])
        for layer in layers
        for gpu in gpus
        for batch in buckets
    ]


def check_batches(batches: Iterable[int]) -> list[int]:
    """The batches in order.

    Raises:
        FlashRNNError: one is less than 1, or there is none.
    """
    buckets = sorted(set(batches))
    if not buckets or buckets[0] < 1 or buckets[-1] > LARGEST_BATCH:
        raise FlashRNNError(
            f"--batch must be from 1 to {LARGEST_BATCH}, not {', '.join(map(str, buckets)) or 'nothing'}"
        )
    return buckets


def sharing(layers: Sequence[Layer], gpus: Sequence[GPU]) -> list[list[Member]]:
    """All layers on all GPUs, those together that one kernel serves."""
    groups: dict[tuple[Any, ...], list[Member]] = {}
    for gpu in gpus:
        for layer in layers:
            spec, padded = layer.spec, -(-layer.spec.head_dim // 32) * 32
            key = (gpu.compute_capability, spec.cell, spec.dtype, spec.clip > 0, padded)
            groups.setdefault(key, []).append((spec, gpu))
    return list(groups.values())


def predicted_best(members: Sequence[Member], batch: int) -> KernelConfig:
    """Of the best configurations of each, that with the smallest sum of predicted steps."""
    best = dict.fromkeys(kernel_config.solve(spec, batch, gpu).config for spec, gpu in dict.fromkeys(members))

    def total(config: KernelConfig) -> float:
        return sum(kernel_config.predict(spec, batch, gpu, config).predicted_step_us for spec, gpu in members)

    return min(best, key=total)


def _fastest(times: Sequence[Mapping[KernelConfig, float]]) -> KernelConfig | None:
    """Of the configurations that every member was timed with, that with the smallest sum."""
    common = [config for config in times[0] if all(config in each for each in times)]
    return min(common, key=lambda config: sum(each[config] for each in times), default=None)


def row(
    spec: RNNSpec, gpu: GPU, config: KernelConfig, min_batch: int = 1, max_batch: int = LARGEST_BATCH
) -> dict[str, Any]:
    """The values of a line by name."""
    values = (spec.cell, spec.dtype, gpu.compute_capability, min_batch, max_batch, int(spec.clip > 0))
    return dict(zip(KEYS, values, strict=True)) | asdict(config)


def render(row: dict[str, Any]) -> str:
    """One line of kernel_configs.inc from its values by name, ``FIELDS``."""
    texts = [f"k{v.capitalize()}" if isinstance(v := row[name], str) else str(int(v)) for name in FIELDS]
    return f"FLASHRNN_KERNEL({', '.join(texts)})"


def data_file(choices: Iterable[Choice]) -> str:
    """The content of kernel_configs.inc. Neighbouring buckets with one configuration become one line."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for choice in sorted(choices, key=lambda c: [c.row[name] for name in ("compute_capability", *KEYS, *FIELDS)]):
        if not choice.line:
            continue
        row = choice.row
        key = tuple(value for name, value in row.items() if name not in ("min_batch", "max_batch"))
        before = rows.get(key)
        if before and row["min_batch"] <= before["max_batch"] + 1:
            before["max_batch"] = max(before["max_batch"], row["max_batch"])
        else:
            if before:  # a gap that another configuration fills
                key = (*key, row["min_batch"])
            rows[key] = row
    return HEADER + "".join(f"{render(row)}\n" for row in rows.values())


def covering(kernels: Iterable[dict[str, Any]], spec: RNNSpec) -> list[dict[str, Any]]:
    """Of the ``kernels`` that a library's ``info`` lists, those that can run a layer (on their own kind of GPU)."""
    same = {"cell": spec.cell, "dtype": spec.dtype, "clips": int(spec.clip > 0)}
    fits = [k for k in kernels if all(k.get(name) == value for name, value in same.items())]
    return [k for k in fits if k["padded_head_dim"] >= spec.head_dim]
