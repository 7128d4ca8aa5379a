"""Which axes to cut: candidates, what excludes what, and the best set in each component.

A candidate is an atom that parameters carry, that nothing blocks, and of which every way out is a contraction or the
model's output.  Two candidates exclude each other where they multiply each other in some tensor.  The exclusions fall
into small components (a layer's attention, a layer's mlp, the vocabulary), each solved exactly.

The weight of an axis is the parameters it cuts, less the elements it sends per token times the width at which the two
break even (:mod:`tpconvert.analyze.choice.costs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from tpconvert.analyze.axes.dealing import Deal
from tpconvert.analyze.axes.run import Axes, flat
from tpconvert.analyze.axes.terms import Term, atoms, find, leaves
from tpconvert.analyze.choice.costs import Costs
from tpconvert.analyze.flow.run import ConflictError, Flow, trace_flow

WIDE = 4
"""Axes that one must exclude to be compared with all of them together."""
DEAR = "it would send more than it saves"


@dataclass(slots=True, eq=False)
class Candidate:
    """An axis that might be cut."""

    atom: Term
    inner: tuple[Term, ...] = ()
    """Atoms it is cut on with when there are more ranks than its units: the query heads of each kv head."""
    weight: float = 0.0
    computed: float = 0.0
    """Of what it saves, the products: not tables that rows are looked up in."""


@dataclass(slots=True, eq=False)
class Choice:
    """The chosen axes, their flow, and why others were not chosen."""

    chosen: list[Candidate]
    flow: Flow
    deal: Deal
    rejected: dict[Term, str] = field(default_factory=dict)


def choose(
    ax: Axes,
    tp: int,
    *,
    forbidden: Mapping[Term, str] | None = None,
    pinned: Iterable[str] = (),
    inline: frozenset[fx.Node] = frozenset(),
    early: frozenset[str] = frozenset(),
) -> Choice:
    """The best set of axes at this degree.

    ``forbidden`` atoms are not cut, for the reason given; ``pinned`` parameters stay whole; ``inline`` and ``early``
    are those of :func:`tpconvert.analyze.flow.run.trace_flow`.
    """
    rejected: dict[Term, str] = dict(forbidden or {})
    keep = set(pinned)
    for atom, carriers in ax.carriers.items():
        if any(name in keep for name, _ in carriers):
            rejected[atom] = "the user keeps a parameter of this axis whole"
    costs = Costs(ax)

    def settled(candidates: list[Candidate]) -> Settled:
        return _settled(ax, tp, candidates, inline, early)

    found = _without_dear(costs, _candidates(costs, tp, rejected), settled)
    rejected |= found.dropped
    for c in found.left:
        if c not in found.chosen and c.atom not in rejected:
            rejected[c.atom] = "another axis of the same layer cuts more for less communication"
    return Choice(found.chosen, found.flow, found.deal, rejected)


@dataclass(slots=True)
class Settled:
    """The best set of some candidates that can be cut together."""

    chosen: list[Candidate]
    flow: Flow
    deal: Deal
    left: list[Candidate]
    """The candidates that could be cut."""
    dropped: dict[Term, str]
    """Why the others cannot."""


def _settled(
    ax: Axes, tp: int, candidates: list[Candidate], inline: frozenset[fx.Node], early: frozenset[str]
) -> Settled:
    dropped: dict[Term, str] = {}
    while True:
        chosen = _best(ax, candidates)
        deal = Deal(tp, {a: s for c in chosen for a, s in shares(c, tp).items()})
        try:
            return Settled(chosen, trace_flow(ax, deal.shares, inline, early), deal, candidates, dropped)
        except ConflictError as conflict:
            out = [c for c in chosen if {c.atom, *c.inner} & conflict.atoms] or chosen
            dropped |= {c.atom: conflict.why for c in out}
            candidates = [c for c in candidates if c not in out]  # what they excluded may be cut now


def _without_dear(costs: Costs, candidates: list[Candidate], settled: Callable[[list[Candidate]], Settled]) -> Settled:
    """The best set, without candidates that are better replaced by the several axes they exclude.

    An axis that runs through many layers (the width of the model, where norms are means) is weighed by itself against
    axes whose sums may turn out to be one and the same.  So the collectives of both choices are found and counted.
    """
    found = settled(candidates)
    for wide in list(found.chosen):
        excluded = [c for c in candidates if c.atom in costs.ax.multiplies.get(wide.atom, ())]
        if len(excluded) < WIDE:
            continue
        others = [c for c in candidates if c is not wide]
        narrow = settled(others)
        if _worth(costs, narrow) >= _worth(costs, found):
            candidates, found = others, narrow
    return found


def _worth(costs: Costs, found: Settled) -> float:
    """What a choice saves, less what its collectives cost.

    A parameter that is cut saves a product for each token, and so does a product of two values (attention's scores).
    """
    return sum(c.computed for c in found.chosen) + costs.shared(found.flow) - costs.placed(found.flow)


def _candidates(costs: Costs, tp: int, rejected: dict[Term, str]) -> list[Candidate]:
    ax = costs.ax
    found = []
    leaving = [*ax.trace.outputs.values(), *ax.parts]
    outputs = {a for n in leaving for t in flat(ax.dims[n]) for a in leaves(t)}
    for atom, carriers in ax.carriers.items():
        if atom in rejected or find(atom) is not atom:
            continue
        weights = {name for name, _ in carriers if ax.trace.parameters[name].meta["grad"]}
        if not any(len(ax.trace.parameters[n].meta["shape"]) > 1 for n in weights):
            if any(len(ax.trace.parameters[n].meta["shape"]) > 1 for n, _ in carriers) and not ax.blocked.get(atom):
                rejected[atom] = "the matrices that carry it take no gradient (buffers, quantized weights)"
            continue
        if ax.blocked.get(atom):
            continue
        if not ax.contracted.get(atom) and atom not in outputs:
            rejected[atom] = "nothing contracts it"
            continue
        if _used_twice(ax, atom):
            rejected[atom] = "two dims of one parameter carry it"
            continue
        candidate = Candidate(atom)
        candidate.computed = costs.saved(atom) - costs.looked_up(atom)
        inner = inner_atom(ax, atom)
        candidate.inner = (inner,) if inner is not None else ()
        if not dealable(candidate, tp):
            rejected[atom] = f"its {atom.n} units cannot be dealt to {tp} ranks ({degrees(candidate)} would do)"
            continue
        if coarse := _grain(ax, candidate, tp):
            rejected[atom] = coarse
            continue
        candidate.weight = costs.saved(atom) - costs.sent(atom)
        if candidate.weight > 0:
            found.append(candidate)
        else:
            rejected[atom] = DEAR
    return found


def degrees(candidate: Candidate) -> str:
    """The degrees an axis can be cut at, in words."""
    n = candidate.atom.n
    if not candidate.inner or candidate.inner[0].n < 2:
        return f"tp up to {n}"
    return f"tp up to {n}, or a multiple of {n} up to {n * candidate.inner[0].n},"


def dealable(candidate: Candidate, tp: int) -> bool:
    """Whether every rank gets at least one unit."""
    n = candidate.atom.n
    if n >= tp:
        return True
    return tp % n == 0 and bool(candidate.inner) and candidate.inner[0].n >= tp // n


def _grain(ax: Axes, candidate: Candidate, tp: int) -> str:
    """Why a kernel could not take the ranks' parts; empty where it can."""
    deal = Deal(tp, shares(candidate, tp))
    for term, multiple, node in ax.grains:
        if candidate.atom in leaves(term) and any(deal.size(term, r) % multiple for r in range(tp)):
            return f"{node.meta['op']} needs a multiple of {multiple} on each rank, {term.n} on {tp} ranks is not"
    return ""


def shares(candidate: Candidate, tp: int) -> dict[Term, tuple[int, int]]:
    """How its atoms are dealt at this degree (see :class:`Deal`)."""
    n = candidate.atom.n
    if n >= tp:
        return {candidate.atom: (tp, 1)}
    return {candidate.atom: (n, tp // n), candidate.inner[0]: (tp // n, 1)}


def inner_atom(ax: Axes, atom: Term) -> Term | None:
    """An axis that only ever stands right inside ``atom`` where parameters carry it, and leaves where it leaves."""
    best = None
    for other in ax.multiplies.get(atom, ()):
        if other.kind != "V" or ax.blocked.get(other) or not ax.carriers.get(other):
            continue
        names = {name for name, _ in ax.carriers[other]}
        if not names < {name for name, _ in ax.carriers[atom]} or ax.contracted.get(other) != ax.contracted.get(atom):
            continue
        if all(_stands_inside(ax, name, dim, atom, other) for name, dim in ax.carriers[other]):
            best = other if best is None or other.n > best.n else best
    return best


def _stands_inside(ax: Axes, name: str, dim: int, atom: Term, other: Term) -> bool:
    """Whether ``other`` is within the factor right after ``atom`` in one dim."""
    factors = atoms(ax.of(ax.trace.parameters[name])[dim])
    for i, factor in enumerate(factors[:-1]):
        if factor is atom:
            return other in leaves(factors[i + 1])
    return False


def _used_twice(ax: Axes, atom: Term) -> bool:
    names = [name for name, _ in ax.carriers[atom]]
    return len(names) != len(set(names))


def _best(ax: Axes, candidates: list[Candidate]) -> list[Candidate]:
    by_atom = {c.atom: c for c in candidates}
    edges = {
        c: {by_atom[o] for o in ax.multiplies.get(c.atom, ()) if o in by_atom and o is not c.atom} for c in candidates
    }
    return sorted(_independent(set(candidates), edges), key=candidates.index)


def _independent(left: set[Candidate], edges: dict[Candidate, set[Candidate]]) -> set[Candidate]:
    """The heaviest set with no edge inside: by components, branching on the vertex of most edges."""
    out: set[Candidate] = set()
    for component in _components(left, edges):
        if len(component) == 1:
            out |= component
            continue
        pivot = max(component, key=lambda c: (len(edges[c] & component), c.weight))
        if len(edges[pivot] & component) == len(component) - 1 and len(component) == 2:
            out.add(max(component, key=lambda c: c.weight))
            continue
        with_it = {pivot} | _independent(component - {pivot} - edges[pivot], edges)
        without = _independent(component - {pivot}, edges)
        out |= max(with_it, without, key=lambda s: sum(c.weight for c in s))
    return out


def _components(left: set[Candidate], edges: dict[Candidate, set[Candidate]]) -> list[set[Candidate]]:
    out = []
    rest = set(left)
    while rest:
        component: set[Candidate] = set()
        pending = [next(iter(rest))]
        while pending:
            c = pending.pop()
            if c in component:
                continue
            component.add(c)
            pending += list((edges[c] & rest) - component)
        out.append(component)
        rest -= component
    return out
