"""The kernels' problem for the solver: variables, named constraints and a cost model. docs/solver.md explains each.

The variables are the fields of ``kernel_config.KernelConfig``; ``Model`` gives them short names: D padded head_dim, CL
cluster size, UB units per block, BT batch tile, NB tiles per block, WM row warps, WK k warps, KR register k-steps, SPL
accumulator sets, PF ring depth, REP replicas, AUX spare warp; and PM unit groups per warp, KS k-steps per warp.

**Tiles.** The recurrent product runs as ``mma.m16n8k16``: 16 rows of R, 8 batch columns, 16 of D. Rows are dealt so
that one lane ends up with all gates of its (unit, batch) pairs and needs no shuffle before the pointwise part:

* 4 gates: 8 units in two m-tiles, rows 0-7 and 8-15 of each being two gates;
* 3 gates (GRU): 16 units in three m-tiles, one per gate; the lane of rows g and g + 8 owns units 2g and 2g + 1;
* 1 gate (Elman): 16 units in one m-tile, dealt the same way.

No row is wasted in any of them. **float32** runs on the FMA units: ``fma_model`` has the sizes, constraints and costs
that differ. ``alternating_model`` has the cost of the alternating mode.

Cost terms are in hundredths of a cycle, measured on an H200 with bfloat16; other devices scale by clock and by the
documented tensor rate and are estimates. Nothing here needs a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashrnn_deploy import alternating_model, fma_model
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.expressions import (
    Constraint,
    Expr,
    Table,
    all_of,
    any_of,
    ceil_div,
    divides,
    maximum,
    minimum,
    wrap,
)
from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.modes import ALTERNATING, CLUSTER, CLUSTER_EXCHANGE_NS, GRID, LOCAL
from flashrnn_deploy.op import LARGEST_SIZE, RNNSpec
from flashrnn_deploy.solver import Problem


@dataclass(frozen=True)
class Tiling:
    """How one cell meets the tensor cores and the special-function units.

    ``activations``: special-function instructions per (unit, batch) pair, with tanh.approx (bfloat16) and with exact
    forms, ex2 and rcp (float16, whose tolerance the approximation misses). ``latency``: cycles of its dependent chain
    beyond the LSTM's.
    """

    group: int  # units per group of m-tiles
    tiles: int  # m-tiles per group
    activations: tuple[int, int]
    latency: int = 0
    kept_registers: int = 0  # values per lane and tile that must stay apart from the accumulators
    largest_local: int = 128  # head_dim beyond which reading R from shared memory costs more than an exchange of h


TILINGS = {
    "lstm": Tiling(8, 2, (5, 10)),
    "gru": Tiling(
        16, 3, (3, 6), latency=-35, kept_registers=4
    ),  # wx_n stays apart: r multiplies the recurrent part alone
    "elman": Tiling(
        16, 1, (1, 2), latency=-40, largest_local=256
    ),  # one activation behind the product where the LSTM has two
    # logsigmoid by ex2 and lg2, two ex2, tanh, sigmoid, rcp. Measured: 20 to 50 ns more than the LSTM.
    "slstm": Tiling(8, 2, (7, 9), latency=40),
}

# What a second block on an SM adds to the time of its units. The rest hides where the first one waits. Further blocks
# find no such gaps.
FIRST_NEIGHBOUR_PERCENT = 67

# kLargestGridHead of plugins/kernels/cuda/config.h: the memory of the exchange is bounded by it.
LARGEST_GRID_HEAD = 4096


class Model:
    """The problem of one layer on one device: variables, named constraints, ``sizes``, cost ``terms``.

    ``objective`` is the sum of the terms: the predicted step in hundredths of a cycle.
    """

    def __init__(self, spec: RNNSpec, batch: int, gpu: GPU) -> None:
        if not 1 <= batch <= LARGEST_SIZE:
            raise FlashRNNError(f"batch must be at least 1 and at most {LARGEST_SIZE}, not {batch}")
        self.spec, self.batch, self.gpu, self.tiling = spec, batch, gpu, TILINGS[spec.cell]
        self.fma = spec.dtype == "float32"
        self.problem = Problem()
        self.sizes: dict[str, Expr] = {}
        self.terms: dict[str, Expr] = {}
        self.slices: Expr = wrap(1)  # of D, one a lane: float32
        self._declare()
        self._size()
        self._constrain()
        self._cost()

    def _declare(self) -> None:
        # Rows and columns of zeros are exact. More of them than needed can pay: they let 2, 4 or 8 warps share D.
        padded = sorted({-(-self.spec.head_dim // m) * m for m in (32, 64, 128, 256)})
        largest = padded[-1]
        new = self.problem.variable
        self.mode = new("mode", range(4))
        self.D = new("padded_head_dim", padded)
        self.CL = new("cluster_size", (1, 2, 4, 8, 16))
        self.UB = new("units_per_block", range(8, min(largest, 256) + 1, 8))
        self.BT = new("batch_tile", (1, 2, 4, 8))
        self.NB = new("tiles_per_block", (1,))
        self.WM = new("row_warps", (8, 6, 4, 3, 2, 1))
        self.WK = new("k_warps", (1,) if self.fma else (1, 2, 4, 8))
        self.KR = new("register_k_steps", range(min(largest // 16, 64), -1, -2))  # k-steps come in pairs
        self.REP = new("replicas", (1, 2, 4, 8))
        sets = (1,) if self.fma else (1, 2, 4) if self.tiling.tiles == 1 else (1, 2)
        self.SPL = new("accumulator_sets", sets)
        self.AUX = new("spare_warp", (0, 1))
        self.PF = new("ring_depth", (16, 8, 4, 2))

    def _is(self, *modes: int) -> Expr:
        """1 in these modes, else 0."""
        return Table(lambda m: int(m in modes), self.mode)

    def _by_mode(self, local: int, cluster: int, grid: int) -> Expr:
        """A number for each on-chip mode, 0 in the alternating one."""
        return Table(lambda m: {LOCAL: local, CLUSTER: cluster, GRID: grid}.get(m, 0), self.mode)

    def _size(self) -> None:
        """Everything that follows from the variables; kernels use the same formulas."""
        self.rows = self.BT
        self.warps = self.WM * self.WK
        self.all_warps = self.warps + self.AUX
        self.groups = ceil_div(self.batch, self.rows) * (self.spec.num_directions * self.spec.num_heads)
        self.blocks = self.groups * (self.D // self.UB)
        # For a cluster, or a block that is alone.
        self.places = Table(lambda cl: max(1, self.gpu.resident_clusters(cl)) if cl > 1 else self.gpu.sms, self.CL)
        if self.fma:
            fma_model.size(self)
        else:
            self._size_tiles()
            self._size_residency()
        on_chip = self._is(LOCAL, CLUSTER, GRID)
        self.sizes = {
            "num_blocks": self.blocks * on_chip,
            "resident_blocks": minimum(self.groups, self.at_once) * (self.D // self.UB) * on_chip,
            "threads_per_block": 32 * self.all_warps * on_chip,
            "registers_per_thread": self.registers * on_chip,
            "shared_memory_bytes": self.shared * on_chip,
            "weight_bytes_in_registers": self.weight_registers * self.warps * 128 * on_chip,
        }

    def _size_tiles(self) -> None:
        tiling, G = self.tiling, self.spec.definition.num_gates
        self.PM = self.UB // (tiling.group * self.WM)
        self.KS = maximum(1, self.D // (16 * self.WK))
        self.tpo = ceil_div(self.PM, self.WK)  # tiles whose pointwise part one warp owns
        self.k_split = Table(lambda wk: int(wk > 1), self.WK)
        # Columns of a lane with a batch row: up to 4 rows use every second column, so that each lane owns one.
        self.columns = Table(lambda bt: 1 if bt <= 4 else 2, self.BT)
        units = tiling.group // 8  # per lane and tile
        tile_registers = 4 * tiling.tiles
        self.weight_registers = self.PM * self.KR * tile_registers
        # Of h a warp holds all of its part, or what it needs soon.
        h_registers = Table(lambda m: {LOCAL: 16, CLUSTER: 32}.get(m, LARGEST_GRID_HEAD), self.mode)
        self.registers = (
            self.weight_registers
            + minimum(2 * self.KS, h_registers)
            + self.PM * (self.SPL * tile_registers + tiling.kept_registers)
            + Table(lambda m, bt: 72 if m != LOCAL else 64 if bt == 8 else 40, self.mode, self.BT)
        )  # fmt: skip
        self.weight_bytes = self.warps * self.PM * maximum(0, self.KS - self.KR) * (512 * tiling.tiles)
        stage = self._is(LOCAL) * self.rows * (self.D * (2 * G) + (96 if G == 3 else 32))  # rows in different banks
        stage += self._is(CLUSTER, GRID) * self.tpo * self.warps * (32 * units * G * 4)
        self.shared = (
            2 * self.rows * (2 * self.D + 64) * self._is(LOCAL, CLUSTER)  # h, two buffers, conflict-free pitch
            + self.PF * stage
            + self.k_split * 2 * self.WM * self.PM * self.WK * (512 * tiling.tiles)  # partial sums, two buffers
            + self.weight_bytes
            + 128  # barriers
        )

    def _size_residency(self) -> None:
        """How many blocks share an SM, and how many heads' tiles run at once, one launch or wave after the other.

        Blocks of the local mode and clusters are independent: what does not fit waits. The grid mode takes as many
        heads' tiles at once as the device has room for. Compiled kernels of the cluster mode mostly take 16 to 50
        registers fewer than the estimate, those of the grid up to 10 more; a head that does not fit beside the others
        is a launch of its own, so it is better to be careful.
        """
        gpu, by_mode = self.gpu, self._by_mode
        registers = minimum(255, self.registers + by_mode(8, -16, 12))
        self.resident = maximum(1, minimum(gpu.registers_per_sm // (self.all_warps * registers * 32),
                                           gpu.smem_per_sm // (self.shared + 1024)))  # fmt: skip
        heads = self.resident * self.UB * gpu.sms // self.D
        self.at_once = maximum(1, by_mode(1, 1, 0) * self.places * self.resident + by_mode(0, 0, 1) * heads)

    def _constrain(self) -> None:
        gpu, need, group = self.gpu, self.problem.require, self.tiling.group
        cluster, grid, local, alternating = (self.mode == m for m in (CLUSTER, GRID, LOCAL, ALTERNATING))
        not_cluster, not_grid, not_local = self.mode != CLUSTER, self.mode != GRID, self.mode != LOCAL

        def on_chip(*parts: Constraint) -> Constraint:
            return any_of(alternating, all_of(*parts))

        if gpu.compute_capability < 80:
            need("tensor_core_dtype", alternating)
        plain = {self.D: self.problem.domains[1][0], self.UB: 8, self.WM: 1, self.KR: 0, self.PF: 2}
        ones = (self.CL, self.BT, self.WK, self.REP, self.SPL)
        idle = [v == value for v, value in plain.items()] + [v == 1 for v in ones] + [self.AUX == 0]
        need("alternating_has_no_tiles", any_of(self.mode != ALTERNATING, all_of(*idle)))
        need("cluster_support", any_of(not_cluster, Table(gpu.resident_clusters, self.CL) >= 1))
        need("cluster_measured_range", any_of(not_cluster, self.D <= 512))
        need("cluster_is_one_head", any_of(not_cluster, self.CL * self.UB == self.D))
        need("cluster_size_outside_clusters", any_of(cluster, self.CL == 1))
        need("local_is_one_block", any_of(not_local, self.UB == self.D))
        largest = 128 if self.fma else self.tiling.largest_local
        need("local_tested_range", any_of(not_local, largest >= self.D))
        need("grid_head", any_of(not_grid, self.D <= LARGEST_GRID_HEAD))
        tested = (self.WM == 8,) if self.fma else (self.WM == 1, self.WK >= 4, self.SPL == 1)
        need("grid_tested_range", any_of(not_grid, all_of(*tested)))
        head_blocks = self.D // self.UB
        need("grid_residency", any_of(not_grid, head_blocks <= gpu.sms))
        need("whole_blocks", on_chip(divides(self.UB, self.D)))
        need("at_most_8_warps", self.warps <= 8)
        need("no_empty_rows", self.rows <= 2 * self.batch - 1)
        fits = [all_of(self.all_warps <= w, self.registers <= r) for w, r in _register_limits(gpu)]
        need("registers", on_chip(any_of(*fits)))
        need("shared_memory", on_chip(self.shared <= gpu.smem_per_block))
        feeds = any_of(not_local, self.AUX == 1) if not self.fma else self.AUX == 0
        need("spare_warp", all_of(feeds, any_of(local, self.AUX == 0)))
        need("replicas", any_of(self.REP == 1, all_of(grid, self.REP * self.BT <= 8)))
        small_local = all_of(local, self.D <= 64) if not self.fma else local
        need("ring_depth", on_chip(self.PF >= 4, any_of(small_local, self.PF <= 8)))
        if self.fma:
            fma_model.constrain(self)
            return
        need("local_is_whole_in_d", any_of(not_local, self.WK == 1))
        need("whole_unit_groups", on_chip(divides(group, self.UB)))
        need("whole_row_warps", on_chip(divides(group * self.WM, self.UB)))
        need("whole_k_steps", on_chip(divides(32 * self.WK, self.D)))
        need("register_k_steps_exist", on_chip(self.KR <= self.KS))
        # Long chains of one m-tile gain by them. Elsewhere they lose: Elman, 1x128, local, 0.183 us in place of 0.162;
        # LSTM, 1x256, 0.414 in place of 0.377.
        need("four_sets", any_of(self.SPL <= 2, all_of(cluster, self.KS >= 16)))

    def _cost(self) -> None:
        """Hundredths of a cycle per step, by cause."""
        on_chip, is_alternating = self._is(LOCAL, CLUSTER, GRID), self._is(ALTERNATING)
        waves = ceil_div(self.groups, self.at_once)
        terms = fma_model.cost(self) if self.fma else self._cost_of_tiles()
        alternating = alternating_model.cost(self.spec, self.batch, self.gpu)
        self.terms = {name: on_chip * waves * term for name, term in terms.items()}
        self.terms |= {name: is_alternating * value for name, value in alternating.items()}
        # The sum of the terms, factored: the search evaluates it at every branch.
        self.objective = on_chip * waves * sum(terms.values(), start=wrap(0)) + is_alternating * sum(
            alternating.values()
        )

    def _cost_of_tiles(self) -> dict[str, Expr]:
        """The parts of one wave on tensor cores."""
        gpu, spec, tiling = self.gpu, self.spec, self.tiling
        cycle = 100
        issue = max(610, 100 * 8192 // gpu.tensor_macs)  # per m16n8k16 and sub-partition; 6.1 cycles on an H200
        units = tiling.group // 8
        activations = tiling.activations[spec.dtype == "float16"] * units
        by_mode = self._by_mode

        partitions = minimum(4, self.warps)
        tiles = ceil_div(self.warps, 4) * self.PM * tiling.tiles  # of a sub-partition, at most
        products = tiles * self.KS
        chains = maximum(1, tiles * self.SPL)
        # Products one after the other take 24 cycles each.
        issue_time = products * issue * by_mode(116, 100, 46) // 100
        tensor = maximum(issue_time, products * by_mode(100, 100, 46) * 24 // chains)
        drain = by_mode(0, 50, 0) * cycle  # until the last product is there
        # Lanes without a row take other groups (local), warps without a group the other column (grid).
        packed = Table(
            lambda mode, bt, ub, wm: packed_groups(ub // (tiling.group * wm), bt) if mode == LOCAL else 1,
            self.mode, self.BT, self.UB, self.WM,
        )  # fmt: skip
        columns = Table(
            lambda mode, bt, ub, wk: 1 if bt <= 4 or (mode == GRID and 2 * ub <= tiling.group * wk) else 2,
            self.mode, self.BT, self.UB, self.WK,
        )  # fmt: skip
        groups = maximum(self.tpo, ceil_div(self.WM * self.PM, partitions)) // packed
        load = ceil_div(self.groups, self.places)  # blocks that could share an SM
        hidden = 100 - FIRST_NEIGHBOUR_PERCENT
        sharers = minimum(load, self.resident)
        neighbours = maximum(0, 100 * (sharers - 1) - hidden) * by_mode(1, 1, 0)  # percent
        readers = maximum(1, sharers * by_mode(1, 0, 0))

        packets = self.rows * self.D // 8  # 16-byte packets of h that each block receives
        base = Table(lambda cl: round(CLUSTER_EXCHANGE_NS.get(cl, 0) * 198), self.CL)
        far = Table(_grid_exchange, self.D, self.UB, self.REP)
        # Each message of a cluster; in the grid mode each packet of a lane, and warps that share D share them.
        pollers = Table(lambda mode, wk: wk if mode == GRID else 1, self.mode, self.WK)
        arrival = packets * by_mode(0, 220 * 32, 30 * cycle) // (pollers * 32)
        m_tiles = (self.UB // tiling.group) * tiling.tiles
        # Adding up sets of sums; and four of them lengthen the step of a cluster with each warp.
        sets = (self.SPL - 1) * tiles * by_mode(3 * cycle, 0, 0)
        sets += Table(lambda spl, warps: (2 if spl == 2 else 25 * warps if spl == 4 else 0) * cycle,
                      self.SPL, self.WM) * by_mode(0, 1, 1)  # fmt: skip
        split = Table(  # a lane of a group of 16 adds up two units
            lambda mode, wk: (mode == CLUSTER and wk > 1) * (112 * (wk.bit_length() - 1) + 60 * (units - 1)) * cycle,
            self.mode, self.WK,
        )  # fmt: skip
        deep_ring = Table(  # more than 4 steps: at one row 0.12 us at D = 2048, at eight nothing
            lambda mode, pf, bt, d: (mode == GRID and pf > 4) * (11 * d if bt == 1 else 4 * cycle),
            self.mode, self.PF, self.BT, self.D,
        )  # fmt: skip
        return {
            "exchange of h between blocks": base + far * by_mode(0, 0, 1) + arrival,
            "tensor cores": tensor + drain + issue_time * neighbours // 100,
            "reading R from shared memory": self.weight_bytes * readers * by_mode(54, 64, 87) // 128,
            "reading h from shared memory": self.warps * self.KS * by_mode(cycle, 0, 0),
            "adding up the split of D": split,
            "special functions": groups * columns * (neighbours + 100) * (activations * 8),
            "latency of one step": by_mode(163, 15, 144) * cycle + tiling.latency * cycle,
            "feeding wx": by_mode(20, 0, 0) * cycle + deep_ring,
            "two rows per lane": (self.columns - 1) * (by_mode(70, 90, 0) + by_mode(0, 0, 36) * m_tiles) * cycle,
            "accumulator sets": sets,
            "further groups of a sub-partition": (groups - 1) * by_mode(0, 70, 0) * cycle,
        }


def _grid_exchange(head_dim: int, units: int, replicas: int) -> int:
    """Exchange of h through L2 in the kernels on tensor cores, hundredths of a cycle of an H200."""
    blocks = -(-head_dim // units)
    # Elman, 2048 units: four copies 1.52 us, whatever the batch tile, eight 1.30, two of a larger tile 1.24.
    slow = 480 if replicas == 4 and head_dim > 1024 else 0
    return round(100 * (1550 + slow + 58 * math.sqrt(max(16, blocks / math.sqrt(replicas)))))


def packed_groups(groups: int, batch_tile: int) -> int:
    """``packed_groups`` of plugins/kernels/cuda/config.h."""
    packed = 4 // batch_tile if batch_tile <= 4 else 1
    while groups % packed:
        packed //= 2
    return packed


def _register_limits(gpu: GPU) -> list[tuple[int, int]]:
    """(warps, registers per thread) that a block may have: 255 by the instruction set, then the file's four quarters.

    8 floor(16384 / (32 ceil(warps / 4)) / 8): warps are dealt to four sub-partitions with a quarter of the file each.
    """
    quarter = gpu.registers_per_sm // 4
    return [(w, min(255, quarter // (32 * -(-w // 4)) // 8 * 8)) for w in (8, 12)]
