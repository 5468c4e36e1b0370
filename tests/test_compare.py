"""Tolerances, and that nothing but agreement passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flashrnn_deploy import compare
from flashrnn_deploy.errors import FlashRNNError

ONES = np.ones((2, 3), np.float32)


def with_value(value: float, dtype: type = np.float32) -> np.ndarray:
    array = np.ones((2, 3), dtype)
    array[0, 1] = value
    return array


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (ONES, ONES, 0.0),
        (with_value(1.5), ONES, 0.5),
        (with_value(np.nan), ONES, math.inf),
        (ONES, with_value(np.nan), math.inf),
        (with_value(np.nan), with_value(np.nan), 0.0),
        (np.full(3, np.nan), np.full(3, np.nan), math.inf),
        (with_value(np.inf), with_value(np.inf), 0.0),
        (with_value(np.inf), with_value(-np.inf), math.inf),
        (with_value(np.inf), ONES, math.inf),
        (with_value(np.inf), with_value(np.nan), math.inf),
        (ONES[:1], ONES, math.inf),
        (np.zeros((0, 3)), np.zeros((0, 3)), 0.0),
        (with_value(1.5, bfloat16), ONES, 0.5),
        (np.array(["a"]), np.array(["a"]), 0.0),
        (np.array(["a"]), np.array(["b"]), math.inf),
    ],
)
def test_max_abs_error(actual: np.ndarray, expected: np.ndarray, error: float) -> None:
    assert compare.max_abs_error(actual, expected) == error


def test_eps_is_that_of_the_dtypes() -> None:
    for name, eps in compare.EPS.items():
        dtype = np.dtype(bfloat16 if name == "bfloat16" else name)
        one = np.ones((), dtype)
        assert (one + np.asarray(eps, dtype)).astype(np.float64) == 1 + eps
        assert (one + np.asarray(eps / 2.1, dtype)).astype(np.float64) == 1


def test_the_floor_is_four_eps_of_the_largest_value() -> None:
    exact = np.array([0.5, -8.0])
    allowed = 4 * 2.0**-23 * 8
    for error, passed in ((0.9 * allowed, True), (1.1 * allowed, False)):
        actual = (exact + np.array([error, 0])).astype(np.float64)
        result = compare.against_float64("y", actual, exact, 0.0, "float32", "judge")
        assert (result.passed, result.tolerance) == (passed, allowed)
    assert compare.against_float64("y", exact, exact / 100, 0.0, "float32", "judge").tolerance == allowed / 8


def test_twice_the_own_error_is_allowed() -> None:
    exact = np.zeros(4)
    own = compare.own_error(np.array([0, 0.01, 0, 0]), exact)
    assert own == 0.01
    for error, passed in ((0.0199, True), (0.0201, False)):
        assert compare.against_float64("y", exact + error, exact, own, "float32", "judge").passed is passed


@pytest.mark.parametrize("own", [np.full(4, np.inf), np.array([0, 0, 0, np.nan]), np.zeros(3)])
def test_an_own_result_that_is_not_finite_allows_nothing(own: np.ndarray) -> None:
    exact = np.zeros(4)
    assert compare.own_error(own, exact) == 0
    infinite = compare.against_float64("y", np.full(4, np.inf), exact, compare.own_error(own, exact), "float16", "j")
    assert not infinite.passed
    assert infinite.note == "infinities at different places"


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float16", 5e-3), ("bfloat16", 4e-2)])
def test_peers(dtype: str, bound: float) -> None:
    expected = np.array([4.0, 1.0])
    assert compare.against_peer("y", expected + 3.9 * bound, expected, dtype, "other").passed
    assert not compare.against_peer("y", expected + 4.1 * bound, expected, dtype, "other").passed
    assert not compare.against_peer("y", expected * np.nan, expected, dtype, "other").passed


@pytest.mark.parametrize(("actual", "passed"), [([1, 2], True), ([1, 3], False)])
def test_integers_must_be_equal(actual: list[int], passed: bool) -> None:
    expected = np.array([1, 2])
    assert compare.against_float64("y", np.array(actual), expected, 9.0, "float16", "j").passed is passed
    assert compare.against_peer("y", np.array(actual), expected, "float16", "j").passed is passed


def test_notes_say_what_differs() -> None:
    assert "shape [1, 3] instead of [2, 3]" in compare.against_peer("y", ONES[:1], ONES, "float32", "j").note
    assert "NaN at" in compare.against_peer("y", with_value(np.nan), ONES, "float32", "j").note
    assert compare.against_peer("y", np.full(2, np.nan), np.full(2, np.nan), "float32", "j").note == "nothing but NaN"


def test_coarsest() -> None:
    assert compare.coarsest("float32", "int64", "bfloat16", "float16") == "bfloat16"
    assert compare.coarsest("int64") == "float32"


def test_worst() -> None:
    def result(error: float, tolerance: float) -> compare.Comparison:
        return compare.Comparison("y", error, tolerance, "j")

    small, near, failed = result(1e-9, 1.0), result(0.9, 1.0), result(1e-3, 1e-4)
    assert compare.worst([small, near, failed]) is failed
    assert compare.worst([small, near]) is near
    assert compare.worst([small, result(0.0, 0.0)]) is small
    with pytest.raises(FlashRNNError, match="no output"):
        compare.worst([])
