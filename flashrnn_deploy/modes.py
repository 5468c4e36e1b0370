"""The modes of the CUDA kernels, and what the cost models of all kernels share."""

MODES = ("local", "cluster", "grid", "alternating")
LOCAL, CLUSTER, GRID, ALTERNATING = range(4)

CLUSTER_EXCHANGE_NS = {2: 170, 4: 180, 8: 200, 16: 240}
"""Exchange of h inside a cluster, ns per step by cluster size: st.async all-gather of 128 bytes per block, H200."""
