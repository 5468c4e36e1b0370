"""The JSON file of timings that `build-plugins --autotune` writes and later builds read: docs/plugins.md.

A file may come from elsewhere, and its texts end in a library and on a terminal: each value is checked when it is read.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import new_file
from flashrnn_deploy.kernel_config import KernelConfig
from flashrnn_deploy.modes import MODES
from flashrnn_deploy.op import DTYPES, RNNSpec

FILE = "libflashrnn.tuned.json"
LONGEST_REASON = 400
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
    source_hash: str  # of the kernels, ``tuning.source_hash``
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


def load(path: Path) -> list[Entry]:
    """The entries of a file.

    Raises:
        FlashRNNError: it cannot be read, or is not what ``save`` writes; the message names the field.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlashRNNError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FlashRNNError(f"{path} is not a file of build-plugins --autotune: {error}") from error
    format_ = facts.get("format") if isinstance(facts, dict) else None
    if type(format_) is int and format_ != _FORMAT:
        raise FlashRNNError(f"{path} has format {_shown(format_)}, and this version reads {_FORMAT}: tune again")
    try:
        _check(facts, _FILE, "")
        return [_entry(values, f"entries[{i}]") for i, values in enumerate(facts["entries"])]
    except ValueError as error:
        raise FlashRNNError(f"{path} is damaged, or no file of build-plugins --autotune: {error}") from error


def save(path: Path, entries: Iterable[Entry]) -> None:
    """Write a file that ``load`` reads, whole or not at all."""
    facts = {"format": _FORMAT, "entries": [asdict(entry) for entry in entries]}
    with new_file(path) as file:
        file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _entry(values: dict[str, Any], where: str) -> Entry:
    try:
        spec = RNNSpec(**values["spec"])
    except FlashRNNError as error:  # values that do not go together
        raise ValueError(f"{where}.spec: {error}") from error
    if not values["timings"]:
        raise ValueError(f"{where}.timings is empty")
    timings = []
    for i, timing in enumerate(values["timings"]):
        if (timing["step_us"] is None) != bool(timing["excluded"]):
            raise ValueError(f"{where}.timings[{i}] needs either step_us or excluded")
        timings.append(Timing(**(timing | {"config": KernelConfig(**timing["config"])})))
    return Entry(**(values | {"spec": spec, "timings": tuple(timings)}))


@dataclass(frozen=True)
class _Kind:
    """What one value may be."""

    words: str
    fits: Callable[[Any], bool]


_Form = _Kind | dict[str, "_Form"] | list["_Form"]


def _check(value: Any, form: _Form, where: str) -> None:
    """Raises ValueError, which names the first value that is not of its form."""
    name = where or "the whole"
    if isinstance(form, dict):
        if type(value) is not dict:
            raise ValueError(f"{name} is {_shown(value)}, not an object")
        if missing := [key for key in form if key not in value]:
            raise ValueError(f"{name} has no {missing[0]}")
        if unknown := [key for key in value if key not in form]:
            raise ValueError(f"{name} has the unknown field {_shown(unknown[0])}")
        for key, part in form.items():
            _check(value[key], part, f"{where}.{key}".lstrip("."))
    elif isinstance(form, list):
        if type(value) is not list:
            raise ValueError(f"{name} is {_shown(value)}, not a list")
        for i, item in enumerate(value):
            _check(item, form[0], f"{where}[{i}]")
    elif not form.fits(value):
        raise ValueError(f"{name} is {_shown(value)}, not {form.words}")


def _shown(value: Any, most: int = 40) -> str:
    """A value as the file has it, in printable ASCII."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _text(longest: int, shortest: int = 1, without: str = "") -> Callable[[Any], bool]:
    return lambda v: (
        type(v) is str and shortest <= len(v) <= longest and v.isprintable() and not set(without).intersection(v)
    )


def _whole(low: int, high: int = 2**31 - 1) -> _Kind:
    return _Kind(f"a whole number from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda v: type(v) in (int, float) and low <= v <= high  # NaN is in no range


def _one_of(names: Iterable[str]) -> _Kind:
    known = tuple(names)
    return _Kind(f"one of {', '.join(known)}", lambda v: type(v) is str and v in known)


def _is_date(value: Any) -> bool:
    if type(value) is not str or not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        return False
    try:
        return bool(datetime.date.fromisoformat(value))
    except ValueError:
        return False


_NAME = _Kind("1 to 100 printable characters without quotes and backslashes", _text(100, without="\"'`\\"))
_FACTOR = _Kind("a number from 0 to 3e38", _number(0, 3e38))
_SPEC: dict[str, _Form] = {
    "cell": _one_of(CELLS),
    "num_heads": _whole(1),
    "head_dim": _whole(1),
    "num_directions": _whole(1, 2),
    "dtype": _one_of(DTYPES),
    "layout": _whole(0, 1),
    "reverse": _whole(0, 1),
    "clip": _FACTOR,
    "relu": _whole(0, 1),
    "normalizer_floor": _FACTOR,
}
_CONFIG: dict[str, _Form] = {f.name: _one_of(MODES) if f.name == "mode" else _whole(0) for f in fields(KernelConfig)}
_TIMING: dict[str, _Form] = {
    "config": _CONFIG,
    # A nanosecond is less than one product takes, and the timing program is ended long before a step of 1000 s.
    "step_us": _Kind("null or microseconds from 0.001 to 1e9", lambda v: v is None or _number(1e-3, 1e9)(v)),
    "excluded": _Kind(f"a printable text of at most {LONGEST_REASON} characters", _text(LONGEST_REASON, 0)),
}
_ENTRY: dict[str, _Form] = {
    "product": _NAME,
    "compute_capability": _whole(1),
    "sms": _whole(1),
    "driver": _NAME,
    "nvcc": _NAME,
    "source_hash": _Kind(
        "64 hexadecimal digits", lambda v: type(v) is str and re.fullmatch("[0-9a-f]{64}", v) is not None
    ),
    "date": _Kind("a date such as 2026-11-30", _is_date),
    "spec": _SPEC,
    "batch": _whole(1),
    "timings": [_TIMING],
}
_FILE: dict[str, _Form] = {"format": _whole(_FORMAT, _FORMAT), "entries": [_ENTRY]}
