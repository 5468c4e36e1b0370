"""A seeded pairwise table: within each mode, every value of every axis meets every value of every other axis."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from judge import LENGTHS, MAX_WX_BYTES, STATES, Case

from flashrnn_deploy.op import RNNSpec

AXES: dict[str, tuple[Any, ...]] = {
    "cell": ("lstm", "gru", "elman", "slstm"),
    "dtype": ("bfloat16", "float16", "float32"),
    "direction": ("forward", "backward", "both"),
    "layout": (0, 1),
    "lengths": LENGTHS,
    "states": STATES,
    "clips": (False, True),
    "D": (1, 5, 37, 64, 100, 128, 150, 200, 257, 384, 512, 640, 768, 1000, 1024, 2048, 2560, 3000),
    "B": (1, 3, 16, 30, 65),
    "T": (0, 1, 7, 1024),
    "heads": (1, 3, 12),
}
MODES = ("local", "cluster", "grid", "alternating")
D_RANGE = {"local": (1, 256), "cluster": (1, 512), "grid": (384, 3000), "alternating": (1, 3000)}


@dataclass(frozen=True)
class Row:
    mode: str
    case: Case


def allowed(mode: str, values: dict[str, Any]) -> bool:
    """Whether a combination exists; ``values`` may hold some axes only."""
    if values.get("cell") == "slstm" and values.get("clips"):
        return False
    least, most = D_RANGE[mode]
    if mode == "local":
        most = 64 if values.get("dtype") == "float32" else 256 if values.get("cell", "elman") == "elman" else 128
    if mode == "grid":  # what stays on chip: tests/gpu/grid_configs.py
        most = most if values.get("cell", "elman") == "elman" else 2048
        most = min(most, 1024) if values.get("dtype") == "float32" else most
    if not least <= values.get("D", least) <= most:
        return False
    return not {"T", "B", "heads", "D"} <= set(values) or wx_bytes(values) <= MAX_WX_BYTES


def wx_bytes(v: dict[str, Any]) -> int:
    size = v["T"] * v["B"] * v["heads"] * v["D"] * 4 * (2 if v.get("direction") == "both" else 1)
    return int(size * (4 if v.get("dtype") == "float32" else 2))


def pairwise(mode: str, seed: int, more: int = 0) -> Iterator[Row]:
    """Greedy: each row takes, of 60 random ones, that which brings most new pairs. Then ``more`` random rows."""
    rng = random.Random(f"{mode} {seed}")
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(AXES, 2)
        for x, y in itertools.product(AXES[a], AXES[b])
        if allowed(mode, {a: x, b: y})
    }

    def pairs(values: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(values.items(), 2)) & missing

    def draw() -> dict[str, Any]:
        first = dict(rng.choice(sorted(missing, key=repr))) if missing else {}
        while True:
            values = {a: first.get(a, rng.choice(AXES[a])) for a in AXES}
            if allowed(mode, values):
                return values

    count = 0
    while missing or more > 0:
        more -= not missing
        best = max((draw() for _ in range(60)), key=lambda v: len(pairs(v))) if missing else draw()
        missing -= pairs(best)
        yield Row(mode, to_case(best, seed + count))
        count += 1


def to_case(v: dict[str, Any], seed: int) -> Case:
    spec = RNNSpec(
        v["cell"], v["heads"], v["D"], 2 if v["direction"] == "both" else 1, v["dtype"], v["layout"],
        reverse=int(v["direction"] == "backward"), clip=0.6 if v["clips"] else 0.0,
        relu=int(v["cell"] == "elman" and seed % 2), normalizer_floor=float(v["cell"] == "slstm" and seed % 2),
    )  # fmt: skip
    return Case(spec, v["T"], v["B"], v["lengths"], v["states"], seed)
