"""Which integer attributes to divide so that a module's own forward runs on local parts.

Every site (an integer argument that is the size of a cut term) gives one equation: the expression it was made from,
under the edited attributes and the local sizes of the tensors it read, is the local size.  An attribute that also
fed a formula (``head_dim ** -0.5``) or an op as a value is never edited: shapes would be right and values wrong.  A
formula of several integers (``(width // heads) ** -0.5``) gives an equation too: they must come to what they were.
Calls whose equations cannot be met are returned, to be rewritten from their graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx, nn

from tpconvert.analyze.axes.chance import argument
from tpconvert.analyze.axes.dealing import Deal
from tpconvert.analyze.axes.terms import P, Term, V, blocks, leaves
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.emulate.run import is_local
from tpconvert.analyze.flow.run import Flow
from tpconvert.analyze.trace.provenance import (
    Attribute,
    Expression,
    Int,
    attributes,
    evaluate,
    expression,
    held_objects,
    integers,
)
from tpconvert.spec.layout import Block
from tpconvert.spec.plan import Edit

DEPTH = 3
"""How many attributes of one forward are edited together at most."""


@dataclass(frozen=True, slots=True)
class Place:
    """An attribute as a plan names it."""

    module: str
    attribute: str


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One site: ``expression`` must come to the local size of ``term``."""

    what: str
    call: Call
    expression: Expression
    term: Term
    sign: int


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A new value for an attribute: ``whole x local(term) / term.n``."""

    whole: int
    term: Term

    def local(self, deal: Deal, rank: int) -> int:
        """The value on a rank."""
        return self.whole * deal.size(self.term, rank) // self.term.n


def solve_edits(
    flow: Flow, deal: Deal, nested: dict[Term, Term], rewritten: set[str]
) -> tuple[list[Edit], set[Call], dict[Call, str]]:
    """``(edits, calls that must be rewritten, why)``; modules in ``rewritten`` need no edits.

    ``nested`` gives, for an atom cut within another, that outer one.
    """
    return _Solver(flow, deal, nested, rewritten).solve()


class _Solver:
    def __init__(self, flow: Flow, deal: Deal, nested: dict[Term, Term], rewritten: set[str]) -> None:
        self.flow, self.ax, self.deal, self.nested = flow, flow.ax, deal, nested
        self.ranks = sorted({0, deal.tp - 1})
        self.paths = _paths(self.ax.trace.module)
        self.values: dict[Place, Value] = {}
        self.atoms: dict[Call, list[Term]] = {}
        found = (*self._equations(), *self._formulas())
        self.equations = [e for e in found if e.call.module not in rewritten]
        self.fixed = self._fixed()
        self.by_place: dict[Place, list[Equation]] = defaultdict(list)
        for e in self.equations:
            for a in attributes(e.expression):
                if (place := self.place(a, e.call)) is not None:
                    self.by_place[place].append(e)

    def solve(self) -> tuple[list[Edit], set[Call], dict[Call, str]]:
        unmet: dict[Call, str] = {}
        for e in self.equations:
            if e.call in unmet or self.met(e):
                continue
            if not self.repair(e):
                unmet[e.call] = f"{e.what} in its forward is given {spell(e.expression)}, which no attribute divides"
        for place in [p for p in self.values if any(not self.met(e) for e in self.by_place[p] if e.call not in unmet)]:
            for e in self.by_place[place]:
                unmet.setdefault(e.call, f"{place.attribute} counts more than one thing")
        edits = [self.edit(p, v) for p, v in self.values.items() if any(e.call not in unmet for e in self.by_place[p])]
        return edits, set(unmet), unmet

    def repair(self, e: Equation, depth: int = DEPTH) -> bool:
        """Edit a few attributes so that ``e``, and every other equation they are in, is met."""
        for place, value in self.candidates(e):
            self.values[place] = value
            if self.integral(value) and self.met(e):
                unmet = next((o for p in self.values for o in self.by_place[p] if not self.met(o)), None)
                if unmet is None or (depth > 1 and self.repair(unmet, depth - 1)):
                    return True
            del self.values[place]
        return False

    def candidates(self, e: Equation) -> Iterator[tuple[Place, Value]]:
        """Attributes of the equation that might be edited, each to count any of the axes cut in its forward."""
        terms = [e.term, *self.cut_in(e.call)]
        for a in sorted(attributes(e.expression), key=lambda a: a.name):
            place = self.place(a, e.call)
            if place is None or place in self.values or a in self.fixed:
                continue
            whole = self.whole(a)
            for term in terms:
                if leaves(term) & self.flow.cut_atoms and (whole % term.n == 0 or term.n % whole == 0):
                    yield place, Value(whole, term)

    def cut_in(self, call: Call) -> list[Term]:
        """The cut atoms that the sites of a call's own ops are made of, and the products of nested ones."""
        if call not in self.atoms:
            found = {a for e in self.equations if e.call is call for a in leaves(e.term) & self.flow.cut_atoms}
            nested = [P(self.nested[a], a) for a in found if self.nested.get(a) in found]
            self.atoms[call] = [*sorted(found, key=lambda a: -a.n), *nested]
        return self.atoms[call]

    def integral(self, value: Value) -> bool:
        return all(value.whole * self.deal.size(value.term, r) % value.term.n == 0 for r in range(self.deal.tp))

    def met(self, e: Equation) -> bool:
        """Whether the expression comes to the local size on the ranks looked at."""
        for rank in self.ranks:

            def value(a: Attribute, rank: int = rank) -> int:
                place = self.place(a, e.call)
                return self.values[place].local(self.deal, rank) if place in self.values else self.whole(a)

            def dim(node: fx.Node, i: int, rank: int = rank) -> int:
                term = self.ax.of(node)[i]
                return self.deal.size(term, rank) if node in self.flow.cut else term.n

            try:
                if evaluate(e.expression, value, dim) != e.sign * self.deal.size(e.term, rank):
                    return False
            except ZeroDivisionError:
                return False
        return True

    def place(self, a: Attribute, call: Call) -> Place | None:
        """Where an attribute is edited: on its module, or on the copy of its object that the reading module holds."""
        item = "" if a.item is None else f".{a.item}"
        if a.owner in self.paths:
            return Place(self.paths[a.owner], a.name + item)
        module = self.ax.trace.module.get_submodule(call.module) if not call.module.startswith("?") else None
        for held, owner in held_objects(module) if module is not None else ():
            if id(owner) == a.owner:
                return Place(call.module, f"{held}.{a.name}{item}")
        return None

    def whole(self, a: Attribute) -> int:
        value = getattr(self.ax.trace.owners[a.owner], a.name)
        return int(value if a.item is None else value[a.item])

    def _equations(self) -> list[Equation]:
        """One for each site; where nothing is cut, the integer must stay what it is."""
        out = []
        for node, sites in self.ax.sites.items():
            local = is_local(self.flow, node)
            for site in sites:
                value = argument(node, site.path)
                cut = local and bool(leaves(site.term) & self.flow.cut_atoms)
                if isinstance(value, int) and (cut or isinstance(value, Int)) and node.meta["call"] is not None:
                    term = site.term if cut else V(abs(int(value)))
                    out.append(Equation(node.meta["op"], node.meta["call"], expression(value), term, site.sign))
        return out

    def _formulas(self) -> Iterator[Equation]:
        """One for each formula that several integers fed together, which must come to what they were."""
        for call in self.ax.trace.calls:
            for made in dict.fromkeys(call.fed):
                if is_joint(made) and (whole := evaluate(made, self.whole, lambda node, i: self.ax.of(node)[i].n)):
                    yield Equation("a formula", call, made, V(abs(whole)), 1 if whole > 0 else -1)

    def _fixed(self) -> set[Attribute]:
        """Attributes that must keep their value: they fed a formula, or an op as a value."""
        joint = {f for call in self.ax.trace.calls for f in call.fed if is_joint(f)}
        fixed = {a for f in self.ax.trace.formulas if f not in joint for a in attributes(f)}
        for node in self.ax.trace.nodes:
            known = {s.path for s in self.ax.sites.get(node, ())}
            for path, value in integers((node.args, node.kwargs)):
                if path not in known and node.meta["op"] not in SHAPES:
                    fixed |= attributes(value.expression)
        return fixed

    def edit(self, place: Place, value: Value) -> Edit:
        term, per = value.term, ()
        inner = leaves(term) & set(self.nested)
        if inner and not leaves(term) & {self.nested[a] for a in inner}:
            outer = self.nested[next(iter(inner))]
            term, per = P(outer, term), (Block(outer.n),)
        if value.whole % value.term.n == 0:
            rows = blocks(P(term, V(value.whole // value.term.n)) if value.whole != value.term.n else term, self.chosen)
        else:
            rows, per = blocks(term, self.chosen), (*per, Block(1, value.term.n // value.whole))
        return Edit(place.module, place.attribute, value.whole, rows, per)

    @property
    def chosen(self) -> set[Term]:
        return {*self.flow.cut_atoms, *self.nested}


SHAPES = frozenset(["view", "reshape", "expand", "flatten", "unflatten", "zeros", "ones", "empty"])
"""Ops whose every integer is a size: one that is no site there is whole."""


def is_joint(made: Expression) -> bool:
    """Whether an integer was made from an attribute and something else that may be cut with it."""
    return isinstance(made, tuple) and made[0] != "dim" and bool(attributes(made))


def _paths(module: nn.Module) -> dict[int, str]:
    out: dict[int, str] = {}
    for path, m in module.named_modules(remove_duplicate=False):
        out.setdefault(id(m), path)
    return out


SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%",
    "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "gt": ">", "ge": ">=",
}  # fmt: skip


def spell(expr: Expression | float) -> str:
    """An expression, or a comparison of two, in words."""
    if isinstance(expr, int | float):
        return f"the literal {expr}"
    if isinstance(expr, Attribute):
        return expr.name
    if expr[0] == "dim":
        return f"size({expr[2]})"
    return f"{spell(expr[1])} {SIGNS[expr[0].__name__]} {spell(expr[2])}"
