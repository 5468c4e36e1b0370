"""Timing the best few configurations of each layer on this machine's GPU: `build-plugins --autotune`.

A program of ``plugins/timer`` holds the candidates (``kernel_timer``); what it says is kept in a ``tuned_file``.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flashrnn_deploy import gpus, kernel_config, kernel_table, machine, tuned_file, tuning
from flashrnn_deploy.cmake import Builder, Progress
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.kernel_config import KernelConfig
from flashrnn_deploy.kernel_table import Layer
from flashrnn_deploy.kernel_timer import LIMIT_S, Job, Timer
from flashrnn_deploy.tuned_file import Entry, title

CANDIDATES = 5
"""Configurations to time for each layer and batch: those that the model likes best."""


def installed(gpu_names: Sequence[str]) -> GPU:
    """The GPU of this machine, which is to be the one that is built for.

    Raises:
        FlashRNNError: there is none, it is another one, or none or several are named.
    """
    if len(gpu_names) != 1 or gpu_names[0] == "cpu":
        raise FlashRNNError(f"--autotune needs one --gpu, this machine's, not {', '.join(gpu_names) or 'none'}")
    wanted = gpus.get(gpu_names[0])
    try:
        here = gpus.get("local")
    except FlashRNNError as error:
        raise FlashRNNError(
            "--autotune times kernels on this machine's GPU, and the driver finds none: build without it, or with "
            "--tuned FILE of a machine that has one"
        ) from error
    if not gpus.same_product(wanted, here.product, here.compute_capability, here.sms):
        raise FlashRNNError(
            f"--autotune --gpu {wanted.name}: this machine has {here.product} (compute capability {here.capability}, "
            f"{here.sms} SMs), not {wanted.product}; name it, or --gpu local"
        )
    return here


def jobs(layers: Sequence[Layer], gpu: GPU, batches: Iterable[int], known: Sequence[Entry] = ()) -> list[Job]:
    """What to time: for each layer and batch the candidates of all layers that share its kernel.

    Left out is what was timed before, with these candidates among others, and what has one candidate only.
    """
    timed = {(e.spec, e.batch): {t.config for t in e.timings} for e in known}
    found = []
    for members in kernel_table.sharing(layers, [gpu]):
        specs = list(dict.fromkeys(spec for spec, _ in members))
        for batch in kernel_table.check_batches(batches):
            first = kernel_table.predicted_best(members, batch)
            best = [s.config for spec in specs for s in kernel_config.candidates(spec, batch, gpu, CANDIDATES)]
            configs = tuple(dict.fromkeys((first, *best)))
            if len(configs) > 1:
                new = (spec for spec in specs if not timed.get((spec, batch), set()).issuperset(configs))
                found += [Job(spec, batch, configs) for spec in new]
    return found


def table(work: Iterable[Job], gpu: GPU) -> list[str]:
    """The lines of kernel_configs.inc that a timer needs, in the order of its rows."""
    lines: dict[str, None] = {}
    for job in work:
        for config in job.configs:
            if config.mode != "alternating":
                lines[kernel_table.render(kernel_table.row(job.spec, gpu, config))] = None
    return list(lines)


def tune(
    layers: Sequence[Layer],
    gpu: GPU,
    batches: Iterable[int],
    entries: list[Entry],
    builder: Builder,
    sources: Path,
    path: Path,
) -> list[Entry]:
    """The ``entries``, and those of what was not timed before.

    Each new one is in the file ``path`` as soon as it is known, beside what was there: a build that fails later costs
    no timing. ``entries`` of other files are not: they have to prove themselves in a build.
    """
    work = jobs(layers, gpu, batches, tuning.usable(entries, [gpu], sources))
    if not work:
        return entries
    lines = table(work, gpu)
    timer = build_timer(builder, sources, builder.temporary.parent / "timer", lines, gpu)
    kept = tuned_file.load(path) if path.is_file() else []
    made_by = str(builder.tools.nvcc_version), tuning.source_hash(sources)
    for entry in measure(work, gpu, timer, lines, *made_by, builder.progress):
        entries, kept = tuning.merged(entries, [entry]), tuning.merged(kept, [entry])
        tuned_file.save(path, kept)
    return entries


def gains(
    layers: Sequence[Layer], devices: Sequence[GPU], batches: Sequence[int], entries: Sequence[Entry]
) -> list[dict[str, Any]]:
    """What timing changed, for each layer and batch: the model's choice and the winner, microseconds per step."""
    choices = kernel_table.plan(layers, devices, batches, tuning.measurements(entries))
    predicted = kernel_table.plan(layers, devices, batches)
    found = []
    for choice, before in zip(choices, predicted, strict=True):
        entry = tuning.find(entries, choice.layer.spec, choice.batch, choice.gpu)
        if entry is None:
            continue
        own = next((t for t in entry.timings if t.config == before.solution.config), None)
        found.append(
            {
                "model": choice.layer.model,
                "node": choice.layer.node,
                "gpu": choice.gpu.name,
                "batch": choice.batch,
                "predicted_step_us": before.solution.predicted_step_us,
                "solver": short(before.solution.config),
                "solver_step_us": own.step_us if own else None,
                "winner": short(choice.solution.config),
                "winner_step_us": choice.measured_us,
                "excluded": [f"{short(t.config)}: {t.excluded}" for t in entry.timings if t.excluded],
            }
        )
    return found


def short(config: KernelConfig) -> str:
    """A configuration in few words."""
    if config.mode == "alternating":
        return config.mode
    size = f" {config.cluster_size}" if config.mode == "cluster" else ""
    words = (
        f"{config.mode}{size}", f"{config.units_per_block} units", f"batch tile {config.batch_tile}",
        f"{config.row_warps}x{config.k_warps} warps",
        *[f"{config.accumulator_sets} sums"] * (config.accumulator_sets > 1),
        *[f"{config.replicas} copies"] * (config.replicas > 1),
    )  # fmt: skip
    return ", ".join(words)


def build_timer(builder: Builder, sources: Path, folder: Path, lines: Sequence[str], gpu: GPU) -> Path:
    """Compiles the timing program with these kernels."""
    values = builder.kernel_values(folder / "kernel_configs.inc", kernel_table.HEADER + "\n".join((*lines, "")))
    values["FLASHRNN_CUDA_ARCHITECTURES"] = str(gpu.compute_capability)
    builder.build(sources / "timer", folder, values)
    return folder / "flashrnn_timer"


def measure(
    work: Sequence[Job],
    gpu: GPU,
    timer: Path,
    lines: Sequence[str],
    nvcc: str,
    source_hash: str,
    progress: Progress = lambda done, total, what: None,
    limit_s: float = LIMIT_S,
) -> Iterator[Entry]:
    """An entry per job, as soon as it is timed.

    Raises:
        FlashRNNError: the timing program does not start.
    """
    date, driver = datetime.date.today().isoformat(), machine.nvidia_driver()
    with Timer(timer, gpu, lines, limit_s) as clock:
        for done, job in enumerate(work):
            progress(done, len(work), f"timing {title(job.spec)} B{job.batch}: {len(job.configs)} kernels")
            timings = tuple(clock.time(job))
            about = (gpu.product, gpu.compute_capability, gpu.sms, driver, nvcc, source_hash, date)
            yield Entry(*about, job.spec, job.batch, timings)
        progress(len(work), len(work), "timed")
