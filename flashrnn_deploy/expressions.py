"""Integer expressions and constraints for ``solver``: their bounds in a box, and whether they can still hold in it.

Everything is interval arithmetic. ``Expr.bounds`` encloses the values of an expression, ``Constraint.status`` says True
or False once that settles the matter in the whole box, and None before. On a box of one point both are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from operator import itemgetter

Bounds = tuple[int, int]


class Box:
    """The values still possible for each variable, with their smallest and largest at hand."""

    __slots__ = ("domains", "hi", "lo")

    def __init__(self, domains: list[tuple[int, ...]], lo: list[int], hi: list[int]) -> None:
        self.domains, self.lo, self.hi = domains, lo, hi

    def copy(self) -> Box:
        return Box(self.domains.copy(), self.lo.copy(), self.hi.copy())

    def restrict(self, index: int, values: tuple[int, ...]) -> None:
        self.domains[index], self.lo[index], self.hi[index] = values, min(values), max(values)

    @property
    def volume(self) -> int:
        return math.prod(map(len, self.domains))


class Expr:
    """An integer expression. ``bounds`` encloses its values in a box, and is exact where the box is one point."""

    __slots__ = ("scope",)
    scope: frozenset[int]

    def bounds(self, box: Box) -> Bounds:
        raise NotImplementedError

    def __add__(self, other: Expr | int) -> Expr:
        return Binary(_sum, self, other)

    def __sub__(self, other: Expr | int) -> Expr:
        return Binary(_sum, self, Binary(_product, -1, other))

    def __rsub__(self, other: int) -> Expr:
        return wrap(other) - self

    def __mul__(self, other: Expr | int) -> Expr:
        return Binary(_product, self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Expr | int) -> Expr:
        return Binary(_quotient, self, other)

    def __rfloordiv__(self, other: int) -> Expr:
        return wrap(other) // self

    def __le__(self, other: Expr | int) -> Constraint:
        return Relation(_less_equal, self, other)

    def __ge__(self, other: Expr | int) -> Constraint:
        return Relation(_less_equal, other, self)

    def __eq__(self, other: Expr | int) -> Constraint:  # type: ignore[override]
        return Relation(_equal, self, other)

    def __ne__(self, other: Expr | int) -> Constraint:  # type: ignore[override]
        return Relation(_not_equal, self, other)

    __hash__ = object.__hash__


def wrap(value: Expr | int) -> Expr:
    return value if isinstance(value, Expr) else Const(value)


class Const(Expr):
    __slots__ = ("pair",)

    def __init__(self, value: int) -> None:
        self.scope, self.pair = frozenset(), (value, value)

    def bounds(self, box: Box) -> Bounds:
        return self.pair


class Var(Expr):
    """A variable of one problem; made by ``Problem.variable``."""

    __slots__ = ("index", "name")

    def __init__(self, name: str, index: int) -> None:
        self.scope, self.name, self.index = frozenset((index,)), name, index

    def bounds(self, box: Box) -> Bounds:
        return box.lo[self.index], box.hi[self.index]


class Binary(Expr):
    """``rule`` combines the bounds of ``a`` and ``b``.

    The last bounds are kept with the domains they follow from: expressions share their parts, and a choice leaves most
    parts as they were. Without that a search takes four to six times as long.
    """

    __slots__ = ("a", "b", "key", "known", "rule", "scoped")

    def __init__(self, rule: Callable[[Bounds, Bounds], Bounds], a: Expr | int, b: Expr | int) -> None:
        self.rule, self.a, self.b = rule, wrap(a), wrap(b)
        self.scope = self.a.scope | self.b.scope
        self.scoped: Callable[[list[tuple[int, ...]]], object] = itemgetter(*self.scope) if self.scope else len
        self.key: object = None
        self.known = (0, 0)

    def bounds(self, box: Box) -> Bounds:
        key = self.scoped(box.domains)
        if key != self.key:
            self.known, self.key = self.rule(self.a.bounds(box), self.b.bounds(box)), key
        return self.known


def _sum(x: Bounds, y: Bounds) -> Bounds:
    return x[0] + y[0], x[1] + y[1]


def _product(x: Bounds, y: Bounds) -> Bounds:
    if x[0] >= 0 and y[0] >= 0:
        return x[0] * y[0], x[1] * y[1]
    corners = [a * b for a in x for b in y]
    return min(corners), max(corners)


def _quotient(x: Bounds, y: Bounds) -> Bounds:
    if y[0] < 1:
        raise ValueError("a quotient needs a divisor that is positive in the whole domain")
    return x[0] // y[x[0] >= 0], x[1] // y[x[1] < 0]


def _ceil_quotient(x: Bounds, y: Bounds) -> Bounds:
    """A rule of its own: in ``(x + y - 1) // y`` both y vary apart, and the bounds of a number of waves begin at 0."""
    low, high = _quotient((-x[1], -x[0]), y)
    return -high, -low


def _maximum(x: Bounds, y: Bounds) -> Bounds:
    return max(x[0], y[0]), max(x[1], y[1])


def _minimum(x: Bounds, y: Bounds) -> Bounds:
    return min(x[0], y[0]), min(x[1], y[1])


class Table(Expr):
    """``function`` of a few variables, for what arithmetic does not say: measured tables, 0/1 indicators."""

    __slots__ = ("cache", "function", "indices")

    def __init__(self, function: Callable[..., int], *variables: Var) -> None:
        self.function, self.indices = function, tuple(v.index for v in variables)
        self.scope = frozenset(self.indices)
        self.cache: dict[tuple[tuple[int, ...], ...], Bounds] = {}

    def bounds(self, box: Box) -> Bounds:
        key = tuple([box.domains[i] for i in self.indices])
        pair = self.cache.get(key)
        if pair is None:
            values = [self.function(*point) for point in product(*key)]
            pair = self.cache[key] = (min(values), max(values))
        return pair


def maximum(a: Expr | int, b: Expr | int) -> Expr:
    return Binary(_maximum, a, b)


def minimum(a: Expr | int, b: Expr | int) -> Expr:
    return Binary(_minimum, a, b)


def ceil_div(a: Expr | int, b: Expr | int) -> Expr:
    """``ceil(a / b)`` for a positive ``b``."""
    return Binary(_ceil_quotient, a, b)


class Constraint:
    """A statement about expressions. ``status``: True or False when it holds, or fails, in the whole box, else None."""

    __slots__ = ("scope",)
    scope: frozenset[int]

    def status(self, box: Box) -> bool | None:
        raise NotImplementedError

    def __bool__(self) -> bool:
        raise TypeError("a constraint has no truth value of its own: pass it to require, any_of or all_of")


class Relation(Constraint):
    """``rule`` judges the bounds of ``a`` and ``b``."""

    __slots__ = ("a", "b", "rule")

    def __init__(self, rule: Callable[[Bounds, Bounds], bool | None], a: Expr | int, b: Expr | int) -> None:
        self.rule, self.a, self.b = rule, wrap(a), wrap(b)
        self.scope = self.a.scope | self.b.scope

    def status(self, box: Box) -> bool | None:
        return self.rule(self.a.bounds(box), self.b.bounds(box))


def _less_equal(x: Bounds, y: Bounds) -> bool | None:
    return True if x[1] <= y[0] else False if x[0] > y[1] else None


def _equal(x: Bounds, y: Bounds) -> bool | None:
    return False if x[0] > y[1] or y[0] > x[1] else True if x[0] == x[1] == y[0] == y[1] else None


def _not_equal(x: Bounds, y: Bounds) -> bool | None:
    equal = _equal(x, y)
    return None if equal is None else not equal


def _divides(x: Bounds, y: Bounds) -> bool | None:
    if x[0] != x[1]:
        return False if 0 < y[0] <= y[1] < x[0] else None
    if y[0] == y[1]:
        return y[0] % x[0] == 0
    return False if y[1] // x[0] * x[0] < y[0] else True if x[0] == 1 else None


def divides(a: Expr | int, b: Expr | int) -> Constraint:
    """``b`` is a multiple of ``a``, which must be positive."""
    return Relation(_divides, a, b)


class Combination(Constraint):
    """Settled by the first part whose status is ``decisive``: True for "any of", False for "all of"."""

    __slots__ = ("decisive", "parts")

    def __init__(self, decisive: bool, parts: tuple[Constraint, ...]) -> None:
        self.decisive, self.parts = decisive, parts
        self.scope = frozenset().union(*(p.scope for p in parts))

    def status(self, box: Box) -> bool | None:
        answer: bool | None = not self.decisive
        for part in self.parts:
            status = part.status(box)
            if status is self.decisive:
                return status
            if status is None:
                answer = None
        return answer


def any_of(*parts: Constraint) -> Constraint:
    return Combination(True, parts)


def all_of(*parts: Constraint) -> Constraint:
    return Combination(False, parts)
