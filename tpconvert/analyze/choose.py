"""Which axes to cut: candidates, what excludes what, and the best set in each component.

A candidate is an atom that parameters carry, that nothing blocks, and of which every way out is a contraction or the
model's output.  Two candidates exclude each other where they multiply each other in some tensor.  The exclusions fall
into small components (a layer's attention, a layer's mlp, the vocabulary), each solved exactly.

The weight of an axis is the parameters it cuts, less the elements it sends per token times the width at which the two
break even.  Sizes made of the sequence count at a realistic length, not at the few tokens traced: at 16 tokens it
would look cheap to cut head_dim and sum the scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from tpconvert.analyze.axes import Axes, flat
from tpconvert.analyze.dealing import Deal
from tpconvert.analyze.flow import ConflictError, Flow, trace_flow
from tpconvert.analyze.terms import Term, atoms, find, fraction, leaves

TOKENS = 4096
"""The sequence length at which communication is weighed."""
WIDE = 4
"""Axes that one must exclude to be compared with all of them together."""
START = 0.4
"""What it costs to start a collective, in elements per token over the width at which sending breaks even.

All-reduces of 8, 32 and 128 MiB took 0.059, 0.136 and 0.465 ms on two H200: the start is worth 8 MiB, which is 1,000
elements for each of 4,096 tokens in bf16, where a model of width 4096 breaks even at some 2,700.
"""
DEAR = "it would send more than it saves"


@dataclass(slots=True, eq=False)
class Candidate:
    """An axis that might be cut."""

    atom: Term
    inner: tuple[Term, ...] = ()
    """Atoms it is cut on with when there are more ranks than its units: the query heads of each kv head."""
    weight: float = 0.0
    parameters: int = 0


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
    are those of :func:`tpconvert.analyze.flow.trace_flow`.
    """
    rejected: dict[Term, str] = dict(forbidden or {})
    keep = set(pinned)
    for atom, carriers in ax.carriers.items():
        if any(name in keep for name, _ in carriers):
            rejected[atom] = "the user keeps a parameter of this axis whole"
    candidates = _candidates(ax, tp, rejected)
    candidates = _without_dear(ax, tp, candidates, inline, early)
    while True:
        chosen = _best(ax, candidates)
        deal = _dealt(chosen, tp)
        try:
            flow = trace_flow(ax, deal.shares, inline, early)
            break
        except ConflictError as conflict:
            dropped = [c for c in chosen if {c.atom, *c.inner} & conflict.atoms] or chosen
            for c in dropped:
                rejected[c.atom] = conflict.why
            candidates = [c for c in candidates if c not in dropped]  # what they excluded may be cut now
    for c in candidates:
        if c not in chosen and c.atom not in rejected:
            rejected[c.atom] = "another axis of the same layer cuts more for less communication"
    return Choice(chosen, flow, deal, rejected)


def _dealt(chosen: Iterable[Candidate], tp: int) -> Deal:
    return Deal(tp, {a: s for c in chosen for a, s in shares(c, tp).items()})


def _without_dear(
    ax: Axes, tp: int, candidates: list[Candidate], inline: frozenset[fx.Node], early: frozenset[str]
) -> list[Candidate]:
    """The candidates without those that are better replaced by the several axes they exclude.

    An axis that runs through many layers (the width of the model, where norms are means) is weighed by itself against
    axes whose sums may turn out to be one and the same.  So the collectives of both choices are found and counted.
    """
    for wide in _best(ax, candidates):
        excluded = [c for c in candidates if c.atom in ax.multiplies.get(wide.atom, ())]
        if len(excluded) < WIDE:
            continue
        others = [c for c in candidates if c is not wide]
        narrow = _worth(ax, tp, _best(ax, others), inline, early)
        if narrow > -math.inf and narrow >= _worth(ax, tp, _best(ax, candidates), inline, early):
            candidates = others
    return candidates


def _worth(ax: Axes, tp: int, chosen: list[Candidate], inline: frozenset[fx.Node], early: frozenset[str]) -> float:
    """What a choice saves, less what its collectives cost: elements sent, and a start each; -inf where it cannot be.

    A parameter that is cut saves a product for each token, and so does a product of two values (attention's scores).
    """
    try:
        flow = trace_flow(ax, _dealt(chosen, tp).shares, inline, early)
    except ConflictError:
        return -math.inf
    rows, sequence = _tokens(ax)
    even = _break_even(ax)
    sent = sum(_elements(ax, p.node, sequence) / rows + START * even for p in flow.placed)
    shared = sum(_products(ax, term, node, sequence) for term, node in _of_values(ax) if node in flow.cut)
    return sum(c.parameters for c in chosen) + shared / rows - sent * even


def _of_values(ax: Axes) -> Iterator[tuple[Term, fx.Node]]:
    """``(dim summed over, op)`` of each product of values that no parameter takes part in."""
    for term, node in ax.contracts:
        if len(node.all_input_nodes) > 1 and not any(is_parameter(n) for n in node.all_input_nodes):
            yield term, node
    for node in ax.trace.nodes:
        if node.meta["op"] == "scaled_dot_product_attention":
            yield ax.of(ax.bound[node]["key"])[-2], node
            yield ax.of(ax.bound[node]["key"])[-2], node  # its scores, and its values weighted by them


def is_parameter(node: fx.Node) -> bool:
    """Whether a value is a parameter, cast or reshaped."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return bool(node.meta["op"] == "parameter")


def _products(ax: Axes, term: Term, node: fx.Node, sequence: set[Term]) -> float:
    """How many products an op adds up, at a realistic length."""
    return _elements(ax, node, sequence) * (TOKENS if leaves(term) & sequence else term.n)


def _candidates(ax: Axes, tp: int, rejected: dict[Term, str]) -> list[Candidate]:
    rows = _tokens(ax)
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
        candidate.parameters = _saved(ax, atom)
        inner = inner_atom(ax, atom)
        candidate.inner = (inner,) if inner is not None else ()
        if not dealable(candidate, tp):
            rejected[atom] = f"its {atom.n} units cannot be dealt to {tp} ranks ({degrees(candidate)} would do)"
            continue
        if coarse := _grain(ax, candidate, tp):
            rejected[atom] = coarse
            continue
        candidate.weight = candidate.parameters - _sent(ax, atom, rows) * _break_even(ax)
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


def _saved(ax: Axes, atom: Term) -> int:
    total = 0.0
    for name, dim in ax.carriers[atom]:
        node = ax.trace.parameters[name]
        total += math.prod(node.meta["shape"]) * fraction(ax.of(node)[dim], {atom})
    return int(total)


def _tokens(ax: Axes) -> tuple[float, set[Term]]:
    """``(rows that the widest-read weight is applied to, sequence atoms)``."""
    sequence: set[Term] = set()
    rows = 1.0
    for node in ax.trace.nodes:
        if node.meta["op"] == "input":
            whole = node.meta["val"].is_floating_point()
            dims = ax.of(node)
            rows = rows if whole else max(rows, math.prod(t.n for t in dims))
            for term in dims[1:-1] if whole else dims[1:]:
                sequence |= leaves(term)
    for term, node in ax.contracts:
        weights = [n for n in node.all_input_nodes if n.meta["op"] == "parameter" and len(n.meta["shape"]) > 1]
        if weights and node not in ax.lookups:
            rows = max(rows, *(term.n * math.prod(node.meta["shape"]) / math.prod(w.meta["shape"]) for w in weights))
    return rows, sequence


def _sent(ax: Axes, atom: Term, tokens: tuple[float, set[Term]]) -> float:
    """Elements sent per token because of this axis."""
    rows, sequence = tokens
    nodes = set(ax.contracted.get(atom, ()))
    for node in ax.trace.outputs.values():
        if any(atom in leaves(t) for t in ax.of(node)):
            nodes.add(node)
    total = 0.0
    for node in nodes - ax.parts.keys():
        total += _elements(ax, node, sequence) / rows
    for node in ax.parts:
        if any(atom in leaves(t) for t in ax.of(node)):
            total += _joining(ax, node, tokens)
    return total


def joining_pays(ax: Axes, weight: fx.Node, result: fx.Node) -> bool:
    """Whether a layer is worth cutting by itself: a rank's part of its weight for a gather of what it returns."""
    sent = _joining(ax, result, _tokens(ax))
    return math.prod(weight.meta["shape"]) > sent * _break_even(ax)


def _joining(ax: Axes, result: fx.Node, tokens: tuple[float, set[Term]]) -> float:
    """Elements sent per token to cut a layer by itself, in those of a sum forward and one backward.

    A gather forward sends half of what a sum does and nothing backward; the gradient of what the layer is given is
    summed.  And a collective more has to start.
    """
    rows, sequence = tokens
    given = max((_elements(ax, n, sequence) for n in result.meta["call"].inputs.values()), default=0.0)
    return _elements(ax, result, sequence) / rows / 4 + given / rows / 2 + START * _break_even(ax)


def _elements(ax: Axes, node: fx.Node, sequence: set[Term]) -> float:
    size = float(math.prod(node.meta["shape"]))
    times = [a.n for t in ax.of(node) for a in atoms(t) if leaves(a) & sequence]
    for n in times[1:]:
        size *= max(1.0, TOKENS / n)
    return size


def _break_even(ax: Axes) -> float:
    """Half of the width that the model's layers usually contract: parameters worth one element sent."""
    widths = []
    for term, node in ax.contracts:
        weighted = any(n.meta["op"] == "parameter" and len(n.meta["shape"]) > 1 for n in node.all_input_nodes)
        if weighted and term.n > 1 and node not in ax.lookups:
            widths.append(math.log(term.n))
    return 0.5 * math.exp(sum(widths) / len(widths)) if widths else 0.0


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
