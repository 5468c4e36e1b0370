"""What a build takes of the timings in files (``tuned_file``), also where there is no GPU.

An entry holds for one layer and batch, one kind of GPU and one state of the kernels' sources; what does not fit a build
is told, never used, and stays in the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from flashrnn_deploy import gpus, kernel_config
from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.kernel_config import KernelConfig
from flashrnn_deploy.kernel_table import Choice, Measured
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.tuned_file import FILE, Entry, load


def source_hash(plugins: Path) -> str:
    """sha256 over the sources that a CUDA kernel is compiled from, by name and content."""
    kernels = plugins / "kernels"
    files = sorted([*(kernels / "cuda").iterdir(), *kernels.glob("*.h"), *kernels.glob("*.cuh")])
    lines = (f"{f.relative_to(kernels).as_posix()} {hashlib.sha256(f.read_bytes()).hexdigest()}\n" for f in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def merged(older: Iterable[Entry], newer: Iterable[Entry]) -> list[Entry]:
    """All entries; of one layer, batch, GPU and state of the sources the newer."""
    return list({entry.key: entry for entry in (*older, *newer)}.values())


def is_for(entry: Entry, gpu: GPU) -> bool:
    """Whether an entry was measured on this GPU, or one of the same product."""
    return gpus.same_product(gpu, entry.product, entry.compute_capability, entry.sms)


def find(entries: Iterable[Entry], spec: RNNSpec, batch: int, gpu: GPU) -> Entry | None:
    """The entry of a layer and batch on a GPU, where there is one."""
    return next((e for e in entries if (e.spec, e.batch) == (spec, batch) and is_for(e, gpu)), None)


def measurements(entries: Sequence[Entry]) -> Measured:
    """The entries as ``kernel_table.plan`` asks for them."""

    def measured(spec: RNNSpec, batch: int, gpu: GPU) -> dict[KernelConfig, float]:
        found = find(entries, spec, batch, gpu)
        return found.times() if found else {}

    return measured


def about(choices: Sequence[Choice], entries: Sequence[Entry]) -> str:
    """What `info` is to say of a library with these choices; empty where none was timed."""
    timed = [c for c in choices if c.measured_us is not None]
    used = [e for c in timed if (e := find(entries, c.layer.spec, c.batch, c.gpu))]
    where = sorted({f"{e.product}, {e.date}" for e in used})
    return f"{len(timed)} of {len(choices)} choices, on {'; '.join(where)}" if timed else ""


def gather(output: Path, given: Path | None, devices: Sequence[GPU], sources: Path) -> tuple[list[Entry], list[str]]:
    """All that ``output`` and the file ``given`` hold, and what to say of the entries that this build cannot use.

    Raises:
        FlashRNNError: a file cannot be read, or is not one of ``tuned_file.save``.
    """
    own, hash_ = output / FILE, source_hash(sources)
    entries: list[Entry] = []
    notes: list[str] = []
    for path in (own if own.is_file() else None, given):
        if path is not None:
            more = load(path)
            replaced = [entry for entry in entries if any(entry.key == new.key and entry != new for new in more)]
            if replaced:
                notes.append(f"{own}: {_listed(replaced)} replaced by what {path} has of the same")
            entries, notes = merged(entries, more), [*notes, *_unused(more, devices, hash_, path)]
    return entries, list(dict.fromkeys(notes))


def usable(entries: Iterable[Entry], devices: Sequence[GPU], sources: Path) -> list[Entry]:
    """The entries that hold for these sources and one of ``devices``."""
    hash_ = source_hash(sources)
    return [entry for entry in entries if not _reason(entry, devices, hash_)]


def _unused(entries: Iterable[Entry], devices: Sequence[GPU], sources: str, origin: Path) -> list[str]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(_reason(entry, devices, sources), []).append(entry)
    return [f"{origin}: {_listed(some)} not used: {reason}" for reason, some in groups.items() if reason]


def _reason(entry: Entry, devices: Sequence[GPU], sources: str) -> str:
    """Why a build does not use an entry; empty where it does."""
    device = next((gpu for gpu in devices if is_for(entry, gpu)), None)
    if device is None:
        return f"this build is not for {entry.product} with {entry.sms} SMs"
    if entry.source_hash != sources:
        return "the kernels' sources have changed since"
    if not all(_offered(entry, device, timing.config) for timing in entry.timings):
        return "the solver no longer offers their configurations"
    return ""


def _offered(entry: Entry, gpu: GPU, config: KernelConfig) -> bool:
    return all(kernel_config.check(entry.spec, entry.batch, gpu, config).values())


def _listed(entries: Sequence[Entry], most: int = 3) -> str:
    names = ", ".join(entry.title for entry in entries[:most])
    more = f" and {len(entries) - most} more" if len(entries) > most else ""
    return f"{len(entries)} tuned layer{'s' * (len(entries) > 1)} ({names}{more})"
