"""When two results agree: the project's one home of tolerances.

Against a float64 judge an implementation may err twice as much as an independent one in the same dtype, and never
needs to be better than 4 eps of that dtype (relative to the largest reference value, at least 1). Without that floor a
correct float32 implementation fails one case in six. Two implementations of the same dtype, neither of them exact,
are compared with fixed bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number of a dtype."""

PAIR_TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest error between two implementations of one dtype, relative to max(1, largest reference value)."""

OWN_ERROR_FACTOR = 2.0
FLOOR_EPS = 4.0

ONLY_NAN = "nothing but NaN"
"""The note of two results of one shape that are NaN everywhere: they do not show that they agree."""


@dataclass(frozen=True)
class Comparison:
    """One output against its judge; ``max_abs_error`` is infinite where NaN, infinity or the shape disagree."""

    name: str
    max_abs_error: float
    tolerance: float
    judge: str
    note: str = ""

    @property
    def passed(self) -> bool:
        return math.isfinite(self.max_abs_error) and self.max_abs_error <= self.tolerance


def max_abs_error(actual: Array, expected: Array) -> float:
    """Largest absolute difference, in float64; infinite where shapes, NaN positions or infinities disagree.

    Arrays of nothing but NaN show nothing, and do not agree either.
    """
    if actual.shape != expected.shape:
        return math.inf
    if actual.dtype.kind in "OSU":
        return 0.0 if np.array_equal(actual, expected) else math.inf
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(e)
    same = (np.isnan(a) & np.isnan(e)) | (a == e)
    if not np.all(finite | same) or (a.size and np.isnan(a).all()):
        return math.inf
    return float(np.max(np.abs(a[finite] - e[finite]), initial=0.0))


def largest(values: Array) -> float:
    """Largest finite absolute value, and at least 1."""
    a = np.abs(values.astype(np.float64))
    return float(np.max(a[np.isfinite(a)], initial=1.0))


def coarsest(*dtypes: str) -> str:
    """The float dtype with the largest eps among ``dtypes`` (others are ignored); float32 where there is none."""
    return max((d for d in dtypes if d in EPS), key=EPS.__getitem__, default="float32")


def own_error(own: Array, exact: Array) -> float:
    """Error of an independent implementation, relative to max(1, largest exact value).

    0 where ``own`` is not finite though ``exact`` is, or has another shape: that allows nothing.
    """
    error = max_abs_error(own, exact) / largest(exact)
    return error if math.isfinite(error) else 0.0


def against_float64(name: str, actual: Array, exact: Array, own: float, dtype: str, judge: str) -> Comparison:
    """Compare with a float64 result; ``own`` is the ``own_error`` of an independent implementation in ``dtype``.

    Where several samples are compared, ``own`` is the largest over all of them: over few numbers an error can be small
    by luck. Integers and booleans must be equal.
    """
    scale = largest(exact)
    tolerance = max(OWN_ERROR_FACTOR * own, FLOOR_EPS * EPS[dtype]) * scale if is_float(actual) else 0.0
    return Comparison(name, max_abs_error(actual, exact), tolerance, judge, _note(actual, exact))


def against_peer(name: str, actual: Array, expected: Array, dtype: str, judge: str) -> Comparison:
    """Compare with another implementation of the same ``dtype``; integers and booleans must be equal."""
    tolerance = PAIR_TOLERANCE[dtype] * largest(expected) if is_float(actual) else 0.0
    return Comparison(name, max_abs_error(actual, expected), tolerance, judge, _note(actual, expected))


def is_float(array: Array) -> bool:
    """Whether the array holds floating-point numbers, ml_dtypes.bfloat16 included."""
    return str(array.dtype) in EPS


def worst(comparisons: list[Comparison]) -> Comparison:
    """The comparison that comes nearest to failing, or fails by most."""
    if not comparisons:
        raise FlashRNNError("nothing was compared: the model has no output")

    def badness(c: Comparison) -> tuple[bool, float]:
        return not c.passed, c.max_abs_error / c.tolerance if c.tolerance else c.max_abs_error

    return max(comparisons, key=badness)


def _note(actual: Array, expected: Array) -> str:
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    if actual.dtype.kind in "OSU":
        return ""
    a, e = (np.asarray(x, np.float64) for x in (actual, expected))
    if (np.isnan(a) != np.isnan(e)).any():
        return "NaN at different places"
    if a.size and np.isnan(a).all():
        return ONLY_NAN
    if (np.isinf(a) != np.isinf(e)).any() or (a[np.isinf(a)] != e[np.isinf(e)]).any():
        return "infinities at different places"
    return ""
