"""The float32 kernels for the solver: sizes, constraints and cost of products on the FMA units.

A lane multiplies ``UNITS`` units, all gates, with one of S interleaved slices of D, S = 32 WM units / UB; butterflies
add the slices up and leave each (unit, batch) pair with S / (units BT) lanes, which all compute its step. So more
warps than the registers need are a loss. TF32, which the tensor cores offer, keeps 10 bits of mantissa and misses the
tolerance. In the grid mode D is split over all lanes of a warp, which has UB / WM units.

Costs are in cycles of an H200, fitted to 110 measured kernels of the four cells (head_dims 64 to 512, clusters of 1
to 16, batch tiles 1 to 4): the worst is off by 9 %, the mean by 3 %. The grid mode, fitted to 27 kernels more, is off
by up to 13 %, with two rows and more in a tile by up to 6 %.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashrnn_deploy.expressions import Expr, Table, all_of, any_of, ceil_div, divides, maximum, minimum
from flashrnn_deploy.modes import ALTERNATING, CLUSTER, CLUSTER_EXCHANGE_NS, GRID, grid_exchange_ns

if TYPE_CHECKING:
    from flashrnn_deploy.kernel_model import Model

ACTIVATIONS = {"lstm": 5, "slstm": 6, "gru": 3, "elman": 1}
"""Activations on the critical path or beside it, per (unit, batch) pair."""


def units_per_lane(num_gates: int, mode: int, units_per_block: int, row_warps: int) -> int:
    """``Fma::kUnits`` of plugins/kernels/cuda/slices.cuh; 0 where there is no whole number."""
    if mode == GRID:
        units, rest = divmod(units_per_block, row_warps)
        return units if not rest and units in (1, 2, 4, 8) else 0  # a power of two: butterflies halve it
    return 4 if num_gates == 1 else 2


def slices(units: int, units_per_block: int, row_warps: int) -> int:
    """Lanes that share D; 0 where they are not a power of two inside a warp."""
    count, rest = divmod(32 * row_warps * units, units_per_block)
    return count if not rest and count in (1, 2, 4, 8, 16, 32) else 0


def size(m: Model) -> None:
    """Sets slices, registers per lane, bytes of shared memory, and how many blocks are resident."""
    definition = m.spec.definition
    G, units = definition.num_gates, _units(m)
    m.slices = maximum(1, _slices(m))
    m.weight_registers = m.KR * m.UB * G // (m.WM * 2)  # KR / S vectors of 16 floats for each gate of each unit
    # Loads of R in flight take more where a tile has more than one row.
    loads = Table(lambda bt, kr, d: 22 * (bt > 1 and 16 * kr < d), m.BT, m.KR, m.D)
    flight = maximum(loads, m._is(GRID) * 20)  # or packets of h
    m.registers = m.weight_registers + m.BT * (units * G + 4) + flight + (46 + 2 * definition.num_states)
    m.weight_bytes = maximum(0, m.D - m.KR * 16) * m.UB * (4 * G)
    m.shared = m.BT * m.D * 8 + m.PF * m.WM * (128 * G) + m.weight_bytes + 128  # h twice, ring of wx, R, barriers
    _residency(m)


def _residency(m: Model) -> None:
    """How many blocks share an SM and its units, and how many heads' tiles run at once."""
    gpu, grid = m.gpu, m._is(GRID)
    # A few registers more than estimated: a block too many on paper is a wave too many on the device.
    blocks = minimum(gpu.registers_per_sm // (32 * m.WM * (m.registers + 4)), gpu.smem_per_sm // (m.shared + 1024))
    m.resident = maximum(1, blocks * (1 - grid))
    heads = Table(lambda d, ub: max(1, gpu.sms * ub // d), m.D, m.UB)  # at once; the others are further launches
    m.at_once = maximum(1, m.places * (1 - grid) * m.resident + heads * grid)


def constrain(m: Model) -> None:
    """What holds in float32 alone."""
    need, units = m.problem.require, _units(m)
    alternating = m.mode == ALTERNATING
    need("whole_slices", any_of(alternating, _slices(m) >= 1))
    need("whole_vectors", any_of(alternating, all_of(divides(m.slices * 4, m.D), divides(m.slices, m.KR * 4))))
    need("one_pair_per_lane", any_of(alternating, m.BT * units * m.REP <= m.slices))
    need("whole_messages", any_of(m.mode != CLUSTER, divides(m.WM * 4, m.UB)))
    need("register_k_steps_exist", any_of(alternating, m.KR * 16 <= m.D))


def cost(m: Model) -> dict[str, Expr]:
    """The parts of one wave of the on-chip modes, in hundredths of a cycle per step."""
    cell, G = m.spec.cell, m.spec.definition.num_gates
    grid = m._is(GRID)
    turns = ceil_div(m.WM, 4)  # warps of the sub-partition that has most
    sharing = minimum(ceil_div(m.groups, m.places), m.resident)
    place = (m.mode, m.UB, m.WM)
    shuffles = Table(lambda mode, ub, wm, bt: _shuffles(units_per_lane(G, mode, ub, wm), ub, wm, bt, G), *place, m.BT)
    rounds = Table(lambda *at: max(1, slices(units_per_lane(G, *at), *at[1:])).bit_length() - 1, *place)
    near = Table(lambda cl: 17200 if cl == 1 else round(CLUSTER_EXCHANGE_NS[cl] * 198 * 0.76), m.CL)
    far = Table(lambda d, ub, rep: round(grid_exchange_ns(-(-d // ub), rep) * 198), m.D, m.UB, m.REP)
    volume = Table(lambda bt, d: (bt > 1) * (17000 + 38 * (bt - 1) * d), m.BT, m.D)  # of h beyond one row
    exchange = near * (1 - grid) + (far + volume) * grid
    messages = Table(lambda mode: int(mode == CLUSTER), m.mode) * m.BT
    latency = 1500 * ACTIVATIONS[cell] + 3800 * (cell == "slstm")
    return {
        "products": m.UB * m.BT * m.D * turns * (G * 97) // (32 * m.WM) * sharing,
        "reading h from shared memory": m.WM * m.BT * m.D * 20 // m.slices * sharing,
        "reading R from shared memory": m.weight_bytes * 77 // 128 * sharing,
        "adding up the slices of D": m.WM * shuffles * 230 * sharing + rounds * 3900,
        "pointwise part": turns * 2200 * sharing + latency,
        "exchange of h": exchange + messages * (m.D * 134 // 4 + m.UB * m.CL * 7600 // (128 * m.WM)),
    }


def _units(m: Model) -> Expr:
    G = m.spec.definition.num_gates
    return Table(lambda mode, ub, wm: units_per_lane(G, mode, ub, wm), m.mode, m.UB, m.WM)


def _slices(m: Model) -> Expr:
    G = m.spec.definition.num_gates
    return Table(lambda mode, ub, wm: slices(units_per_lane(G, mode, ub, wm), ub, wm), m.mode, m.UB, m.WM)


def _shuffles(units: int, units_per_block: int, row_warps: int, rows: int, gates: int) -> int:
    """Per warp: halving rounds until each lane has one (unit, row) pair, then full ones."""
    lanes, items = slices(units, units_per_block, row_warps), units * rows
    return gates * (items - 1 + round(math.log2(max(1, lanes // items)))) if lanes else 0
