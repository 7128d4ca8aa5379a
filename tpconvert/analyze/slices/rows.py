"""Whether the tokens of all sequences may be shared out in one row, rather than those of each sequence.

Where what lies between regions takes every token by itself, it makes no difference which of them a rank has, nor
which sequence it takes them to be of.  Then a rank's slice can be a run of memory::

    sequences  a b c d | e f g h      of each its share:  rank 0 has a b, e f      gathered, slices have to be sorted
                                      of all rows:        rank 0 has a b c d       gathered, they are in order

Not so where a value has the tokens and not the sequences, as positions that are added to all of them, or the sequences
and not the tokens, as what a picture's norms are scaled by; nor where an op mixes sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import fx

from tpconvert.analyze.axes.run import flat, is_many
from tpconvert.analyze.axes.terms import Term, atoms, find, leaves
from tpconvert.analyze.flow.states import Flow
from tpconvert.analyze.slices.slicing import slice_flow


def with_rows(
    plain: Flow, sliced: Flow, whole: frozenset[str], others: Iterable[Flow] = ()
) -> tuple[Flow, frozenset[str]]:
    """``(the flow with slices of rows, the modules that see none)``, or what was given where there is no such flow.

    Modules that tell sequences apart are to see no slices, if that makes whole again only what is computed before any
    sum but those of lookups: where positions are added to words, say, and not in each layer.  ``others`` are of calls
    that the same plan is for.
    """
    found, inside = sliced, whole
    while apart := unlike_rows(found):
        inside |= apart.keys()
        other, _ = slice_flow(plain, inside)
        if other is None or (found.local - other.local) & _behind(_scattered(found) - plain.ax.lookups):
            return sliced, whole
        found = other
    if one_sequence(found) or any(tells_apart(other, inside) for other in others):
        return sliced, whole
    return replace(found, rows=True), inside


def tells_apart(plain: Flow, whole: frozenset[str]) -> bool:
    """Whether slices of rows would not do in a flow."""
    sliced, _ = slice_flow(plain, whole)
    return sliced is None or bool(unlike_rows(sliced))


def unlike_rows(flow: Flow) -> dict[str, str]:
    """The modules of a flow with slices whose ops tell sequences apart -> why; none where slices can be of rows."""
    ax = flow.ax
    below = {a for node in flow.sliced for t in _leading(flow, node) for a in leaves(t)}
    mixing = {b.node: b.why for t, b in ax.blocks if leaves(t) & below}
    mixing |= {node: "it sums over them" for t, node in ax.contracts if leaves(t) & below}
    found: dict[str, str] = {}
    for node in ax.trace.nodes:
        if node in flow.local and (why := mixing.get(node) or next(_unlike(flow, node), None)):
            call = node.meta["call"]
            found.setdefault(call.module if call is not None else "", f"{node.meta['op']}: {why}")
    return found


def one_sequence(flow: Flow) -> bool:
    """Whether a value was traced with a single sequence, of which nobody can tell where it would be in another."""
    return any(t.n == 1 for node in flow.sliced for t in flow.ax.of(node)[: flow.sliced[node]])


def _scattered(flow: Flow) -> set[fx.Node]:
    """The sums of which each rank gets a slice."""
    return {node for node, placed in flow.reduced.items() if placed.sliced is not None}


def _behind(nodes: set[fx.Node]) -> set[fx.Node]:
    """These, and all that is computed from them."""
    found, pending = set(nodes), list(nodes)
    while pending:
        new = [user for user in pending.pop().users if user not in found]
        found.update(new)
        pending += new
    return found


def _unlike(flow: Flow, node: fx.Node) -> Iterator[str]:
    """Why an op on slices could not be on rows."""
    lead = _lead(flow, node)
    below = {a for t in lead for a in leaves(t)}
    if any(leaves(t) & below for t in flow.ax.of(node)[flow.sliced_dims[node] + 1 :]):
        yield "a dim besides has sequences too"
    for operand in node.all_input_nodes:
        if operand in flow.sliced_dims:  # of which it is given slices
            if _lead(flow, operand) != lead:
                yield f"{operand.name} has tokens of other sequences"
        elif is_many(flow.ax.dims[operand]) or any(leaves(t) & below for t in flat(flow.ax.dims[operand])):
            yield f"{operand.name} is of all tokens or of all sequences"


def _leading(flow: Flow, node: fx.Node) -> list[Term]:
    """The dims up to that of the tokens."""
    return list(flow.ax.of(node)[: flow.sliced_dims[node] + 1])


def _lead(flow: Flow, node: fx.Node) -> list[Term]:
    """What these are made of, in order."""
    return [find(a) for t in _leading(flow, node) for a in atoms(t)]
