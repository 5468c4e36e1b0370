"""Which specialised CUDA kernels a build holds: one configuration per layer, GPU and batch bucket, as lines of text.

The lines are what plugins/kernels/cuda/config.h describes. A layer that gets no line runs on the alternating kernel,
which every build holds and which fits any size. Nothing here needs a GPU or a compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from flashrnn_deploy import kernel_config
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.kernel_config import KernelConfig, Solution
from flashrnn_deploy.op import RNNSpec

BATCHES = (1, 4, 16, 64)
"""Batch sizes that configurations are chosen for by default; each serves the batches above the one before it."""

LARGEST_BATCH = 2**31 - 1
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

    @property
    def line(self) -> str:
        """The kernel's line, empty for the alternating kernel."""
        return render(self.row) if self.solution.config.mode != "alternating" else ""

    @property
    def row(self) -> dict[str, Any]:
        """The line's values by name."""
        spec = self.layer.spec
        cc = self.gpu.compute_capability
        values = (spec.cell, spec.dtype, cc, self.min_batch, self.max_batch, int(spec.clip > 0))
        return dict(zip(KEYS, values, strict=True)) | asdict(self.solution.config)


def plan(layers: Sequence[Layer], gpus: Sequence[GPU], batches: Iterable[int] = BATCHES) -> list[Choice]:
    """A configuration for each layer, GPU and batch bucket.

    A kernel is looked up by compute capability, cell, dtype, clipping and head_dim, so layers (and GPUs) that agree in
    these share one: of the best configurations of each, that with the smallest sum of predicted steps.

    Raises:
        FlashRNNError: a batch is less than 1, or none is given.
    """
    buckets = sorted(set(batches))
    if not buckets or buckets[0] < 1 or buckets[-1] > LARGEST_BATCH:
        raise FlashRNNError(
            f"--batch must be from 1 to {LARGEST_BATCH}, not {', '.join(map(str, buckets)) or 'nothing'}"
        )
    groups: dict[tuple[Any, ...], list[tuple[Layer, GPU]]] = {}
    for gpu in gpus:
        for layer in layers:
            spec, padded = layer.spec, -(-layer.spec.head_dim // 32) * 32
            key = (gpu.compute_capability, spec.cell, spec.dtype, spec.clip > 0, padded)
            groups.setdefault(key, []).append((layer, gpu))
    chosen: dict[tuple[Layer, GPU, int], Choice] = {}
    for members in groups.values():
        least = 1
        for batch in buckets:
            most = LARGEST_BATCH if batch == buckets[-1] else batch
            for (layer, gpu), solution in zip(members, _shared(members, batch), strict=True):
                chosen[layer, gpu, batch] = Choice(layer, gpu, batch, least, most, solution)
            least = batch + 1
    return [chosen[layer, gpu, batch] for layer in layers for gpu in gpus for batch in buckets]


def _shared(members: Sequence[tuple[Layer, GPU]], batch: int) -> list[Solution]:
    different = list(dict.fromkeys((layer.spec, gpu) for layer, gpu in members))
    best = dict.fromkeys(kernel_config.solve(spec, batch, gpu).config for spec, gpu in different)

    def predict(config: KernelConfig) -> list[Solution]:
        return [kernel_config.predict(layer.spec, batch, gpu, config) for layer, gpu in members]

    return min(map(predict, best), key=lambda solutions: sum(s.predicted_step_us for s in solutions))


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
