"""Running a model in chunks of time: states carried from call to call, and proof that nothing else was needed.

What the graph says of it is asked in ``streaming.py``. That everything else in the model looks at one time step at a
time is seen here: the first two chunks are run once more in one piece and compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flashrnn_deploy import compare
from flashrnn_deploy.backends import Runner
from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import printable
from flashrnn_deploy.shapes import Axes


def run_chunks(
    runner: Runner,
    feeds: Mapping[str, Array],
    chunk: int,
    axes: Mapping[str, Axes],
    pairs: Mapping[str, str],
    lengths: Mapping[str, Any],
    span: tuple[int, int | None] = (0, None),
) -> dict[str, Array]:
    """Run ``feeds`` in chunks of ``chunk`` steps, the last one shorter, and join the outputs along time.

    Args:
        runner: the model.
        feeds: every input, whole, states included.
        chunk: steps per call, at least 1.
        axes: time axes of inputs and outputs (``shapes.axes_of``).
        pairs: state inputs and the outputs that continue them.
        lengths: names of inputs that hold sequence lengths: each chunk gets what is left of them.
        span: fewest and most steps of one call. What is compared with the whole keeps to it, or is left out.

    Raises:
        FlashRNNError: inputs of different lengths, an output that is not one step per step, or the first two chunks
            give another result in one piece.
    """
    timed = {n: axis for n in feeds if n not in pairs and (axis := axes[n].time) is not None}
    steps = {name: feeds[name].shape[axis] for name, axis in timed.items()}
    if len(set(steps.values())) != 1:
        raise FlashRNNError(f"--chunk needs inputs of one length along time, not {steps}")
    T = next(iter(steps.values()))
    if chunk >= T:
        return {name: np.asarray(array) for name, array in runner.infer(feeds).items()}
    short = chunk if span[1] is None else min(chunk, span[1] // 2)
    head = _cut(feeds, 0, min(T, 2 * short), timed, lengths)
    for probe in (head, _random(head, timed)):  # what a user feeds may be silent just here
        if short >= max(1, span[0]):
            _compare_head(runner.infer(probe), _joined(runner, probe, short, axes, pairs, timed, lengths), short)
    return _joined(runner, feeds, chunk, axes, pairs, timed, lengths)


def _random(feeds: Mapping[str, Array], timed: Mapping[str, int]) -> dict[str, Array]:
    """The feeds with every float sequence drawn anew."""
    rng = np.random.default_rng(0)
    drawn = {n: rng.standard_normal(feeds[n].shape).astype(feeds[n].dtype) for n in timed if compare.is_float(feeds[n])}
    return {**feeds, **drawn}


def _cut(
    feeds: Mapping[str, Array], start: int, stop: int, timed: Mapping[str, int], lengths: Mapping[str, Any]
) -> dict[str, Array]:
    """The feeds of time steps ``start`` to ``stop``."""
    result = dict(feeds)
    for name, axis in timed.items():
        result[name] = feeds[name][(slice(None),) * axis + (slice(start, stop),)]
    for name in lengths:
        if name in feeds:
            result[name] = np.clip(feeds[name] - start, 0, stop - start).astype(feeds[name].dtype)
    return result


def _joined(
    runner: Runner,
    feeds: Mapping[str, Array],
    chunk: int,
    axes: Mapping[str, Axes],
    pairs: Mapping[str, str],
    timed: Mapping[str, int],
    lengths: Mapping[str, Any],
) -> dict[str, Array]:
    T = next(feeds[name].shape[axis] for name, axis in timed.items())
    states = {name: feeds[name] for name in pairs}
    parts: dict[str, list[Array]] = {}
    for start, stop in _spans(T, chunk):
        outputs = runner.infer({**_cut(feeds, start, stop, timed, lengths), **states})
        states = {name: outputs[target] for name, target in pairs.items()}
        for name, array in outputs.items():
            axis = None if name in pairs.values() else axes[name].time
            if axis is not None and array.shape[axis] != stop - start:
                raise FlashRNNError(
                    f"--chunk: the output '{printable(name)}' has {array.shape[axis]} steps for a chunk of "
                    f"{stop - start}; run it whole"
                )
            if axis is None:
                parts[name] = []  # the last chunk's is the whole's
            parts.setdefault(name, []).append(array)
    return {n: np.concatenate(p, axis=axes[n].time) if len(p) > 1 else np.asarray(p[0]) for n, p in parts.items()}


def _spans(T: int, chunk: int) -> Iterator[tuple[int, int]]:
    for start in range(0, T, chunk):
        yield start, min(T, start + chunk)


def _compare_head(whole: Mapping[str, Array], joined: Mapping[str, Array], chunk: int) -> None:
    for name, expected in whole.items():
        dtype = compare.coarsest(*(str(a.dtype) for a in whole.values()))
        result = compare.against_peer(name, joined[name], np.asarray(expected), dtype, "whole")
        if not result.passed and result.note != compare.ONLY_NAN:  # NaN was fed, and shows nothing
            raise FlashRNNError(
                f"--chunk {chunk} is not the whole: over the first two chunks '{printable(name)}' differs by "
                f"{result.max_abs_error:.2g} (at most {result.tolerance:.2g}); something in the model looks across "
                "time steps, or a state pair is wrong"
            )
