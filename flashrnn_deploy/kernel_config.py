"""The configuration of one kernel, chosen for one layer on one GPU.

``solve`` states the problem (``kernel_model.Model``), hands it to the general solver and reads the answer;
``candidates`` gives the best few for timing on a device. docs/solver.md explains the constraints and the cost model.
Nothing here needs a GPU.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from flashrnn_deploy import alternating_model
from flashrnn_deploy.alternating_model import Alternating
from flashrnn_deploy.expressions import any_of, bounds
from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.kernel_model import Model
from flashrnn_deploy.modes import MODES
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.solver import Result, minimize


@dataclass(frozen=True)
class KernelConfig:
    """What code generation needs to know about one kernel."""

    mode: str  # one of MODES
    padded_head_dim: int  # D: head_dim with zero rows and columns added to R
    cluster_size: int  # CL: blocks per cluster; 1 outside the cluster mode
    units_per_block: int  # UB
    batch_tile: int  # BT: batch rows per tile
    tiles_per_block: int  # NB
    row_warps: int  # WM: warps that share the rows of R in a block
    k_warps: int  # WK: warps that share D, the inner dimension
    register_k_steps: int  # KR: 16-wide steps of D whose part of R stays in registers; the rest is in shared memory
    accumulator_sets: int  # SPL: independent sums per accumulator
    ring_depth: int  # PF: steps of wx in flight
    replicas: int  # REP: copies of each packet of h in L2, grid mode
    spare_warp: int  # AUX: 1 adds a warp that only feeds wx

    def values(self) -> dict[str, int]:
        """The variables of ``kernel_model.Model``."""
        return asdict(self) | {"mode": MODES.index(self.mode)}


@dataclass(frozen=True)
class Solution:
    """A configuration and what the model says of it.

    Args:
        config: what code generation needs.
        gpu: name of the device it was chosen for.
        predicted_step_us: microseconds per time step, launch not included.
        estimate: False only for what the model was measured on: an H200, on-chip modes.
        breakdown_us: the parts of ``predicted_step_us`` by cause; parts of 0 are left out.
        sizes: blocks, those resident at once, threads, registers, and bytes per block; all 0 in the alternating mode.
        candidates: assignments in the product of the domains.
        removed: how many of them each named constraint removed.
        cut: how many could not beat the best known configuration and were not looked at.
        alternating: in that mode, the kernel that the library takes and what it keeps on chip.
    """

    config: KernelConfig
    gpu: str
    predicted_step_us: float
    estimate: bool
    breakdown_us: dict[str, float]
    sizes: dict[str, int]
    candidates: int = 0
    removed: dict[str, int] | None = None
    cut: int = 0
    alternating: Alternating | None = None

    @property
    def limited_by(self) -> str:
        """The largest part of the step."""
        return max(self.breakdown_us, key=lambda cause: self.breakdown_us[cause])

    @property
    def on_chip_bytes(self) -> int:
        """Bytes of shared memory and of R in registers of the blocks that the model takes to be resident at once.

        Blocks beyond these run after them, in the same room. In the alternating mode R alone counts.
        """
        if self.alternating:
            return self.alternating.on_chip_bytes
        per_block = self.sizes["shared_memory_bytes"] + self.sizes["weight_bytes_in_registers"]
        return self.sizes["resident_blocks"] * per_block

    def explain(self) -> list[tuple[str, int]]:
        """(constraint, candidates it removed), most first; constraints that removed none are listed too."""
        return sorted((self.removed or {}).items(), key=lambda item: (-item[1], item[0]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. ``kernel`` is that of the alternating mode, None in others."""
        known = {k: v for k, v in asdict(self).items() if k not in ("removed", "alternating")}
        known |= {"limited_by": self.limited_by, "on_chip_bytes": self.on_chip_bytes}
        known["kernel"] = self.alternating.kernel if self.alternating else None
        return known | {"explain": [{"constraint": name, "removed": count} for name, count in self.explain()]}


def solve(spec: RNNSpec, batch: int, gpu: GPU) -> Solution:
    """The configuration with the smallest predicted step time. There always is one: the alternating mode fits anything.

    Raises:
        FlashRNNError: ``batch`` is less than 1.
    """
    model = Model(spec, batch, gpu)
    return _solution(model, _minimize(model))


def candidates(spec: RNNSpec, batch: int, gpu: GPU, count: int) -> list[Solution]:
    """The best ``count`` configurations, best first, fewer where there are fewer.

    They differ in mode, blocks, tiles or warps, not only in a ring depth: those are worth timing.
    """
    model = Model(spec, batch, gpu)
    telling = (model.mode, model.CL, model.UB, model.BT, model.WM, model.WK, model.AUX)
    found: list[Solution] = []
    while len(found) < count and (result := minimize(model.problem, model.objective)):
        found.append(_solution(model, result))
        model.problem.require("not_listed_before", any_of(*(v != result.values[v.name] for v in telling)))
    return found


def alternating(spec: RNNSpec, batch: int, gpu: GPU) -> Solution:
    """The alternating mode, which every build holds, whether or not it is the best."""
    model = Model(spec, batch, gpu)
    model.problem.require("not_alternating", model.mode == MODES.index("alternating"))
    return _solution(model, _minimize(model))


def predict(spec: RNNSpec, batch: int, gpu: GPU, config: KernelConfig) -> Solution:
    """What the model says of a given configuration, whether or not its constraints hold."""
    return _describe(Model(spec, batch, gpu), config)


def check(spec: RNNSpec, batch: int, gpu: GPU, config: KernelConfig) -> dict[str, bool]:
    """Whether each named constraint holds, and ``known_values``: whether each field has a value the problem offers.

    Where one has not, that is all: constraints have no meaning there, with a divisor of 0 for example.
    """
    problem, values = Model(spec, batch, gpu).problem, config.values()
    known = all(values[v.name] in domain for v, domain in zip(problem.variables, problem.domains, strict=True))
    return {"known_values": known} | (problem.check(values) if known else {})


def constraints(spec: RNNSpec, batch: int, gpu: GPU) -> list[str]:
    """Names of the constraints that hold for this layer on this device."""
    return list(dict.fromkeys(name for name, _ in Model(spec, batch, gpu).problem.constraints))


def _minimize(model: Model) -> Result:
    result = minimize(model.problem, model.objective)
    if result is None:  # a bug: the alternating mode satisfies every constraint
        raise AssertionError(f"no configuration for {model.spec} on {model.gpu.name}")
    return result


def _solution(model: Model, result: Result) -> Solution:
    config = KernelConfig(**(result.values | {"mode": MODES[result.values["mode"]]}))  # type: ignore[arg-type]
    return replace(_describe(model, config), candidates=result.candidates, removed=result.removed, cut=result.cut)


def _describe(model: Model, config: KernelConfig) -> Solution:
    gpu, parts = model.gpu, model.terms | model.sizes
    pairs = bounds(parts.values(), model.problem.point(config.values()))
    values = {name: low for name, (low, _) in zip(parts, pairs, strict=True)}
    cycles = {cause: values[cause] / 100 for cause in model.terms}
    breakdown = {cause: round(count / gpu.clock_mhz, 4) for cause, count in cycles.items() if count}
    is_alternating = config.mode == "alternating"
    return Solution(
        config=config,
        gpu=gpu.name,
        predicted_step_us=round(sum(cycles.values()) / gpu.clock_mhz, 4),
        estimate=not gpu.measured or is_alternating,
        breakdown_us=breakdown,
        sizes={name: values[name] for name in model.sizes},
        alternating=alternating_model.describe(model.spec, model.batch, gpu) if is_alternating else None,
    )
