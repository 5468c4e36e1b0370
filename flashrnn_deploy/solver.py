"""A small solver for integer problems over finite domains; it knows nothing about kernels.

A ``Problem`` holds variables, each with a tuple of values in order of preference, and named constraints made of sums,
products, whole quotients, maxima, minima and tables, compared with ``<=``, ``==``, ``!=`` and ``divides``, and combined
with ``any_of`` and ``all_of``::

    p = Problem()
    x, y = p.variable("x", range(1, 7)), p.variable("y", range(1, 7))
    p.require("product", x * y == 12)
    p.require("even", divides(2, x))
    best = minimize(p, x + y)          # x = 4, y = 3

``minimize`` first propagates to a fixed point: a value goes when interval arithmetic shows that a constraint cannot
hold with it. It then searches depth first in the order of declaration, propagates after each choice, and drops a
branch whose lower bound is not better than the best solution known. Nothing is random: the same problem gives the same
answer, and of equal solutions the first in order of preference wins.

Every assignment of the full product of the domains is accounted for: removed by one named constraint, cut by the
objective, or examined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

Bounds = tuple[int, int]


class Box:
    """The values still possible for each variable, with their smallest and largest at hand."""

    __slots__ = ("domains", "hi", "lo", "stamp")

    def __init__(self, domains: list[tuple[int, ...]], lo: list[int], hi: list[int]) -> None:
        self.domains, self.lo, self.hi = domains, lo, hi
        self.stamp = object()  # a new one at each change: expressions remember their bounds by it

    def copy(self) -> Box:
        return Box(self.domains.copy(), self.lo.copy(), self.hi.copy())

    def restrict(self, index: int, values: tuple[int, ...]) -> None:
        self.domains[index], self.lo[index], self.hi[index] = values, min(values), max(values)
        self.stamp = object()

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
    """``rule`` combines the bounds of ``a`` and ``b``."""

    __slots__ = ("a", "b", "known", "rule", "stamp")

    def __init__(self, rule: Callable[[Bounds, Bounds], Bounds], a: Expr | int, b: Expr | int) -> None:
        self.rule, self.a, self.b = rule, wrap(a), wrap(b)
        self.scope = self.a.scope | self.b.scope
        self.stamp: object = None
        self.known = (0, 0)

    def bounds(self, box: Box) -> Bounds:
        if self.stamp is not box.stamp:
            self.known, self.stamp = self.rule(self.a.bounds(box), self.b.bounds(box)), box.stamp
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
    return (wrap(a) + b - 1) // b


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


@dataclass
class Problem:
    """Variables, in the order of the search, and named constraints."""

    variables: list[Var] = field(default_factory=list)
    domains: list[tuple[int, ...]] = field(default_factory=list)
    constraints: list[tuple[str, Constraint]] = field(default_factory=list)

    def variable(self, name: str, values: Iterable[int]) -> Var:
        """A new variable; ``values`` in order of preference."""
        domain = tuple(dict.fromkeys(values))
        if not domain or any(v.name == name for v in self.variables):
            raise ValueError(f"variable {name} needs at least one value and a name of its own")
        self.variables.append(Var(name, len(self.variables)))
        self.domains.append(domain)
        return self.variables[-1]

    def require(self, name: str, constraint: Constraint) -> None:
        """Add a constraint; a name may be used more than once and is then counted as one."""
        self.constraints.append((name, constraint))

    def box(self) -> Box:
        return Box(self.domains.copy(), [min(d) for d in self.domains], [max(d) for d in self.domains])

    def point(self, values: dict[str, int]) -> Box:
        """The box that holds one assignment, for ``Expr.bounds`` and ``Constraint.status``."""
        row = [values[v.name] for v in self.variables]
        return Box([(x,) for x in row], row.copy(), row.copy())

    def check(self, values: dict[str, int]) -> dict[str, bool]:
        """Whether each named constraint holds for one assignment."""
        box = self.point(values)
        held: dict[str, bool] = {}
        for name, constraint in self.constraints:
            held[name] = held.get(name, True) and constraint.status(box) is True
        return held


@dataclass(frozen=True)
class Result:
    """The best assignment and the account: ``candidates = sum(removed.values()) + cut + examined``."""

    values: dict[str, int]
    cost: int
    candidates: int
    removed: dict[str, int]
    cut: int
    examined: int


def solutions(problem: Problem) -> Iterator[dict[str, int]]:
    """Every solution, in order of preference."""
    for box in _Search(problem).run():
        yield {v.name: box.lo[v.index] for v in problem.variables}


def minimize(problem: Problem, objective: Expr) -> Result | None:
    """The solution with the smallest ``objective``, the first in order of preference among equals; None without any."""
    search = _Search(problem, objective)
    best = None
    for box in search.run():
        best, search.limit = box, objective.bounds(box)[0]
    if best is None or search.limit is None:
        return None
    values = {v.name: best.lo[v.index] for v in problem.variables}
    return Result(
        values, search.limit, math.prod(map(len, problem.domains)), search.removed, search.cut, search.examined
    )


class _Search:
    """Depth first search with propagation; see the module's text."""

    def __init__(self, problem: Problem, objective: Expr | None = None) -> None:
        self.problem, self.objective = problem, objective
        self.limit: int | None = None
        self.removed = {name: 0 for name, _ in problem.constraints}
        self.cut = self.examined = 0
        self.scopes = [tuple(sorted(c.scope)) for _, c in problem.constraints]
        self.watching: list[list[int]] = [[] for _ in problem.variables]
        for number, scope in enumerate(self.scopes):
            for index in scope:
                self.watching[index].append(number)

    def run(self) -> Iterator[Box]:
        box = self.problem.box()
        everything = set(range(len(self.problem.constraints)))
        if self._propagate(box, everything, set(everything), thorough=True):
            yield from self._branch(box, everything, 0)

    def _branch(self, box: Box, open_: set[int], depth: int) -> Iterator[Box]:
        """``open_``: the constraints that may still fail in ``box``."""
        if self.objective is not None and self.limit is not None and self.objective.bounds(box)[0] >= self.limit:
            self.cut += box.volume
            return
        while depth < len(box.domains) and len(box.domains[depth]) == 1:
            depth += 1
        if depth == len(box.domains):
            self.examined += 1
            yield box
            return
        for value in box.domains[depth]:
            child, still_open = box.copy(), open_.copy()
            child.restrict(depth, (value,))
            if self._propagate(child, still_open, still_open.intersection(self.watching[depth])):
                yield from self._branch(child, still_open, depth + 1)

    def _propagate(self, box: Box, open_: set[int], queue: set[int], thorough: bool = False) -> bool:
        """Remove values until nothing changes; False when a constraint fails. Counts what each constraint removed.

        Below the root a constraint with two or more open variables is only tested, not used to remove single values:
        that found the same solutions three times as fast.
        """
        while queue:
            number = min(queue)
            queue.remove(number)
            name, constraint = self.problem.constraints[number]
            unfixed = [i for i in self.scopes[number] if len(box.domains[i]) > 1]
            status = constraint.status(box)
            if status is not None:
                open_.discard(number)
                if not status:
                    self.removed[name] += box.volume
                    return False
            elif thorough or len(unfixed) == 1:
                for index in unfixed:
                    old = box.domains[index]
                    kept = tuple(v for v in old if self._possible(constraint, box, index, v))
                    if len(kept) < len(old):
                        self.removed[name] += box.volume // len(old) * (len(old) - len(kept))
                        if not kept:
                            return False
                        box.restrict(index, kept)
                        queue |= open_.intersection(self.watching[index])
                        queue.discard(number)
                if len(unfixed) == 1:
                    open_.discard(number)
        return True

    @staticmethod
    def _possible(constraint: Constraint, box: Box, index: int, value: int) -> bool:
        saved = box.domains[index], box.lo[index], box.hi[index], box.stamp
        box.restrict(index, (value,))
        status = constraint.status(box)
        box.domains[index], box.lo[index], box.hi[index], box.stamp = saved
        return status is not False
