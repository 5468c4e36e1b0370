"""Kernels of the device tests and benchmarks: for every cell and dtype the best that was measured on an H200."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

_HOPPER = 90
_SIXTEEN_BIT = ("bfloat16", "float16")


def _row(
    cell: str, dtype: str, mode: str, D: int, CL: int, BT: int, WM: int, WK: int = 1, **more: int
) -> dict[str, Any]:
    """One kernel; what is not given is the usual choice."""
    row = {
        "cell": cell,
        "dtype": dtype,
        "compute_capability": _HOPPER,
        "min_batch": 1,
        "max_batch": 2**31 - 1,
        "clips": 0,
        "mode": mode,
        "padded_head_dim": D,
        "cluster_size": CL,
        "units_per_block": D // CL,
        "batch_tile": BT,
        "tiles_per_block": 1,
        "row_warps": WM,
        "k_warps": WK,
        "register_k_steps": D // 16 // WK,
        "accumulator_sets": 1,
        "ring_depth": 8,
        "replicas": 1,
        "spare_warp": int(mode == "local"),
    }
    return row | more


# (first batch, batch tile) of the batch buckets. Small tiles on idle multiprocessors win, and pairs of columns cost.
_BUCKETS = {
    64: ((1, 1), (2, 2), (17, 4), (129, 8)),
    128: ((1, 1), (2, 2), (33, 4), (129, 8)),
    256: ((1, 1), (2, 2), (17, 4)),
    512: ((1, 1), (2, 4), (129, 8)),
}

# (cluster size, row warps, k warps, accumulator sets) by head_dim.
_FOUR_GATES = {64: (1, 4, 1, 1), 128: (4, 4, 1, 2), 256: (8, 4, 1, 2), 512: (16, 4, 2, 1)}
_TILINGS = {
    "lstm": _FOUR_GATES,
    "slstm": _FOUR_GATES,
    "gru": {64: (1, 4, 1, 1), 128: (2, 4, 1, 2), 256: (8, 2, 2, 2), 512: (16, 2, 4, 1)},
    "elman": {64: (1, 4, 1, 2), 128: (1, 4, 1, 2), 256: (8, 2, 1, 4), 512: (8, 4, 1, 4)},
}

# The local mode of larger heads, mostly for devices without clusters, with a part of R in shared memory: (row warps,
# register k-steps, accumulator sets, batch tiles) by head_dim. Here a cluster is chosen before them.
_LOCAL = {
    "lstm": {96: ((4, 6, 1, (1, 4)),), 128: ((8, 6, 1, (1, 2, 4)), (8, 4, 1, (8,)))},
    "slstm": {96: ((4, 6, 1, (1, 4)),), 128: ((8, 6, 1, (1, 4)), (8, 4, 1, (8,)))},
    "gru": {96: ((3, 6, 1, (1, 4)),), 128: ((8, 8, 1, (1, 4)), (8, 6, 1, (8,)))},
    "elman": {96: ((3, 6, 2, (1, 8)),), 192: ((4, 12, 2, (1, 4)),), 256: ((8, 12, 1, (1, 2)), (8, 10, 1, (8,)))},
}

# float32: (first batch, batch tile, cluster size, row warps, register k-steps) by head_dim. The FMA units bound the
# step: tiles are small, and R is spread over as few warps as can hold it, since each of them repeats the pointwise
# part.
_FLOAT_FOUR_GATES = {
    64: ((1, 1, 1, 4, 4), (9, 2, 1, 4, 4), (129, 4, 1, 8, 4)),
    128: ((1, 1, 4, 4, 8), (9, 2, 4, 4, 8), (65, 4, 4, 4, 8)),
    256: ((1, 1, 16, 4, 16), (2, 2, 8, 8, 16), (33, 4, 8, 8, 16)),
    512: ((1, 1, 16, 8, 24), (2, 2, 16, 8, 16), (15, 4, 16, 8, 16)),
}
_FLOAT_TILINGS = {
    "lstm": _FLOAT_FOUR_GATES,
    "slstm": _FLOAT_FOUR_GATES | {512: ((1, 1, 16, 8, 20), *_FLOAT_FOUR_GATES[512][1:])},
    "gru": {
        64: ((1, 1, 1, 4, 4), (9, 2, 1, 4, 4), (129, 4, 1, 8, 4)),
        128: ((1, 1, 4, 4, 8), (17, 2, 4, 4, 8), (65, 4, 4, 4, 8)),
        256: ((1, 1, 8, 4, 16), (17, 2, 8, 4, 16), (65, 4, 8, 8, 16)),
        512: ((1, 1, 16, 8, 32), (15, 4, 16, 8, 24)),
    },
    "elman": {
        64: ((1, 1, 1, 2, 4), (17, 2, 1, 4, 4), (129, 4, 1, 8, 4)),
        128: ((1, 1, 1, 4, 8), (17, 2, 2, 4, 8), (65, 4, 2, 8, 8)),
        256: ((1, 1, 4, 4, 16), (17, 2, 4, 4, 16), (65, 4, 4, 8, 16)),
        512: ((1, 1, 16, 4, 32), (2, 2, 8, 8, 32), (33, 4, 8, 8, 32)),
    },
}


def _ends(firsts: Iterable[int]) -> list[int]:
    """The last batch of each bucket."""
    return [first - 1 for first in list(firsts)[1:]] + [2**31 - 1]


def _rows() -> list[dict[str, Any]]:
    rows = []
    for cell, tilings in _TILINGS.items():
        for dtype in _SIXTEEN_BIT:
            for D, (CL, WM, WK, sets) in tilings.items():
                mode = "local" if CL == 1 else "cluster"
                more = {"accumulator_sets": sets, "ring_depth": 16 if CL == 1 else 8}
                buckets = _BUCKETS[D]
                for (first, BT), last in zip(buckets, _ends(b[0] for b in buckets), strict=True):
                    rows.append(_row(cell, dtype, mode, D, CL, BT, WM, WK, min_batch=first, max_batch=last, **more))
                if cell != "slstm":  # it has no clip
                    rows.append(_row(cell, dtype, mode, D, CL, 4, WM, WK, clips=1, **more))
    return rows


def _local_rows() -> list[dict[str, Any]]:
    rows = []
    for (cell, tilings), dtype in product(_LOCAL.items(), _SIXTEEN_BIT):
        for D, (WM, KR, sets, tiles) in ((D, tiling) for D, some in tilings.items() for tiling in some):
            more = {"register_k_steps": KR, "accumulator_sets": sets, "ring_depth": 4}
            rows += [_row(cell, dtype, "local", D, 1, BT, WM, **more) for BT in tiles]
            if cell != "slstm":
                rows.append(_row(cell, dtype, "local", D, 1, tiles[-1], WM, clips=1, **more))
    return rows


def _float_rows() -> list[dict[str, Any]]:
    rows = []
    for cell, tilings in _FLOAT_TILINGS.items():
        for D, buckets in tilings.items():
            for (first, BT, CL, WM, KR), last in zip(buckets, _ends(b[0] for b in buckets), strict=True):
                mode, more = "local" if CL == 1 else "cluster", {"spare_warp": 0, "register_k_steps": KR}
                rows.append(_row(cell, "float32", mode, D, CL, BT, WM, min_batch=first, max_batch=last, **more))
                if cell != "slstm" and last > 2**30:
                    rows.append(_row(cell, "float32", mode, D, CL, BT, WM, clips=1, **more))
    return rows


ROWS = _rows() + _local_rows() + _float_rows()
