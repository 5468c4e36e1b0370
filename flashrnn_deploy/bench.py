"""How fast a model is on the engines at hand, side by side: the `bench` command.

Outputs come before times: every engine must agree with the function body on the CPU, or nothing is timed. Calls of the
engines alternate, so that whatever else the machine does hits all of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from flashrnn_deploy import compare, feeds, sampling
from flashrnn_deploy.backends import Bound
from flashrnn_deploy.cells import Array
from flashrnn_deploy.compare import Comparison
from flashrnn_deploy.coverage import cuda_notes
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import load_model, printable
from flashrnn_deploy.graph import free_inputs
from flashrnn_deploy.machine import describe_machine
from flashrnn_deploy.shapes import Axes, Tensors, axes_of, flashrnn_nodes, tensors_of, value_tensor
from flashrnn_deploy.streaming import length_inputs, state_pairs
from flashrnn_deploy.unconverted import why_no_op
from flashrnn_deploy.verify import model_dtype

LIBRARY, BODY, STOCK, EAGER = "the plugin library", "the function body", "ONNX Runtime's own nodes", "PyTorch, eager"
JUDGE = "the function body on the CPU"
STEPS, BATCH, REPEAT = 100, 1, 31
WARM_UP = 3
PAUSE_S = 0.02
"""Before each call on a CPU: the threads of the engine before spin for milliseconds, on the cores of this one."""


@dataclass(frozen=True)
class Timing:
    """One engine: microseconds of a call and, where the model has a time axis, of a step; the error of its outputs.

    ``ratio`` is the median over that of the first engine: above 1, the first one is faster.
    """

    engine: str
    median_us: float
    p90_us: float
    median_us_per_step: float | None
    p90_us_per_step: float | None
    ratio: float
    max_abs_error: float
    tolerance: float


@dataclass(frozen=True)
class Report:
    """What was measured, where, and how."""

    model: str
    dtype: str
    inputs: dict[str, list[int]]
    steps: int | None
    repeat: int
    threads: int
    machine: dict[str, str]
    engines: list[Timing]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def bench(
    path: Path,
    *,
    original: Path | None = None,
    factory: str | None = None,
    weights: Path | None = None,
    plugins: Sequence[Path] = (),
    device: str = "cpu",
    inputs: Sequence[str] = (),
    steps: int = STEPS,
    batch: int = BATCH,
    sizes: Sequence[str] = (),
    threads: int = 0,
    repeat: int = REPEAT,
) -> Report:
    """Time one call of a model on each engine, inputs and outputs lying on the device.

    Args:
        path: a model with FlashRNN ops. It runs in ONNX Runtime with the plugin libraries, where there are any, and on
            its function body.
        original: the file that it was converted from, for ONNX Runtime's own LSTM, GRU and RNN.
        factory: ``FILE.py:FACTORY`` that it was exported from, for eager PyTorch.
        weights: a state dict to load into the module of ``factory``.
        plugins: FlashRNN plugin libraries.
        device: "cpu" or "cuda".
        inputs: ``NAME=FILE.npy`` each; the others are random, lengths full, and states zero that an engine lacks.
        steps: size of a dynamic time axis.
        batch: size of a dynamic batch axis.
        sizes: ``DIM=SIZE`` each, of the named dimensions that `info` prints.
        threads: CPU threads of each engine; 0 leaves the choice to the engine.
        repeat: timed calls of each engine.

    Raises:
        FlashRNNError: a file, an option or the device is not fit, or an engine's outputs are wrong: nothing is timed.
    """
    if weights is not None and factory is None:
        raise FlashRNNError("--weights belongs to --factory FILE.py:FACTORY")
    model = load_model(path)
    tensors = tensors_of(model)
    if not flashrnn_nodes(model, tensors):
        raise FlashRNNError(why_no_op(path, model))
    axes, dtype = axes_of(model, tensors), model_dtype(model, tensors)
    arrays = make_feeds(model, tensors, axes, inputs, steps, batch, sizes)
    notes = cuda_notes(model, plugins) if device == "cuda" and plugins else []
    with ExitStack() as stack:
        loaded = {}
        for name, runner in _engines(path, model, dtype, original, factory, weights, plugins, device, threads):
            stack.callback(runner.close)
            loaded[name] = runner
        _zero_states(arrays, model, [runner.inputs for runner in loaded.values()])
        bound = {name: runner.bind(arrays) for name, runner in loaded.items()}
        checks = check(model, bound, arrays, dtype)
        times = interleave(bound, repeat, PAUSE_S if device == "cpu" else 0.0)
    found = {a.shape[axis] for n, a in arrays.items() if (axis := axes[n].time) is not None}
    common = next(iter(found)) if len(found) == 1 else None
    engines = summary(times, checks, common)
    notes += list(dict.fromkeys(text for runner in loaded.values() for text in getattr(runner, "notes", ())))
    if not plugins:
        notes.append("no plugin library was measured: build one with `flashrnn-deploy build-plugins`, pass --plugins")
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    return Report(str(path), dtype, shapes, common, repeat, threads, describe_machine(device), engines, notes)


def make_feeds(
    model: onnx.ModelProto,
    tensors: Tensors,
    axes: Mapping[str, Axes],
    inputs: Sequence[str] = (),
    steps: int = STEPS,
    batch: int = BATCH,
    sizes: Sequence[str] = (),
) -> dict[str, Array]:
    """Arrays for all inputs: those given as ``NAME=FILE.npy``, and random ones that fit them.

    Raises:
        FlashRNNError: as ``feeds.check_feeds``, or one of ``sizes`` is not ``DIM=SIZE`` of a dimension of the model.
    """
    dims = read_sizes(sizes, model)
    given = feeds.read_feeds(inputs)
    for value in free_inputs(model.graph):
        if value.name in given:
            for axis, (dim, size) in enumerate(
                zip(value_tensor(value).shape or (), given[value.name].shape, strict=False)
            ):
                steps = size if axis == axes[value.name].time else steps
                batch = size if axis == axes[value.name].batch else batch
                if isinstance(dim, str):
                    dims.setdefault(dim, size)
    drawn = sampling.sample(model, tensors, axes, steps, batch, dims)
    for name in length_inputs(model):
        drawn[name] = np.full_like(drawn[name], drawn[name].max())
    # check_feeds takes what a user saves: float32 for bfloat16
    travelling = {n: a.astype(np.float32) if str(a.dtype) == "bfloat16" else a for n, a in drawn.items()}
    return feeds.check_feeds(model, tensors, axes, travelling | given, state_pairs(model))


def read_sizes(options: Sequence[str], model: onnx.ModelProto) -> dict[str, int]:
    """Sizes of dimensions from ``DIM=SIZE`` options.

    Raises:
        FlashRNNError: an option is something else, or no input has such a dimension.
    """
    shapes = [value_tensor(value).shape or () for value in free_inputs(model.graph)]
    named = list(dict.fromkeys(dim for shape in shapes for dim in shape if isinstance(dim, str)))
    result = {}
    for option in options:
        dim, _, size = option.rpartition("=")
        if not re.fullmatch("[0-9]{1,18}", size) or int(size) < 1:
            raise FlashRNNError(f"--size {option}: write it as DIM=SIZE, with a size of at least 1")
        if dim not in named:
            listed = ", ".join(map(printable, named)) or "(none)"
            raise FlashRNNError(f"--size {option}: no input has the dimension '{dim}'; the inputs have {listed}")
        result[dim] = int(size)
    return result


def _engines(
    path: Path,
    model: onnx.ModelProto,
    dtype: str,
    original: Path | None,
    factory: str | None,
    weights: Path | None,
    plugins: Sequence[Path],
    device: str,
    threads: int,
) -> Iterator[tuple[str, Any]]:
    """Name and runner of each engine, loaded one after the other; each has ``bind``, ``inputs`` and ``close``."""
    from flashrnn_deploy.backends.ort import OrtRunner

    if plugins:
        yield LIBRARY, OrtRunner(model, plugins, device, path, threads)
    yield BODY, OrtRunner(model, (), device, path, threads)
    if original is not None:
        other = load_model(original)
        runner = OrtRunner(other, (), device, original, threads)
        ours = [value.name for value in free_inputs(model.graph)]
        if odd := [printable(name) for name in runner.inputs if name not in ours]:
            runner.close()
            has = ", ".join(map(printable, ours)) or "(none)"
            raise FlashRNNError(f"{original} has the input(s) {', '.join(odd)}, which {path} does not have: {has}")
        yield STOCK, runner
    if factory is not None:
        from flashrnn_deploy.exporters import EagerRunner

        yield EAGER, EagerRunner(factory, model, dtype, weights, device, threads)


def _zero_states(arrays: dict[str, Array], model: onnx.ModelProto, taken: Sequence[Sequence[str]]) -> None:
    """Where an engine's model starts from default states, all start from zero."""
    for name in state_pairs(model):
        if any(name not in names for names in taken):
            arrays[name] = np.zeros_like(arrays[name])


def check(
    model: onnx.ModelProto, bound: Mapping[str, Bound], arrays: Mapping[str, Array], dtype: str
) -> dict[str, Comparison]:
    """The worst output of each engine beside the function body on the CPU.

    Raises:
        FlashRNNError: an output differs by more than two implementations of one dtype may.
    """
    from flashrnn_deploy.backends.ort import OrtRunner

    judge = OrtRunner(model)
    expected = judge.infer(arrays)
    judge.close()
    result = {}
    for name, one in bound.items():
        one.run()
        outputs = {n: a for n, a in one.outputs().items() if n in expected}
        worst = compare.worst([compare.against_peer(n, a, expected[n], dtype, JUDGE) for n, a in outputs.items()])
        if not worst.passed:
            raise FlashRNNError(
                f"nothing was timed: on {name}, the output '{printable(worst.name)}' differs from {JUDGE} by "
                f"{worst.max_abs_error:.3g}, more than {worst.tolerance:.3g}{', ' * bool(worst.note)}{worst.note}"
            )
        result[name] = worst
    return result


def interleave(bound: Mapping[str, Bound], repeat: int, pause_s: float) -> dict[str, list[float]]:
    """Microseconds of ``repeat`` calls of each engine, one engine after the other in every round.

    Each timed call follows an untimed one of the same engine, which finds its caches cold and its threads asleep.
    """
    times: dict[str, list[float]] = {name: [] for name in bound}
    for one in bound.values():
        for _ in range(WARM_UP):
            one.run()
    for _ in range(repeat):
        for name, one in bound.items():
            time.sleep(pause_s)
            one.run()
            start = time.perf_counter()
            one.run()
            times[name].append((time.perf_counter() - start) * 1e6)
    return times


def summary(times: Mapping[str, list[float]], checks: Mapping[str, Comparison], steps: int | None) -> list[Timing]:
    """Medians, 90th percentiles and ratios to the first engine."""
    first = float(np.median(next(iter(times.values()))))
    result = []
    for name, values in times.items():
        median, p90 = float(np.median(values)), float(np.percentile(values, 90))
        a_step = (median / steps, p90 / steps) if steps else (None, None)
        error, tolerance = checks[name].max_abs_error, checks[name].tolerance
        result.append(Timing(name, median, p90, a_step[0], a_step[1], median / first, error, tolerance))
    return result


def beside(ratio: float) -> str:
    """``Timing.ratio`` in words: how the first engine compares with this one. A loss reads as a loss."""
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"
