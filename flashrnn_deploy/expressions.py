"""Integer expressions and constraints for ``solver``: their bounds in a box, and whether they can still hold in it.

Everything is interval arithmetic. ``Expr.bounds`` encloses the values of an expression, ``Constraint.status`` says True
or False once that settles the matter in the whole box, and None before. On a box of one point both are exact.

A search asks for them thousands of times, so each is written out once as a Python function (``Text``). Walking the
tree took five to ten times as long, with the bounds of unchanged parts remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import product
from typing import Any

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


Names = tuple[str, str]
"""Of the variables that hold the lower and the upper bound of an expression in a function that is being written."""


class Text:
    """A Python function of a box, line by line. A part that is used more than once is written once.

    Numbers and tables are arguments of the text, so that it is compiled once for all layers of one kind.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.arguments: list[object] = []
        self.written: dict[int, Names] = {}

    def argument(self, value: object) -> str:
        self.arguments.append(value)
        return f"c{len(self.arguments) - 1}"

    def pair(self, value: str) -> Names:
        """The names of two values, which a new line computes."""
        names = f"a{len(self.lines)}", f"b{len(self.lines)}"
        self.lines.append(f"{', '.join(names)} = {value}")
        return names

    def bounds(self, expression: Expr) -> Names:
        if id(expression) not in self.written:
            self.written[id(expression)] = expression.write(self)
        return self.written[id(expression)]

    def function(self, result: str) -> Callable[[Box], Any]:
        arguments = ", ".join(f"c{i}" for i in range(len(self.arguments)))
        lines = ["domains, lo, hi = box.domains, box.lo, box.hi", *self.lines, f"return {result}"]
        body = "\n".join(f"        {line}" for line in lines)
        make = _compiled(f"def make({arguments}):\n    def function(box):\n{body}\n    return function\n")
        return make(*self.arguments)  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)  # all layers and devices together have some sixty texts
def _compiled(text: str) -> Callable[..., Any]:
    names: dict[str, Any] = {"undefined": _undefined}
    exec(compile(text, "<expression>", "exec"), names)
    return names["make"]  # type: ignore[no-any-return]


def _undefined() -> int:
    raise ValueError("a quotient needs a divisor that is positive in the whole domain")


class Expr:
    """An integer expression. ``bounds`` encloses its values in a box, and is exact where the box is one point."""

    __slots__ = ("function", "scope")
    scope: frozenset[int]
    function: Callable[[Box], Bounds] | None

    def write(self, text: Text) -> Names:
        """Adds what computes the bounds to ``text``."""
        raise NotImplementedError

    def compiled(self) -> Callable[[Box], Bounds]:
        if self.function is None:
            text = Text()
            self.function = text.function(", ".join(text.bounds(self)))
        return self.function

    def bounds(self, box: Box) -> Bounds:
        return self.compiled()(box)

    def __add__(self, other: Expr | int) -> Expr:
        return Binary(_sum, self, other)

    def __sub__(self, other: Expr | int) -> Expr:
        return Binary(_difference, self, other)

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
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.scope, self.function, self.value = frozenset(), None, value

    def write(self, text: Text) -> Names:
        name = text.argument(self.value)
        return name, name


class Var(Expr):
    """A variable of one problem; made by ``Problem.variable``."""

    __slots__ = ("index", "name")

    def __init__(self, name: str, index: int) -> None:
        self.scope, self.function, self.name, self.index = frozenset((index,)), None, name, index

    def write(self, text: Text) -> Names:
        return text.pair(f"lo[{self.index}], hi[{self.index}]")


Rule = Callable[[str, str, str, str], str]
"""What bounds follow from those of two parts, from a to b and from c to d, as Python; or what status of a relation."""


class Binary(Expr):
    """``rule`` combines the bounds of ``a`` and ``b``."""

    __slots__ = ("a", "b", "rule")

    def __init__(self, rule: Rule, a: Expr | int, b: Expr | int) -> None:
        self.rule, self.a, self.b = rule, wrap(a), wrap(b)
        self.scope, self.function = self.a.scope | self.b.scope, None

    def write(self, text: Text) -> Names:
        return text.pair(self.rule(*text.bounds(self.a), *text.bounds(self.b)))


def _sum(a: str, b: str, c: str, d: str) -> str:
    return f"{a} + {c}, {b} + {d}"


def _difference(a: str, b: str, c: str, d: str) -> str:
    return f"{a} - {d}, {b} - {c}"


def _product(a: str, b: str, c: str, d: str) -> str:
    corners = f"{a} * {c}, {a} * {d}, {b} * {c}, {b} * {d}"
    return f"({a} * {c}, {b} * {d}) if {a} >= 0 <= {c} else (min({corners}), max({corners}))"


def _quotient(a: str, b: str, c: str, d: str) -> str:
    return f"{a} // ({d} if {a} >= 0 else {c}) if {c} > 0 else undefined(), {b} // ({c} if {b} >= 0 else {d})"


def _ceil_quotient(a: str, b: str, c: str, d: str) -> str:
    """A rule of its own: in ``(x + y - 1) // y`` both y vary apart, and the bounds of a number of waves begin at 0."""
    return f"-(-{a} // ({d} if {a} > 0 else {c})) if {c} > 0 else undefined(), -(-{b} // ({c} if {b} > 0 else {d}))"


def _maximum(a: str, b: str, c: str, d: str) -> str:
    return f"{a} if {a} > {c} else {c}, {b} if {b} > {d} else {d}"


def _minimum(a: str, b: str, c: str, d: str) -> str:
    return f"{a} if {a} < {c} else {c}, {b} if {b} < {d} else {d}"


class Table(Expr):
    """``of`` a few variables, for what arithmetic does not say: measured tables, 0/1 indicators."""

    __slots__ = ("indices", "known")

    def __init__(self, of: Callable[..., int], *variables: Var) -> None:
        self.indices, self.known = tuple(v.index for v in variables), _Known(of)
        self.scope, self.function = frozenset(self.indices), None

    def write(self, text: Text) -> Names:
        domains = "".join(f"domains[{i}], " for i in self.indices)
        return text.pair(f"{text.argument(self.known)}[{domains}]")


class _Known(dict[tuple[tuple[int, ...], ...], Bounds]):
    """The bounds of a table by the domains of its variables, each computed when it is first asked for."""

    def __init__(self, of: Callable[..., int]) -> None:
        self.of = of

    def __missing__(self, domains: tuple[tuple[int, ...], ...]) -> Bounds:
        values = [self.of(*point) for point in product(*domains)]
        self[domains] = pair = min(values), max(values)
        return pair


def bounds(expressions: Iterable[Expr], box: Box) -> list[Bounds]:
    """The bounds of several expressions, by one function: they share their parts."""
    text = Text()
    pairs = "".join(f"({', '.join(text.bounds(expression))}), " for expression in expressions)
    return text.function(f"[{pairs}]")(box)  # type: ignore[no-any-return]


def maximum(a: Expr | int, b: Expr | int) -> Expr:
    return Binary(_maximum, a, b)


def minimum(a: Expr | int, b: Expr | int) -> Expr:
    return Binary(_minimum, a, b)


def ceil_div(a: Expr | int, b: Expr | int) -> Expr:
    """``ceil(a / b)`` for a positive ``b``."""
    return Binary(_ceil_quotient, a, b)


class Constraint:
    """A statement about expressions. ``status``: True or False when it holds, or fails, in the whole box, else None."""

    __slots__ = ("function", "scope")
    scope: frozenset[int]
    function: Callable[[Box], bool | None] | None

    def write(self, text: Text) -> str:
        """Adds what computes the status to ``text``; its name."""
        raise NotImplementedError

    def compiled(self) -> Callable[[Box], bool | None]:
        if self.function is None:
            text = Text()
            self.function = text.function(self.write(text))
        return self.function

    def status(self, box: Box) -> bool | None:
        return self.compiled()(box)

    def __bool__(self) -> bool:
        raise TypeError("a constraint has no truth value of its own: pass it to require, any_of or all_of")


class Relation(Constraint):
    """``rule`` judges the bounds of ``a`` and ``b``."""

    __slots__ = ("a", "b", "rule")

    def __init__(self, rule: Rule, a: Expr | int, b: Expr | int) -> None:
        self.rule, self.a, self.b = rule, wrap(a), wrap(b)
        self.scope, self.function = self.a.scope | self.b.scope, None

    def write(self, text: Text) -> str:
        return f"({self.rule(*text.bounds(self.a), *text.bounds(self.b))})"


def _less_equal(a: str, b: str, c: str, d: str) -> str:
    return f"True if {b} <= {c} else False if {a} > {d} else None"


def _equal(a: str, b: str, c: str, d: str) -> str:
    return f"False if {a} > {d} or {c} > {b} else True if {a} == {b} == {c} == {d} else None"


def _not_equal(a: str, b: str, c: str, d: str) -> str:
    return f"True if {a} > {d} or {c} > {b} else False if {a} == {b} == {c} == {d} else None"


def _divides(a: str, b: str, c: str, d: str) -> str:
    one = f"{d} % {a} == 0 if {c} == {d} else False if {d} // {a} * {a} < {c} else True if {a} == 1 else None"
    return f"({one}) if {a} == {b} else False if 0 < {c} <= {d} < {a} else None"


def divides(a: Expr | int, b: Expr | int) -> Constraint:
    """``b`` is a multiple of ``a``, which must be positive."""
    return Relation(_divides, a, b)


class Combination(Constraint):
    """Settled by a part whose status is ``decisive``: True for "any of", False for "all of"."""

    __slots__ = ("decisive", "parts")

    def __init__(self, decisive: bool, parts: tuple[Constraint, ...]) -> None:
        self.decisive, self.parts = decisive, parts
        self.scope, self.function = frozenset().union(*(p.scope for p in parts)), None

    def write(self, text: Text) -> str:
        parts = "".join(f"{part.write(text)}, " for part in self.parts)
        name, _ = text.pair(f"({parts}), None")
        return f"({self.decisive} if {self.decisive} in {name} else None if None in {name} else {not self.decisive})"


def any_of(*parts: Constraint) -> Constraint:
    return Combination(True, parts)


def all_of(*parts: Constraint) -> Constraint:
    return Combination(False, parts)
