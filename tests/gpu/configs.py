"""Kernels of the device tests and benchmarks: for every cell and dtype the best that was measured on an H200."""

from __future__ import annotations

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
    64: ((1, 1), (2, 2), (5, 4), (129, 8)),
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
    "elman": {64: (1, 4, 1, 2), 128: (2, 4, 1, 2), 256: (4, 4, 1, 2), 512: (8, 4, 1, 2)},
}


def _rows() -> list[dict[str, Any]]:
    rows = []
    for cell, tilings in _TILINGS.items():
        for dtype in _SIXTEEN_BIT:
            for D, (CL, WM, WK, sets) in tilings.items():
                mode, buckets = "local" if D == 64 else "cluster", _BUCKETS[D]
                ends = [first - 1 for first, _ in buckets[1:]] + [2**31 - 1]
                more = {"accumulator_sets": sets, "ring_depth": 16 if D == 64 else 8}
                for (first, BT), last in zip(buckets, ends, strict=True):
                    rows.append(_row(cell, dtype, mode, D, CL, BT, WM, WK, min_batch=first, max_batch=last, **more))
                if cell != "slstm":  # it has no clip
                    rows.append(_row(cell, dtype, mode, D, CL, 4, WM, WK, clips=1, **more))
    return rows


ROWS = _rows()
