"""Whether a model is well formed and computes what it should: the `verify` command."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from flashrnn_deploy import compare, op
from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.backends.reference import ReferenceRunner
from flashrnn_deploy.cells import Array
from flashrnn_deploy.compare import Comparison
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import load_model, printable
from flashrnn_deploy.graph import free_inputs
from flashrnn_deploy.sampling import Case, samples
from flashrnn_deploy.shapes import Tensors, axes_of, dtype_name, flashrnn_nodes, tensors_of, value_tensor
from flashrnn_deploy.streaming import state_pairs

Feeds = Mapping[str, Array]
Evaluate = Callable[[Feeds], Mapping[str, Array]]
Run = tuple[Feeds, Mapping[str, Array]]
Comparisons = list[list[Comparison]]
Judge = Callable[[Sequence[Run]], Comparisons]
"""Takes the inputs and the engine's outputs of all samples; gives one comparison per sample and output it can judge."""


@dataclass(frozen=True)
class Report:
    """What `verify` found: per output the comparison nearest to failing, and the (T, B) where it was.

    T or B is None where the model has none.
    """

    model: str
    against: str
    cases: list[Case]
    outputs: list[tuple[Comparison, Case]]
    not_compared: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Comparison]:
        return [c for c, _ in self.outputs if not c.passed]

    def to_json(self) -> dict[str, Any]:
        """A JSON object; an infinite error (NaN, infinity or shape disagree) is null."""
        outputs = [
            {
                "name": c.name,
                "max_abs_error": c.max_abs_error if math.isfinite(c.max_abs_error) else None,
                "tolerance": c.tolerance,
                "passed": c.passed,
                "judge": c.judge,
                "note": c.note,
                "case": {"T": T, "B": B},
            }
            for c, (T, B) in self.outputs
        ]
        return {
            "model": self.model,
            "against": self.against,
            "passed": not self.failures,
            "cases": [{"T": T, "B": B} for T, B in self.cases],
            "outputs": outputs,
            "not_compared": self.not_compared,
            "notes": self.notes,
        }


def check_structure(model: onnx.ModelProto, path: Path | None = None) -> None:
    """Run the full ONNX checker, and read every FlashRNN node and the state metadata strictly.

    Raises:
        FlashRNNError: one line naming what is wrong.
    """
    op.register_schemas()
    try:
        onnx.checker.check_model(model if path is None else str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise FlashRNNError(f"the ONNX checker refuses the model: {text[:400]}") from error
    tensors = tensors_of(model)
    flashrnn_nodes(model, tensors)
    axes_of(model, tensors)
    state_pairs(model)


def model_dtype(model: onnx.ModelProto, tensors: Tensors) -> str:
    """The coarsest float dtype of the FlashRNN nodes, the inputs and the outputs."""
    names = [spec.dtype for _, spec in flashrnn_nodes(model, tensors)]
    names += [dtype_name(value_tensor(v).dtype) for v in (*free_inputs(model.graph), *model.graph.output)]
    return compare.coarsest(*names)


def verify(
    path: Path,
    against: str = "reference",
    plugins: Sequence[Path] = (),
    seed: int = 0,
    weights: Path | None = None,
) -> Report:
    """Run a model in ONNX Runtime on random inputs and compare each output with a judge.

    Args:
        path: the model.
        against: "reference" (onnx.reference in float64 with the NumPy op), another ONNX file (run in ONNX Runtime) or
            ``FILE.py:FACTORY`` (the PyTorch module in float64).
        plugins: FlashRNN plugin libraries; without one the function body runs.
        seed: of the random inputs.
        weights: a state dict to load into the module of ``FILE.py:FACTORY``.

    Raises:
        FlashRNNError: the model is malformed, an engine refuses it, or the judge cannot do a node, which is named.
    """
    model = load_model(path)
    check_structure(model, path)
    tensors = tensors_of(model)
    axes, dtype = axes_of(model, tensors), model_dtype(model, tensors)
    runner = make_runner("onnxruntime", model, plugins, path=path)
    judge = _judge(against, model, dtype, plugins, weights)
    drawn = samples(model, tensors, axes, seed)
    cases = [case for case, _ in drawn]
    runs: list[Run] = [(feeds, runner.infer(feeds)) for _, feeds in drawn]
    found: dict[str, list[tuple[Comparison, Case]]] = {}
    for case, comparisons in zip(cases, judge(runs), strict=True):
        for comparison in comparisons:
            found.setdefault(comparison.name, []).append((comparison, case))
    worst = []
    for entries in found.values():
        chosen = compare.worst([comparison for comparison, _ in entries])
        worst.append(next(entry for entry in entries if entry[0] is chosen))
    if not worst:
        raise FlashRNNError(f"nothing to compare: {path} and {against} have no output in common")
    skipped = [v.name for v in model.graph.output if v.name not in found]
    runner.close()
    report = Report(str(path), against, cases, worst, skipped, list(runner.notes))
    if report.failures and ".py:" in against and weights is None:
        report.notes.extend(_notes_on_factory(against))
    return report


def _judge(against: str, model: onnx.ModelProto, dtype: str, plugins: Sequence[Path], weights: Path | None) -> Judge:
    if weights is not None and ".py:" not in against:
        raise FlashRNNError("--weights belongs to --against FILE.py:FACTORY")
    if against == "reference":
        exact, own = _numpy(model)
        return lambda runs: _against_float64(runs, exact, [(exact, own)], dtype, "onnx.reference in float64")
    if ".py:" in against:
        return _factory_judge(against, model, dtype, weights)
    return _peer_judge(Path(against), model, dtype, plugins)


def _numpy(model: onnx.ModelProto) -> tuple[Evaluate, list[Evaluate]]:
    """The model in NumPy: exact, and twice in its own dtype, matrix products by BLAS and summed term by term."""
    own = [ReferenceRunner(model, np.float32, declared_dtypes=False, in_order=order) for order in (False, True)]
    return ReferenceRunner(model, declared_dtypes=False).infer, [runner.infer for runner in own]


def _factory_judge(source: str, model: onnx.ModelProto, dtype: str, weights: Path | None) -> Judge:
    from flashrnn_deploy.exporters import factory_judge

    exact, own = factory_judge(source, model, dtype, weights)
    measured: list[tuple[Evaluate, list[Evaluate]]] = [(exact, [own])]
    with contextlib.suppress(FlashRNNError):  # one more measure of rounding, where onnx.reference knows every node
        measured.append(_numpy(model))
    return lambda runs: _against_float64(runs, exact, measured, dtype, "PyTorch in float64")


def _notes_on_factory(source: str) -> list[str]:
    """What may be the cause where the module of a factory disagrees with its file."""
    from flashrnn_deploy.exporters.factory import makes_other_weights

    with contextlib.suppress(FlashRNNError):  # it was called before: this is about a second call only
        if makes_other_weights(source):
            return ["the factory makes other weights each time: seed it, or pass --weights"]
    return []


def _against_float64(
    runs: Sequence[Run], judge: Evaluate, measured: list[tuple[Evaluate, list[Evaluate]]], dtype: str, name: str
) -> Comparisons:
    """Compare with ``judge``; ``measured`` holds exact evaluations, each with those whose rounding it measures."""
    exact = [judge(feeds) for feeds, _ in runs]
    allowed: dict[str, float] = {}
    for evaluate_exactly, others in measured:
        # a further measure, beside the judge's own, may not know every node of the model
        with contextlib.nullcontext() if evaluate_exactly is judge else contextlib.suppress(FlashRNNError):
            for (feeds, _), judged in zip(runs, exact, strict=True):
                expected = judged if evaluate_exactly is judge else evaluate_exactly(feeds)
                for evaluate in others:
                    for output, array in evaluate(feeds).items():
                        error = compare.own_error(array, expected[output])
                        allowed[output] = max(error, allowed.get(output, 0.0))
    return [
        [
            compare.against_float64(output, array, expected[output], allowed[output], dtype, name)
            for output, array in outputs.items()
            if output in expected
        ]
        for (_, outputs), expected in zip(runs, exact, strict=True)
    ]


def _peer_judge(path: Path, model: onnx.ModelProto, dtype: str, plugins: Sequence[Path]) -> Judge:
    """Another file in ONNX Runtime; state inputs that it does not have are zero for both, as they are in the other."""
    other = load_model(path)
    theirs, ours = [v.name for v in free_inputs(other.graph)], [v.name for v in free_inputs(model.graph)]
    states = state_pairs(model)
    if odd := [printable(n) for n in (*(set(theirs) - set(ours)), *(set(ours) - set(theirs) - set(states)))]:
        both = " and ".join(", ".join(map(printable, names)) or "(none)" for names in (ours, theirs))
        raise FlashRNNError(f"the two files differ in the input(s) {', '.join(odd)}: {both}")
    runner = make_runner("onnxruntime", other, plugins, path=path)
    zero = [name for name in ours if name not in theirs]
    ourselves = make_runner("onnxruntime", model, plugins) if zero else runner
    coarse = compare.coarsest(dtype, model_dtype(other, tensors_of(other)))

    def judge(runs: Sequence[Run]) -> Comparisons:
        result = []
        for feeds, outputs in runs:
            if zero:
                feeds = {n: np.zeros_like(a) if n in zero else a for n, a in feeds.items()}
                outputs = ourselves.infer(feeds)
            expected = runner.infer({name: feeds[name] for name in theirs})
            names = [name for name in outputs if name in expected]
            result.append([compare.against_peer(n, outputs[n], expected[n], coarse, path.name) for n in names])
        return result

    return judge
