"""Size terms against plain index arithmetic: every term is followed by an array of coordinates."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tpconvert.analyze.axes.dealing import Deal
from tpconvert.analyze.axes.terms import (
    P,
    S,
    Term,
    UnalignedError,
    V,
    atoms,
    blocks,
    cut,
    find,
    fraction,
    half_cut,
    leaves,
    peel,
    products,
    segments,
    unify,
)
from tpconvert.spec.layout import Layout, share

checked = settings(deadline=None, max_examples=150)


# -- chains of ops on a tensor of coordinates ----------------------------------------------------------------------


class Tensor:
    """Dims as terms, beside an array that holds, for every entry, its flat index in the tensor it came from."""

    def __init__(self, dims: list[Term], entries: np.ndarray) -> None:
        self.dims, self.entries = dims, entries

    def joined(self, i: int) -> Tensor:
        shape = self.entries.shape
        merged = self.entries.reshape(*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
        return Tensor([*self.dims[:i], P(self.dims[i], self.dims[i + 1]), *self.dims[i + 2 :]], merged)

    def refined(self, i: int, inner: int) -> Tensor:
        outer_term, inner_term = V(self.dims[i].n // inner), V(inner)
        unify(self.dims[i], P(outer_term, inner_term))
        shape = self.entries.shape
        entries = self.entries.reshape(*shape[:i], shape[i] // inner, inner, *shape[i + 1 :])
        return Tensor([*self.dims[:i], outer_term, inner_term, *self.dims[i + 1 :]], entries)

    def sliced(self, i: int, at: int, first: bool) -> Tensor:
        left, right = cut(self.dims[i], at)
        keep = slice(None, at) if first else slice(at, None)
        term = left if first else right
        return Tensor([*self.dims[:i], term, *self.dims[i + 1 :]], self.entries[(slice(None),) * i + (keep,)])

    def swapped(self, i: int) -> Tensor:
        """The two parts of a dim in the other order, as rotating a half does."""
        at = self.dims[i].n // 2
        left, right = cut(self.dims[i], at)
        a, b = np.split(self.entries, [at], axis=i)
        dims = [*self.dims[:i], S(right, left), *self.dims[i + 1 :]]
        return Tensor(dims, np.concatenate([b, a], axis=i))

    def moved(self, i: int) -> Tensor:
        order = [*range(len(self.dims))]
        order[i], order[i + 1] = order[i + 1], order[i]
        return Tensor([self.dims[k] for k in order], self.entries.transpose(order))


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Term], list[Tensor]]:
    """``(dims of a first tensor, that tensor and those made from it)``."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 4, 6, 12]), min_size=1, max_size=3))
    first = Tensor([V(n) for n in sizes], np.arange(math.prod(sizes)).reshape(sizes))
    made = [first]
    for _ in range(draw(st.integers(1, 6))):
        now = made[-1]
        i = draw(st.integers(0, len(now.dims) - 1))
        n = now.dims[i].n
        kind = draw(st.sampled_from(["join", "refine", "slice", "swap", "move"]))
        try:
            if kind in ("join", "move") and i + 1 < len(now.dims):
                made.append(now.joined(i) if kind == "join" else now.moved(i))
            elif kind == "refine" and n > 1:
                made.append(now.refined(i, draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))))
            elif kind == "slice" and n > 1:
                made.append(now.sliced(i, draw(st.integers(1, n - 1)), draw(st.booleans())))
            elif kind == "swap" and n > 1:
                made.append(now.swapped(i))
        except UnalignedError:
            assume(False)
    return first.dims, made


def flat_coordinates(term: Term) -> dict[Term, np.ndarray]:
    """For each leaf, its coordinate at every index of a dim; -1 where the index is in another segment."""
    size, out, stride = find(term).n, {}, 1
    index = np.arange(size)
    for factor in reversed(atoms(term)):
        here = index // stride % factor.n
        stride *= factor.n
        if factor.kind == "V":
            out[factor] = here
            continue
        start = 0
        for segment in segments(factor):
            inside = (here >= start) & (here < start + segment.n)
            for leaf, values in flat_coordinates(segment).items():
                column = out.setdefault(leaf, np.full(size, -1))
                column[inside] = values[here[inside] - start]
            start += segment.n
    return out


@checked
@given(chains(), st.integers(1, 4), st.data())
def test_a_rank_holds_just_the_indices_whose_coordinate_is_in_its_share(chain, tp: int, data: st.DataObject) -> None:
    _, made = chain
    everything = sorted({leaf for t in made for term in t.dims for leaf in leaves(term)}, key=lambda a: a.n)
    assume(everything)
    atom = data.draw(st.sampled_from(everything))
    assume(atom.n >= tp)
    deal = Deal(tp, {atom: (tp, 1)})
    for tensor in made:
        for term in tensor.dims:
            mine = flat_coordinates(term)
            for rank in range(tp):
                first, last = share(atom.n, rank, tp)
                column = mine.get(atom, np.full(term.n, -1))
                keep = (column == -1) | ((column >= first) & (column < last))
                expected = np.flatnonzero(keep).tolist()
                assert deal.index(term, rank).tolist() == expected
                assert deal.size(term, rank) == len(expected)
                if atom in leaves(term):
                    pieces = Layout(0, blocks(term, {atom})).pieces(rank, tp)
                    assert [i for a, b in pieces for i in range(a, b)] == expected


@checked
@given(chains(), st.integers(2, 4), st.data())
def test_all_tensors_of_a_chain_are_cut_along_the_same_entries(chain, tp: int, data: st.DataObject) -> None:
    """What a rank holds of a derived tensor is what its ops make of what it holds of the first."""
    dims, made = chain
    atom = data.draw(st.sampled_from(sorted({x for t in dims for x in leaves(t)}, key=lambda a: a.n) or [V(1)]))
    assume(atom.n >= tp)
    deal = Deal(tp, {atom: (tp, 1)})
    first = made[0]
    if half_cut(P(*dims), {atom}):
        return  # a whole segment is on every rank
    for rank in range(tp):
        held = set(first.entries[np.ix_(*(deal.index(t, rank).numpy() for t in dims))].ravel().tolist())
        for tensor in made[1:]:
            here = tensor.entries[np.ix_(*(deal.index(t, rank).numpy() for t in tensor.dims))]
            assert set(here.ravel().tolist()) == held & set(tensor.entries.ravel().tolist())


# -- unification ---------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn, size: int, depth: int = 2) -> object:
    """A recipe for a term of this size, so that it can be built twice."""
    divisors = [d for d in range(2, size) if size % d == 0]
    kinds = ["atom"] + (["product"] if divisors and depth else []) + (["sum"] if size > 1 and depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "atom":
        return size
    if kind == "product":
        outer = draw(st.sampled_from(divisors))
        return "P", draw(trees(outer, depth - 1)), draw(trees(size // outer, depth - 1))
    at = draw(st.integers(1, size - 1))
    return "S", draw(trees(at, depth - 1)), draw(trees(size - at, depth - 1))


def term(tree: object) -> Term:
    if isinstance(tree, int):
        return V(tree)
    kind, *parts = tree  # type: ignore[misc]
    return (P if kind == "P" else S)(*map(term, parts))


PAIRS = st.sampled_from([4, 6, 8, 12, 24]).flatmap(lambda n: st.tuples(trees(n), trees(n)))


@checked
@given(PAIRS)
def test_unifying_makes_two_terms_the_same_whichever_comes_first(pair) -> None:
    seen = []
    for swap in (False, True):
        a, b = term(pair[0]), term(pair[1])
        try:
            unify(*((b, a) if swap else (a, b)))
        except UnalignedError:
            seen.append("unaligned")
            continue
        assert {id(x) for x in leaves(a)} == {id(x) for x in leaves(b)}
        everyone = {leaf: (3, 1) for leaf in leaves(a) if leaf.n >= 3}
        for rank in range(3):
            assert Deal(3, everyone).index(a, rank).tolist() == Deal(3, everyone).index(b, rank).tolist()
        seen.append("same")
    assert seen[0] == seen[1]


@checked
@given(PAIRS)
def test_unifying_a_second_time_changes_nothing(pair) -> None:
    a, b = term(pair[0]), term(pair[1])
    try:
        unify(a, b)
    except UnalignedError:
        assume(False)
    before = repr(a), repr(b), leaves(a)
    unify(a, b)
    unify(b, a)
    unify(a, a)
    assert (repr(a), repr(b), leaves(a)) == before


def test_terms_of_different_sizes_do_not_unify() -> None:
    with pytest.raises(UnalignedError, match="sizes 6 and 8 differ"):
        unify(V(6), V(8))


def test_factors_that_do_not_nest_are_named() -> None:
    with pytest.raises(UnalignedError, match="factors 6 and 4 do not nest"):
        unify(P(V(2), V(6)), P(V(3), V(4)))


def test_a_refinement_made_later_reaches_terms_made_earlier() -> None:
    heads = V(12)
    earlier = P(heads, V(5))
    unify(heads, P(V(4), V(3)))
    assert [a.n for a in atoms(earlier)] == [4, 3, 5]


# -- peel, cut -----------------------------------------------------------------------------------------------------


def test_peeling_takes_the_inner_factor_off_every_segment() -> None:
    inner = V(5)
    fused = S(V(20), V(10), V(10))
    outer = peel(fused, inner)
    assert [s.n for s in segments(outer)] == [4, 2, 2]
    assert atoms(fused)[-1] is inner


def test_peeling_a_segment_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(UnalignedError, match="a segment of 7 is no multiple of the inner factor 5"):
        peel(S(V(20), V(7)), V(5))


@checked
@given(st.integers(2, 30).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), max_size=5))))
def test_cutting_gives_segments_that_end_at_every_cut(case: tuple[int, list[int]]) -> None:
    size, places = case
    whole = V(size)
    for at in places:
        left, right = cut(whole, at)
        assert (find(left).n, find(right).n) == (at, size - at)
    ends = sorted({0, size, *places})
    assert [s.n for s in segments(whole)] == [b - a for a, b in pairwise(ends)]


def test_a_cut_inside_an_inner_factor_is_refused() -> None:
    with pytest.raises(UnalignedError, match="a cut at 7 falls inside the inner factor 5"):
        cut(P(V(4), V(5)), 7)


def test_a_cut_between_inner_factors_cuts_the_outer_one() -> None:
    heads, width = V(4), V(5)
    left, right = cut(P(heads, width), 15)
    assert (left.n, right.n) == (15, 5)
    assert [s.n for s in segments(heads)] == [3, 1]


# -- what a choice makes of a term ---------------------------------------------------------------------------------


def test_a_sum_of_which_one_segment_is_cut_is_half_cut() -> None:
    a, b = V(4), V(6)
    assert half_cut(S(a, b), {a}) == {a}
    assert half_cut(S(a, b), {a, b}) == set()
    assert half_cut(P(V(2), S(P(a, V(3)), b)), {b}) == {b}
    assert half_cut(P(a, b), {a}) == set()


def test_the_fraction_cut_counts_segments() -> None:
    a, b = V(4), V(12)
    assert fraction(S(a, b), {a}) == 0.25
    assert fraction(P(S(a, b), V(3)), {b}) == 0.75
    assert fraction(P(a, b), {b}) == 1.0
    assert fraction(a, {b}) == 0.0


def test_an_axis_that_meets_itself_in_one_tensor_is_found() -> None:
    length, heads = V(7), V(3)
    found, pairs = products([heads, length, length])
    assert found == {length, heads}
    assert (length, length) in pairs
    assert (heads, heads) not in pairs
    assert (heads, length) in pairs


def test_segments_beside_each_other_do_not_multiply() -> None:
    q, k, width = V(6), V(4), V(5)
    _, pairs = products([P(S(q, k), width)])
    assert {(q, width), (k, width)} <= pairs
    assert not pairs & {(q, k), (k, q)}


GROUPS = [(2, 4, 3), (1, 8, 2), (4, 2, 5), (2, 6, 1), (8, 1, 3)]


@pytest.mark.parametrize(
    ("tp", "kv", "rep", "width"),
    [(tp, kv, rep, w) for tp in range(1, 9) for kv, rep, w in GROUPS if kv >= tp or (tp % kv == 0 and rep >= tp // kv)],
)
def test_grouped_heads_are_dealt_by_layout_as_by_index(tp: int, kv: int, rep: int, width: int) -> None:
    outer, inner = V(kv), V(rep)
    query, key = P(outer, inner, V(width)), P(outer, V(width))
    fused = P(outer, S(P(inner, V(width)), V(width), V(width)))
    shares = {outer: (tp, 1)} if kv >= tp else {outer: (kv, tp // kv), inner: (tp // kv, 1)}
    deal = Deal(tp, shares)
    for t in (query, key, fused):
        layout = Layout(0, blocks(t, {outer, inner}))
        for rank in range(tp):
            mine = [i for a, b in layout.pieces(rank, tp) for i in range(a, b)]
            assert mine == deal.index(t, rank).tolist()
    held = [i for r in range(tp) for i in deal.index(query, r).tolist()]
    assert sorted(held) == list(range(kv * rep * width))


def test_a_dim_that_is_refined_again_and_again_stays_shallow() -> None:
    """Windows that overlap: the dim shifted by one is the dim itself."""
    dim = V(6000)
    rest = dim
    for _ in range(2999):
        _, rest = cut(rest, 2)
    assert len(segments(dim)) == 3000 and len(leaves(dim)) == 3000
    other = V(6000)
    unify(dim, other)
    assert find(other) is find(dim)
