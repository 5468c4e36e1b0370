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

from collections.abc import Callable, Iterable, Iterator
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
    """The best assignment and the account: ``candidates = sum(removed.values()) + cut + examined``.

    ``evaluations``: how often a constraint's status or the objective's bounds were asked for, the work of the search.
    """

    values: dict[str, int]
    cost: int
    candidates: int
    removed: dict[str, int]
    cut: int
    examined: int
    evaluations: int


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
    account = search.removed, search.cut, search.examined, search.evaluations
    return Result(values, search.limit, problem.box().volume, *account)


class _Search:
    """Depth first search with propagation; see the module's text. Sets of constraints are bits, by their numbers."""

    def __init__(self, problem: Problem, objective: Expr | None = None) -> None:
        self.problem = problem
        self.objective = None if objective is None else objective.compiled()
        self.limit: int | None = None
        self.removed = {name: 0 for name, _ in problem.constraints}
        self.cut = self.examined = self.evaluations = 0
        self.constraints = [(name, c.compiled(), sorted(c.scope)) for name, c in problem.constraints]
        self.watching = [
            sum(1 << number for number, (_, _, scope) in enumerate(self.constraints) if index in scope)
            for index in range(len(problem.variables))
        ]

    def run(self) -> Iterator[Box]:
        box, everything = self.problem.box(), (1 << len(self.constraints)) - 1
        open_ = self._propagate(box, everything, everything, thorough=True)
        if open_ is not None:
            yield from self._branch(box, open_, 0)

    def _branch(self, box: Box, open_: int, depth: int) -> Iterator[Box]:
        """``open_``: the constraints that may still fail in ``box``."""
        if self.objective and self.limit is not None:
            self.evaluations += 1
            if self.objective(box)[0] >= self.limit:
                self.cut += box.volume
                return
        while depth < len(box.domains) and len(box.domains[depth]) == 1:
            depth += 1
        if depth == len(box.domains):
            self.examined += 1
            yield box
            return
        for value in box.domains[depth]:
            child = box.copy()
            child.restrict(depth, (value,))
            still_open = self._propagate(child, open_, open_ & self.watching[depth])
            if still_open is not None:
                yield from self._branch(child, still_open, depth + 1)

    def _propagate(self, box: Box, open_: int, queue: int, thorough: bool = False) -> int | None:
        """Remove values until nothing changes: what is still open then, or None when a constraint fails.

        Below the root a constraint with two or more open variables is only tested, not used to remove single values:
        that finds the same solutions with 13 % fewer evaluations.
        """
        while queue:
            bit = queue & -queue  # of the first
            queue ^= bit
            name, status_in, scope = self.constraints[bit.bit_length() - 1]
            self.evaluations += 1
            status = status_in(box)
            if status is False:
                self.removed[name] += box.volume
                return None
            if status:
                open_ &= ~bit
                continue
            unfixed = [index for index in scope if len(box.domains[index]) > 1]
            if not thorough and len(unfixed) > 1:
                continue
            for index in unfixed:
                old = box.domains[index]
                kept = self._possible(status_in, box, index)
                if len(kept) < len(old):
                    self.removed[name] += box.volume // len(old) * (len(old) - len(kept))
                    if not kept:
                        return None
                    box.restrict(index, kept)
                    queue |= open_ & self.watching[index] & ~bit
            if len(unfixed) == 1:
                open_ &= ~bit
        return open_

    def _possible(self, status_in: Callable[[Box], bool | None], box: Box, index: int) -> tuple[int, ...]:
        """The values of a variable with which a constraint may still hold."""
        old = box.domains[index], box.lo[index], box.hi[index]
        kept = []
        for value in old[0]:
            box.domains[index], box.lo[index], box.hi[index] = (value,), value, value
            if status_in(box) is not False:
                kept.append(value)
        box.domains[index], box.lo[index], box.hi[index] = old
        self.evaluations += len(old[0])
        return tuple(kept)
