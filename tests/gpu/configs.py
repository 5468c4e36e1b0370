"""Kernels of the device tests and benchmarks: for every cell and dtype the best that was measured on an H200."""

from __future__ import annotations

from typing import Any

_HOPPER = 90
_SIXTEEN_BIT = ("bfloat16", "float16")


def _row(cell: str, dtype: str, mode: str, D: int, CL: int, BT: int, WM: int, WK: int = 1, **more: int) -> dict[str, Any]:
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
