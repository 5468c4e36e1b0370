"""The general solver: brute force agrees, every solution holds, every candidate is accounted for."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrnn_deploy.expressions import Table, all_of, any_of, ceil_div, divides, maximum, minimum, wrap
from flashrnn_deploy.solver import Problem, minimize, solutions

OPERATIONS = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    maximum,
    minimum,
    lambda a, b: a // maximum(1, b),
    lambda a, b: ceil_div(a, maximum(1, b)),
)
RELATIONS = (
    lambda a, b: a <= b,
    lambda a, b: a >= b,
    lambda a, b: a == b,
    lambda a, b: a != b,
    lambda a, b: divides(maximum(1, a), b),
)


@st.composite
def problems(draw):
    """A problem of 2 to 4 variables with up to 6 values each, 1 to 4 constraints, and an objective."""
    problem = Problem()
    for i in range(draw(st.integers(2, 4))):
        problem.variable(f"v{i}", draw(st.lists(st.integers(-4, 9), min_size=1, max_size=6, unique=True)))
    table = Table(lambda a, b: (3 * a - b) % 7, *problem.variables[:2])

    def expression(depth):
        if depth == 0 or draw(st.booleans()):
            return wrap(draw(st.sampled_from([*problem.variables, table, draw(st.integers(-5, 12))])))
        return draw(st.sampled_from(OPERATIONS))(expression(depth - 1), expression(depth - 1))

    def constraint(depth):
        if depth and draw(st.booleans()):
            return draw(st.sampled_from((any_of, all_of)))(constraint(depth - 1), constraint(depth - 1))
        return draw(st.sampled_from(RELATIONS))(expression(2), expression(2))

    for i in range(draw(st.integers(1, 4))):
        problem.require(f"c{i}", constraint(1))
    return problem, expression(2)


def brute_force(problem):
    """All assignments, in order of preference, for which each constraint holds at its point."""
    names = [v.name for v in problem.variables]
    points = [dict(zip(names, values, strict=True)) for values in product(*problem.domains)]
    return [p for p in points if all(problem.check(p).values())]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems())
def test_agrees_with_brute_force(case):
    problem, objective = case
    expected = brute_force(problem)
    assert list(solutions(problem)) == expected

    result = minimize(problem, objective)
    costs = [objective.bounds(problem.point(p))[0] for p in expected]
    if not expected:
        assert result is None
    else:
        assert result.cost == min(costs)
        assert result.values == expected[costs.index(min(costs))], "the first of equals in order of preference"
        assert result.candidates == sum(result.removed.values()) + result.cut + result.examined
        assert minimize(problem, objective) == result, "deterministic"


def evaluate(operation, a, b):
    """The same operation on Python integers, written out a second time."""
    return (
        lambda: a + b,
        lambda: a - b,
        lambda: a * b,
        lambda: max(a, b),
        lambda: min(a, b),
        lambda: a // max(1, b),
        lambda: -(-a // max(1, b)),
    )[operation]()


@pytest.mark.parametrize("operation", range(len(OPERATIONS)))
def test_expressions_compute_what_they_say(operation):
    """Exact at a point, and enclosing in a box: checked against Python's own arithmetic."""
    problem = Problem()
    x, y = problem.variable("x", range(-6, 7)), problem.variable("y", range(-6, 7))
    expression = OPERATIONS[operation](x, y)
    low, high = expression.bounds(problem.box())
    for a, b in product(range(-6, 7), repeat=2):
        value = evaluate(operation, a, b)
        assert expression.bounds(problem.point({"x": a, "y": b})) == (value, value)
        assert low <= value <= high


def test_a_rounded_up_quotient_is_bounded_tightly():
    """At least one wave: as (x + y - 1) // y the bounds began at 0, and with them those of a product of waves."""
    problem = Problem()
    x, y = problem.variable("x", range(1, 65)), problem.variable("y", (1, 2, 4, 8))
    assert ceil_div(x, y).bounds(problem.box()) == (1, 64)
    assert ceil_div(0 - x, y).bounds(problem.box()) == (-64, 0)


def test_relations_at_a_point():
    problem = Problem()
    x, y = problem.variable("x", range(1, 13)), problem.variable("y", range(1, 13))
    cases = {x <= y: lambda a, b: a <= b, x >= y: lambda a, b: a >= b, (x == y): lambda a, b: a == b}
    cases |= {(x != y): lambda a, b: a != b, divides(x, y): lambda a, b: b % a == 0}
    for constraint, truth in cases.items():
        for a, b in product(range(1, 13), repeat=2):
            assert constraint.status(problem.point({"x": a, "y": b})) is truth(a, b)


def test_combinations_in_boxes_and_points():
    """At a point: Python's any and all. In a box: settled only if every point agrees, and then as they say."""
    problem = Problem()
    x, y = problem.variable("x", range(1, 5)), problem.variable("y", range(1, 5))
    parts = {x <= 2: lambda a, b: a <= 2, divides(x, y): lambda a, b: b % a == 0, (y != 3): lambda a, b: b != 3}
    parts |= {x + y <= 9: lambda a, b: True, x + y <= 1: lambda a, b: False}
    points = list(product(range(1, 5), repeat=2))
    for some in (p for n in (1, 2, 3) for p in product(parts, repeat=n)):
        for combine, truth in ((any_of, any), (all_of, all)):
            constraint = combine(*some)
            values = [truth(parts[p](a, b) for p in some) for a, b in points]
            assert [constraint.status(problem.point({"x": a, "y": b})) for a, b in points] == values
            if (status := constraint.status(problem.box())) is not None:
                assert values == [status] * len(values)
    assert any_of(x <= 2, x + y <= 9).status(problem.box()) is True
    assert all_of(x <= 2, x + y <= 1).status(problem.box()) is False


def test_propagation_alone_removes_values_before_the_search():
    """x * y == 35 leaves only divisors, so the search has two branches; the account says who removed what."""
    problem = Problem()
    x, y = problem.variable("x", range(1, 36)), problem.variable("y", range(1, 36))
    problem.require("area", x * y == 35)
    problem.require("odd one", divides(7, x))
    problem.require("not larger", x <= 7)
    result = minimize(problem, x - y)
    assert result.values == {"x": 7, "y": 5}
    assert result.removed["not larger"] > 0
    assert result.examined == 1


def test_the_objective_cuts_branches():
    problem = Problem()
    x, y = problem.variable("x", range(100)), problem.variable("y", range(100))
    problem.require("sum", x + y >= 3)
    result = minimize(problem, x * 100 + y)
    assert (result.values, result.cost) == ({"x": 0, "y": 3}, 3)
    assert result.cut > 9000
    assert result.examined < 10


def test_no_solution():
    problem = Problem()
    x = problem.variable("x", (2, 4, 6))
    problem.require("odd", x == 2 * (x // 2) + 1)
    assert minimize(problem, x) is None
    assert list(solutions(problem)) == []


def test_mistakes_are_named():
    problem = Problem()
    x = problem.variable("x", (0, 1))
    with pytest.raises(ValueError, match="variable x needs"):
        problem.variable("x", (1, 2))
    with pytest.raises(ValueError, match="variable empty needs"):
        problem.variable("empty", ())
    with pytest.raises(TypeError, match="no truth value"):
        bool(x == 1)
    with pytest.raises(ValueError, match="positive"):
        (1 // x).bounds(problem.box())
