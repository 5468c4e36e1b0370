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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flashrnn_deploy.expressions import Box, Constraint, Expr, Var


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
        saved = box.domains[index], box.lo[index], box.hi[index]
        box.restrict(index, (value,))
        status = constraint.status(box)
        box.domains[index], box.lo[index], box.hi[index] = saved
        return status is not False
