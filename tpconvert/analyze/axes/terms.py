"""Size terms: what every dim of every tensor is made of, and unification over them.

A term is an atom, a product (outer to inner), or a sum of segments::

    V(n)             n indices of one thing: heads, a hidden width, the vocabulary
    P(t1, .., tk)    a flattened (t1, .., tk):     heads x head_dim
    S(t1, .., tk)    t1 .. tk one behind another:  q | k | v

Ops relate terms: two dims that meet must be the same term.  Unification makes them so, refining atoms as
it goes, as type inference does with type variables.  Refinement binds an atom to a product or a sum of new
atoms, so that every term which already mentions it is refined too.

Four primitives do all the work: :func:`atoms`, :func:`unify`, :func:`peel` and :func:`cut`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tpconvert.spec.layout import Block


class UnalignedError(Exception):
    """Two terms do not fit together: factors that do not nest, or a cut inside a factor."""


class Term:
    """One dim.  ``kind`` is ``V``, ``P`` or ``S``; ``ref`` is what an atom was bound to (union-find)."""

    __slots__ = ("kind", "n", "parts", "ref")

    def __init__(self, kind: str, n: int, parts: Iterable[Term] = ()) -> None:
        self.kind = kind
        self.n = n
        self.parts = tuple(parts)
        self.ref: Term | None = None

    def __repr__(self) -> str:
        term = find(self)
        if term.kind == "V":
            return f"{term.n}"
        return "(" + ("*" if term.kind == "P" else "|").join(map(repr, term.parts)) + ")"


def V(n: int) -> Term:
    """A new atom of ``n`` indices."""
    return Term("V", int(n))


def P(*terms: Term) -> Term:
    """The product of ``terms``, outer to inner."""
    return terms[0] if len(terms) == 1 else Term("P", math.prod(t.n for t in terms), terms)


def S(*terms: Term) -> Term:
    """The sum of ``terms``, in order; empty ones vanish."""
    filled = [t for t in terms if t.n]
    if len(filled) == 1:
        return filled[0]
    return Term("S", sum(t.n for t in filled), filled) if filled else V(0)


def find(term: Term) -> Term:
    """What ``term`` is now."""
    while term.ref is not None:
        term = term.ref
    return term


def atoms(term: Term) -> list[Term]:
    """The product normal form: atoms and sums of more than one index, outer to inner."""
    term = find(term)
    if term.n == 1:
        return []
    if term.kind == "P":
        return [a for part in term.parts for a in atoms(part)]
    return [term]


def segments(term: Term) -> list[Term]:
    """The sum normal form."""
    term = find(term)
    if term.kind != "S":
        return [term]
    out, left, nested = [], [*term.parts[::-1]], False
    while left:
        part = find(left.pop())
        if part.kind == "S":
            left += part.parts[::-1]
            nested = True
        else:
            out.append(part)
    if nested:  # what was refined again and again would lie ever deeper
        term.parts = tuple(out)
    return out


def leaves(term: Term) -> set[Term]:
    """All atoms at or below ``term``."""
    out: set[Term] = set()
    for atom in atoms(term):
        if atom.kind == "V":
            out.add(atom)
        else:
            for part in segments(atom):
                out |= leaves(part)
    return out


def unify(a: Term, b: Term) -> None:
    """Make two terms of one size the same term, refining atoms where needed.

    Raises UnalignedError where their factors or segments do not nest.
    """
    if find(a) is find(b):
        return
    if a.n != b.n:
        raise UnalignedError(f"sizes {a.n} and {b.n} differ")
    left, right = atoms(a), atoms(b)
    while left and right:
        x, y = find(left.pop()), find(right.pop())
        if x.kind == "P" or y.kind == "P":
            left += atoms(x)
            right += atoms(y)
        elif x is y:
            continue
        elif x.n == y.n:
            _merge(x, y)
        elif x.n > y.n and x.n % y.n == 0:
            left.append(peel(x, y))
        elif y.n > x.n and y.n % x.n == 0:
            right.append(peel(y, x))
        else:
            raise UnalignedError(f"factors {x.n} and {y.n} do not nest")


def peel(term: Term, inner: Term) -> Term:
    """Refine an atom or sum into ``outer * inner`` and return ``outer``."""
    if term.kind == "V":
        outer = V(term.n // inner.n)
        _bind(term, P(outer, inner))
        return outer
    outers = []
    for segment in segments(term):
        if segment.n % inner.n:
            raise UnalignedError(f"a segment of {segment.n} is no multiple of the inner factor {inner.n}")
        outer = V(segment.n // inner.n)
        unify(segment, P(outer, inner))
        outers.append(outer)
    outer = S(*outers)
    if find(term) is term:
        _bind(term, P(outer, inner))
    return outer


def cut(term: Term, at: int) -> tuple[Term, Term]:
    """``(first at indices, the rest)`` of a dim, refining it so that a segment ends there."""
    term = find(term)
    if at == 0:
        return V(0), term
    if at == term.n:
        return term, V(0)
    factors = atoms(term)
    if len(factors) > 1:
        inner = math.prod(a.n for a in factors[1:])
        if at % inner:
            raise UnalignedError(f"a cut at {at} falls inside the inner factor {inner}")
        left, right = cut(factors[0], at // inner)
        return P(left, *factors[1:]), P(right, *factors[1:])
    return _cut_segments(factors[0], at)


def _cut_segments(term: Term, at: int) -> tuple[Term, Term]:
    if term.kind == "V":
        left, right = V(at), V(term.n - at)
        _bind(term, S(left, right))
        return left, right
    before: list[Term] = []
    offset = 0
    parts = segments(term)
    for i, segment in enumerate(parts):
        if offset == at:
            return S(*before), S(*parts[i:])
        if offset + segment.n > at:
            left, right = cut(segment, at - offset)
            return S(*before, left), S(right, *parts[i + 1 :])
        before.append(segment)
        offset += segment.n
    raise AssertionError("a cut beyond the end")


def _merge(x: Term, y: Term) -> None:
    """Make two atoms or sums of one size the same."""
    if x.kind == "V":
        _bind(x, y)
    elif y.kind == "V":
        _bind(y, x)
    else:
        rest = y
        for segment in segments(x)[:-1]:
            left, rest = cut(rest, segment.n)
            unify(segment, left)
        unify(segments(x)[-1], rest)
        x, y = find(x), find(y)
        if x is not y and x.kind == "S":
            _bind(x, y)


def _bind(atom: Term, term: Term) -> None:
    if _occurs(atom, term):
        raise UnalignedError(f"an axis of {atom.n} would contain itself")
    atom.ref = term


def _occurs(atom: Term, term: Term) -> bool:
    return any(a is atom or (a.kind == "S" and any(_occurs(atom, s) for s in segments(a))) for a in atoms(term))


def products(terms: Sequence[Term]) -> tuple[set[Term], set[tuple[Term, Term]]]:
    """``(atoms, pairs of atoms that multiply each other)`` in one tensor with these dims.

    An atom paired with itself stands twice in the tensor, as in an attention mask of T x T.
    """
    groups: list[set[Term]] = []
    pairs: set[tuple[Term, Term]] = set()
    for term in terms:
        for atom in atoms(term):
            if atom.kind == "V":
                group = {atom}
            else:
                group = set()
                for segment in segments(atom):
                    below, inside = products([segment])
                    group |= below
                    pairs |= inside
            pairs |= {(x, y) for other in groups for x in other for y in group}
            groups.append(group)
    return set().union(*groups), pairs


def half_cut(term: Term, chosen: set[Term]) -> set[Term]:
    """The chosen atoms below a sum of which another segment has none: that segment would be held by every rank."""
    for atom in atoms(term):
        if atom.kind == "S":
            hits = [leaves(s) & chosen for s in segments(atom)]
            if any(hits) and not all(hits):
                return set().union(*hits)
            for segment in segments(atom):
                if inner := half_cut(segment, chosen):
                    return inner
    return set()


def fraction(term: Term, chosen: set[Term]) -> float:
    """The fraction of a dim's indices that is cut when ``chosen`` are."""
    best = 0.0
    for atom in atoms(term):
        if atom in chosen:
            return 1.0
        if atom.kind == "S":
            best = max(best, sum(fraction(s, chosen) * s.n for s in segments(atom)) / atom.n)
    return best


def blocks(term: Term, chosen: set[Term]) -> tuple[Block, ...]:
    """The layout of a dim when ``chosen`` atoms are cut, the same for every degree."""
    return _join(_blocks(atoms(term), chosen))


def _blocks(factors: list[Term], chosen: set[Term]) -> list[Block]:
    rows = math.prod(f.n for f in factors)
    if not any(leaves(f) & chosen for f in factors):
        return [Block(1, rows)] if rows else []
    first, rest = factors[0], factors[1:]
    if first.kind == "S":
        return [b for s in segments(first) for b in _blocks([*atoms(s), *rest], chosen)]
    if first not in chosen:
        return _blocks(rest, chosen) * first.n
    if any(leaves(f) & chosen for f in rest):
        return [Block(first.n, _join(_blocks(rest, chosen)))]
    return [Block(first.n, math.prod(f.n for f in rest))]


def _join(parts: list[Block]) -> tuple[Block, ...]:
    """Neighbouring whole blocks become one."""
    out: list[Block] = []
    for block in parts:
        if out and block.count == 1 == out[-1].count and isinstance(block.unit, int) and isinstance(out[-1].unit, int):
            out[-1] = Block(1, out[-1].unit + block.unit)
        else:
            out.append(block)
    return tuple(out)
