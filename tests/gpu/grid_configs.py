"""Kernels of the grid mode for the device tests and benchmarks."""

from __future__ import annotations

from typing import Any

from flashrnn_deploy.cells import CELLS

# Of each head_dim (units per block, batch tile, k warps, register k-steps, ring depth, replicas), for one row of the
# batch and for more. Measured on an H200, LSTM, us per step: of 8, 16 and 24 units the best; 1, 2, 4 and 8 replicas.
_SHAPES = {
    512: ((16, 1, 8, 4, 8, 4), (16, 4, 8, 4, 8, 1)),
    640: ((16, 1, 4, 10, 8, 4), (16, 8, 4, 8, 4, 1)),
    768: ((16, 1, 8, 6, 4, 4), (16, 8, 8, 6, 4, 1)),
    1024: ((16, 1, 8, 8, 4, 4), (16, 8, 8, 6, 4, 1)),
    2048: ((16, 1, 8, 8, 4, 8), (16, 8, 8, 8, 4, 1)),
}
# An Elman cell's R is a quarter of an LSTM's: it stays on chip up to head_dims of 4096.
_LARGE = {3072: ((32, 1, 8, 12, 4, 4), (32, 8, 8, 12, 4, 1))}
# float32: (units per block, batch tile, register k-steps, ring depth, replicas).
_FLOAT_FOUR_GATES = {
    768: ((8, 1, 48, 4, 4), (16, 4, 32, 4, 1)),
    1024: ((8, 1, 64, 4, 4), (16, 4, 32, 4, 1)),
}
_FLOAT_SHAPES = {
    "lstm": _FLOAT_FOUR_GATES,
    "slstm": _FLOAT_FOUR_GATES,
    "gru": {768: ((8, 1, 48, 4, 4), (16, 4, 32, 4, 1)), 1024: ((8, 1, 64, 4, 4), (16, 4, 40, 4, 1))},
    "elman": {1024: ((16, 1, 64, 4, 4), (16, 4, 64, 4, 1))},
}
_FOUR_GATES = _SHAPES | {768: ((16, 1, 8, 6, 4, 4), (24, 4, 8, 6, 4, 1))}


def row(cell: str, dtype: str, D: int, shape: tuple[int, ...], **more: int) -> dict[str, Any]:
    """One kernel; what is not given is the usual choice."""
    UB, BT, WK, KR, PF, REP = shape
    values = {
        "cell": cell, "dtype": dtype, "compute_capability": 90, "min_batch": 1, "max_batch": 2**31 - 1, "clips": 0,
        "mode": "grid", "padded_head_dim": D, "cluster_size": 1, "units_per_block": UB, "batch_tile": BT,
        "tiles_per_block": 1, "row_warps": 1, "k_warps": WK, "register_k_steps": KR, "accumulator_sets": 1,
        "ring_depth": PF, "replicas": REP, "spare_warp": 0,
    }  # fmt: skip
    return values | more


def _rows() -> list[dict[str, Any]]:
    rows = []
    for cell, definition in CELLS.items():
        shapes = _FOUR_GATES if definition.num_gates == 4 else _SHAPES | (_LARGE if cell == "elman" else {})
        for dtype in ("bfloat16", "float16"):
            for D, (one, several) in shapes.items():
                if D < 768 and (cell, dtype) != ("lstm", "bfloat16"):
                    continue  # they run on the kernels of 768
                if D == 768 and dtype == "float16" and cell != "lstm":
                    continue  # and of 1024
                rows.append(row(cell, dtype, D, one, max_batch=1))
                rows.append(row(cell, dtype, D, several, min_batch=2))
            if cell != "slstm":  # it has no clip
                rows.append(row(cell, dtype, max(shapes), shapes[max(shapes)][1], clips=1))
    return rows


def _float_rows() -> list[dict[str, Any]]:
    rows = []
    for cell, shapes in _FLOAT_SHAPES.items():
        for D, (one, several) in shapes.items():
            for (UB, BT, KR, PF, REP), batches in ((one, {"max_batch": 1}), (several, {"min_batch": 2})):
                rows.append(row(cell, "float32", D, (UB, BT, 1, KR, PF, REP), row_warps=8, **batches))
        if cell != "slstm":
            rows.append(rows[-1] | {"clips": 1, "min_batch": 1})
    return rows


ROWS = _rows() + _float_rows()
