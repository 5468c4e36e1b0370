"""The modes of the CUDA kernels, and what the cost models of all kernels share."""

from __future__ import annotations

import math

MODES = ("local", "cluster", "grid", "alternating")
LOCAL, CLUSTER, GRID, ALTERNATING = range(4)

CLUSTER_EXCHANGE_NS = {2: 170, 4: 180, 8: 200, 16: 240}
"""Exchange of h inside a cluster, ns per step by cluster size: st.async all-gather of 128 bytes per block, H200."""


def grid_exchange_ns(blocks: int, replicas: int) -> int:
    """Exchange of h through L2 among ``blocks`` blocks, ns per step.

    The exchange alone was measured as 570, 650, 830 and 1000 at 16, 32, 64 and 128 blocks and 840 at 128 with 4 copies;
    330 + a square root meets all five within 4 %. Fewer than 16 blocks gain nothing. The kernels take 70 ns more.
    """
    return round(400 + 60 * math.sqrt(max(16, blocks / math.sqrt(replicas))))
