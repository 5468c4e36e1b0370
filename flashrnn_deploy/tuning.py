"""What was measured of kernel configurations, kept in a JSON file beside a plugin library.

`build-plugins --autotune` writes the file, later builds read it, also where there is no GPU. An entry holds for one
layer and batch, one kind of GPU and one state of the kernels' sources; what does not fit a build is told, never used,
and stays in the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flashrnn_deploy import gpus, kernel_config
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import new_file
from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.kernel_config import KernelConfig
from flashrnn_deploy.kernel_table import Choice, Measured
from flashrnn_deploy.modes import MODES
from flashrnn_deploy.op import RNNSpec

FILE = "libflashrnn.tuned.json"
_FORMAT = 1


@dataclass(frozen=True)
class Timing:
    """One configuration on the device: microseconds per step, or why it is excluded."""

    config: KernelConfig
    step_us: float | None
    excluded: str = ""


@dataclass(frozen=True)
class Entry:
    """The timings of one layer and batch, and what they were made with."""

    product: str  # the GPU, as its driver names it
    compute_capability: int
    sms: int
    driver: str
    nvcc: str
    source_hash: str  # of the kernels, ``source_hash``
    date: str
    spec: RNNSpec
    batch: int
    timings: tuple[Timing, ...]

    @property
    def key(self) -> tuple[str, str, RNNSpec, int]:
        return self.product, self.source_hash, self.spec, self.batch

    @property
    def title(self) -> str:
        return f"{title(self.spec)} B{self.batch}"

    def times(self) -> dict[KernelConfig, float]:
        """Microseconds per step; infinite where it is excluded."""
        return {t.config: math.inf if t.step_us is None else t.step_us for t in self.timings}


def title(spec: RNNSpec) -> str:
    """A layer in few words."""
    both = " both directions" if spec.num_directions == 2 else ""
    return f"{spec.cell} {spec.num_heads}x{spec.head_dim} {spec.dtype}{both}"


def source_hash(plugins: Path) -> str:
    """sha256 over the sources that a CUDA kernel is compiled from, by name and content."""
    kernels = plugins / "kernels"
    files = sorted([*(kernels / "cuda").iterdir(), *kernels.glob("*.h"), *kernels.glob("*.cuh")])
    lines = (f"{f.relative_to(kernels).as_posix()} {hashlib.sha256(f.read_bytes()).hexdigest()}\n" for f in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def load(path: Path) -> list[Entry]:
    """The entries of a file.

    Raises:
        FlashRNNError: it cannot be read, or is not what ``save`` writes.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlashRNNError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FlashRNNError(f"{path} is not a file of build-plugins --autotune: {error}") from error
    try:
        if facts["format"] != _FORMAT:
            raise FlashRNNError(f"{path} has format {facts['format']}, and this version reads {_FORMAT}: tune again")
        return [_entry(values) for values in facts["entries"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FlashRNNError(f"{path} is damaged, or no file of build-plugins --autotune: {error!r}") from error


def _entry(values: dict[str, Any]) -> Entry:
    timings = [t | {"config": KernelConfig(**t["config"])} for t in values["timings"]]
    entry = Entry(**(values | {"spec": RNNSpec(**values["spec"]), "timings": tuple(Timing(**t) for t in timings)}))
    texts = (entry.product, entry.driver, entry.nvcc, entry.source_hash, entry.date, entry.spec.cell, entry.spec.dtype)
    sizes = (entry.compute_capability, entry.sms, entry.batch, entry.spec.num_heads, entry.spec.head_dim)
    if not all(type(text) is str for text in texts) or not all(type(n) is int and 0 < n < 2**31 for n in sizes):
        raise ValueError(f"{entry.title} has a value of another kind")
    for timing in entry.timings:
        kinds = {f.name: str if f.name == "mode" else int for f in fields(KernelConfig)}
        right = all(type(getattr(timing.config, name)) is kind for name, kind in kinds.items())
        if (
            not right
            or timing.config.mode not in MODES
            or not (timing.step_us is None or (timing.step_us > 0 and math.isfinite(timing.step_us)))
        ):
            raise ValueError(f"{entry.title} has {timing}")
    return entry


def save(path: Path, entries: Iterable[Entry]) -> None:
    """Write a file that ``load`` reads, whole or not at all."""
    facts = {"format": _FORMAT, "entries": [asdict(entry) for entry in entries]}
    with new_file(path) as file:
        file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


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
        FlashRNNError: a file cannot be read, or is not what ``save`` writes.
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
        return f"this build is not for {entry.product}"
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
