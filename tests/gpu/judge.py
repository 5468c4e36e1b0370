"""Cases on the device and their judge: the op in PyTorch, float64, on the same GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashrnn_deploy.compare import EPS, FLOOR_EPS, OWN_ERROR_FACTOR
from flashrnn_deploy.op import FULL_LENGTH, RNNSpec
from flashrnn_deploy.recurrence import recurrence

LENGTHS = ("full", "per row", "ragged")
STATES = ("zero", "random", "large")
MAX_WX_BYTES = 2 << 30


@dataclass(frozen=True)
class Case:
    spec: RNNSpec
    T: int
    B: int
    lengths: str = "full"  # one of LENGTHS
    states: str = "random"  # one of STATES
    seed: int = 0

    def __str__(self) -> str:
        s = self.spec
        extra = (
            f"clip {s.clip:g} " * bool(s.clip)
            + "relu " * s.relu
            + f"floor {s.normalizer_floor:g} " * (s.cell == "slstm")
        )
        return (
            f"{s.cell} {s.dtype} {s.num_heads}x{s.head_dim} B{self.B} T{self.T} N{s.num_directions} "
            f"reverse {s.reverse} layout {s.layout} lengths {self.lengths} states {self.states} {extra}"
        ).strip()


def tensors(case: Case, device: str = "cuda") -> dict[str, torch.Tensor]:
    """The five inputs: ``r`` scaled by 1/sqrt(D), under ReLU half of that and at most 0.9/sqrt(D): its states grow
    without bound otherwise (one unit with r = 1.2). Biases are never zero, the normalizer of the sLSTM is positive.
    """
    spec, T, B = case.spec, case.T, case.B
    generator = torch.Generator(device).manual_seed(case.seed)
    dtype = getattr(torch, spec.dtype)

    def normal(name: str, scale: float) -> torch.Tensor:
        return torch.randn(spec.shapes(T, B)[name], generator=generator, device=device, dtype=torch.float32) * scale

    states = normal("initial_states", {"zero": 0.0, "random": 0.5, "large": 3.0}[case.states])
    if spec.cell == "slstm" and case.states != "zero":
        states[2] = states[2].abs() + (1.0 if case.states == "random" else 0.01)
    lens = torch.full((B,), T, dtype=torch.int32)
    if case.lengths == "full":
        lens = torch.tensor([FULL_LENGTH], dtype=torch.int32)
    elif case.lengths == "ragged":
        lens = torch.randint(-1, T + 2, (B,), generator=torch.Generator().manual_seed(case.seed), dtype=torch.int32)
        lens[0] = max(T - 1, 0)
    wx, unit = normal("wx", 1.0), 1 / math.sqrt(spec.head_dim)
    r = normal("r", unit / 2).clamp(-0.9 * unit, 0.9 * unit) if spec.relu else normal("r", unit)
    return {
        "wx": wx.to(dtype),
        "r": r.to(dtype),
        "b": normal("b", 0.5),
        "sequence_lens": lens.to(device),
        "initial_states": states,
    }


@dataclass(frozen=True)
class Verdict:
    """Errors relative to what the tolerance policy allows: at most 1 where the result stands."""

    y: float
    states: float

    @property
    def passed(self) -> bool:
        return self.y <= 1 and self.states <= 1  # False for NaN

    @property
    def worst(self) -> float:
        """The larger one, NaN where one is NaN."""
        return math.nan if math.isnan(self.states) else max(self.y, self.states)


def flipped(spec: RNNSpec, name: str, t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same network with the units of each head in reverse order."""
    G, N, H, D = spec.definition.num_gates, spec.num_directions, spec.num_heads, spec.head_dim
    if name in ("r", "b"):
        return t.flip(-1, -2) if name == "r" else t.flip(-1)
    parts = {"wx": (N, H, D, G), "y": (N, H, D), "initial_states": (H, D)}[name]
    kept = t.shape[: 3 if name == "initial_states" else 2]
    axis = -2 if name == "wx" else -1
    return t.reshape(*kept, *parts).flip(axis).reshape(t.shape)


@torch.no_grad()
def references(case: Case, given: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(y, final_states) in float64, and by PyTorch in the dtype of the case."""
    lens = None if case.lengths == "full" else given["sequence_lens"]
    order = ("wx", "r", "b")
    exact = recurrence(case.spec, *(given[n].double() for n in order), lens, given["initial_states"].double())
    own = recurrence(case.spec, *(given[n] for n in order), lens, given["initial_states"])
    if case.spec.dtype == "float32":  # a second sample: over few numbers an error can be small by luck
        turned = {n: flipped(case.spec, n, given[n]) for n in (*order, "initial_states")}
        y, final = recurrence(case.spec, *(turned[n] for n in order), lens, turned["initial_states"])
        other = flipped(case.spec, "y", y), flipped(case.spec, "initial_states", final)
        own = [torch.where((a - e).abs() > (b - e).abs(), a, b) for a, b, e in zip(own, other, exact, strict=True)]
    return list(exact), list(own)


def judge(
    case: Case, exact: list[torch.Tensor], own: list[torch.Tensor], y: torch.Tensor, final: torch.Tensor
) -> Verdict:
    """compare.py's policy, for y and for each state apart."""

    def share(ours: torch.Tensor, judge: torch.Tensor, own: torch.Tensor) -> float:
        if not ours.numel():
            return 0.0
        scale = max(1.0, judge.abs().max().item())
        own_error = (own.double() - judge).abs().max().item()
        allowed = max(OWN_ERROR_FACTOR * own_error, FLOOR_EPS * EPS[case.spec.dtype] * scale)
        return (ours.double() - judge).abs().max().item() / allowed

    each = [share(*three) for three in zip(final, exact[1], own[1], strict=True)]
    return Verdict(share(y, exact[0], own[0]), math.nan if any(math.isnan(e) for e in each) else max(each))
