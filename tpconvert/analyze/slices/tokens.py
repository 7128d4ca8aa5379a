"""Where the tokens of a sequence are in each value, and every use of such a value and of the number of its tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from tpconvert.analyze.axes.run import flat, inplace_target, is_many
from tpconvert.analyze.axes.terms import Term, atoms, leaves, segments
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.flow.states import Flow, is_op
from tpconvert.analyze.trace.provenance import Int, dims_read

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One use of a value, or of its size: by an op, or by Python where there is no op."""

    call: Call | None
    user: fx.Node | None
    size: bool = False
    """Only the number of its tokens is used."""
    exact: bool = False
    """As the size of that very dim of the op's result, which has to be a slice if the value is."""


def shared_dims(flow: Flow, sequences: bool = False) -> set[Key]:
    """The dims along which values are sliced: of each sum the one that ops mix, and else its rows.

    Which is to say the tokens, whichever dim has them; not the features, which weights carry.  With ``sequences`` the
    first beside those that the model is called with.
    """
    ax = flow.ax
    contracting = {n for _, n in ax.contracts}
    features: set[Term] = set()
    for node in ax.trace.parameters.values():
        pending = [node] if node.meta["val"].is_floating_point() else []
        while pending:
            here = pending.pop()
            if any(u in contracting for u in here.users):
                features |= {a for t in ax.of(node) for a in leaves(t)}
                break
            pending += [u for u in here.users if is_op(u) and len(u.all_input_nodes) == 1 and not is_many(ax.dims[u])]
    mixed = {a for t, n in ax.contracts for a in leaves(t)}
    mixed |= {a for t, b in ax.blocks if b.node.meta["op"] != "input" for a in leaves(t)}
    sums = [[t for t in ax.of(n) if t.n > 1 and leaves(t) and not leaves(t) & features] for n in flow.reduced]
    tokens = _of_each(sums, -1, lambda t: bool(leaves(t) & mixed)) or _of_each(sums, -1, lambda t: True)
    is_given = givens(flow)
    keys = _of_each(sums, 0, lambda t: key_of(t) not in tokens and is_given(t)) if sequences else tokens
    return {k for k in keys if len(k) == 1} or keys  # rows of all sequences, where nothing has those of one apart


def _of_each(sums: list[list[Term]], which: int, chosen: Callable[[Term], bool]) -> set[Key]:
    """The first or last such dim of each sum that has one."""
    return {key_of(mine[which]) for terms in sums if (mine := [t for t in terms if chosen(t)])}


def givens(flow: Flow) -> Callable[[Term], bool]:
    """Tells whether a size is one that the model is called with, or made of one, and not that of a parameter."""
    own = {key_of(t) for node in flow.ax.trace.parameters.values() for t in flow.ax.of(node)}
    return lambda term: bool(leaves(term) & flow.ax.input_atoms) and key_of(term) not in own


def key_of(term: Term) -> Key:
    """What a dim is made of, in a form that can be compared."""
    return tuple(id(a) if a.kind == "V" else ("S", *map(key_of, segments(a))) for a in atoms(term))


def numbers(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Int]]:
    """The integers with a memory in nested arguments, with their paths."""
    if isinstance(tree, Int):
        yield path, tree
    elif isinstance(tree, tuple | list):
        for i, item in enumerate(tree):
            yield from numbers(item, (*path, i))
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from numbers(item, (*path, key))
    elif isinstance(tree, slice):
        for name in ("start", "stop", "step"):
            yield from numbers(getattr(tree, name), (*path, name))


class Tokens:
    """What a trace says of the dims with these keys; the forwards of ``whole`` modules are to see no slices."""

    def __init__(self, flow: Flow, keys: set[Key], whole: frozenset[str]) -> None:
        self.flow, self.ax, self.trace, self.keys, self.whole = flow, flow.ax, flow.ax.trace, keys, whole
        self.why: dict[fx.Node, str] = {}
        """Why an op does not work slice by slice, or a value has to be whole."""
        sums = (t for node in flow.reduced for t in self.ax.of(node))
        self.below = {a for t in sums if key_of(t) in keys for a in leaves(t)}
        self.dims: dict[fx.Node, int] = {}
        """Value -> the dim of its tokens."""
        self.odd: set[fx.Node] = set()
        """Values with tokens in several dims, or mixed with something else in one."""
        self.find_dims()
        self.inputs = tuple(self.in_inputs())
        """``(slot, dim)`` of each dim of tokens of the model's inputs."""
        self.bad = self.unsliceable()
        """Ops that do not work slice by slice."""
        self.counted: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        """Op -> the values whose number of tokens it is given as that of its result."""
        self.uses = self.all_uses()

    def find_dims(self) -> None:
        """Look at every dim of every value."""
        known: dict[Term, tuple[bool, bool]] = {}
        for node in self.trace.nodes:
            has = []
            for i, term in enumerate(flat(self.ax.dims[node])):
                if term not in known:
                    known[term] = bool(leaves(term) & self.below), key_of(term) in self.keys
                if known[term][0]:
                    has.append((i, known[term][1]))
            if len(has) == 1 and has[0][1] and not is_many(self.ax.dims[node]):
                self.dims[node] = has[0][0]
            elif has:
                self.odd.add(node)

    def in_inputs(self) -> Iterator[tuple[str, int]]:
        """Where tokens come in."""
        for node in self.trace.nodes:
            if node.meta["op"] == "input":
                dims = [i for i, t in enumerate(self.ax.of(node)) if key_of(t) in self.keys]
                yield from ((str(node.meta["slot"]), i) for i in dims)

    def unsliceable(self) -> set[fx.Node]:
        """Ops that do not work slice by slice."""
        out = set()
        for term, blocked in self.ax.blocks:
            if leaves(term) & self.below and blocked.node.meta["op"] != "input":
                out.add(blocked.node)
                self.why.setdefault(blocked.node, blocked.why)
        for term, node in self.ax.contracts:
            if leaves(term) & self.below:
                out.add(node)
                self.why.setdefault(node, f"{node.meta['op']} sums over the tokens")
        for node, region in self.ax.written.items():
            target, whole = inplace_target(node), {key_of(t) for t in region}
            dims = [key_of(t) for t in self.ax.of(target)] if target is not None else []
            if any(key in self.keys and key not in whole for key in dims):
                out.add(node)
                self.why.setdefault(node, "it writes to some of the tokens")
        for node, sites in self.ax.sites.items():
            given = dict(numbers((node.args, dict(node.kwargs))))
            if any(leaves(s.term) & self.below and not self.reads_one(given.get(s.path)) for s in sites):
                out.add(node)
                self.why.setdefault(node, f"{node.meta['op']} is given the number of tokens")
        inside = {c for c in self.trace.calls if c.module in self.whole}
        return out | {n for n in self.trace.nodes if n.meta["call"] in inside}

    def reads_one(self, given: Int | None) -> bool:
        """Whether an integer is the very size of a sequence dim."""
        if given is None or not isinstance(given.expression, tuple) or given.expression[0] != "dim":
            return False
        return self.dims.get(given.expression[1]) == given.expression[2]

    def all_uses(self) -> dict[fx.Node, list[Use]]:
        """Every use of each value with tokens, and of its size."""
        uses: dict[fx.Node, list[Use]] = defaultdict(list)
        for node in (*self.dims, *self.odd):
            uses[node] += [Use(u.meta["call"] if is_op(u) else None, u) for u in node.users]
        for user in self.trace.nodes:
            sites = {s.path: s for s in self.ax.sites.get(user, ()) if leaves(s.term) & self.below}
            for path, number in numbers((user.args, dict(user.kwargs))):
                exact = path in sites and sites[path].sign == 1
                for node, dim in dims_read(number.expression):
                    if self.dims.get(node) == dim:
                        uses[node].append(Use(user.meta["call"], user, size=True, exact=exact))
                        if exact:
                            self.counted[user].append(node)
                        else:
                            self.bad.add(user)
                            self.why.setdefault(user, f"{user.meta['op']} computes with the number of tokens")
        for call in self.trace.calls:
            read = [*call.sized, *(d for q in call.decided for e in q[1:] for d in dims_read(e))]
            for node in {n for n, dim in read if self.dims.get(n) == dim}:
                uses[node].append(Use(call, None, size=True))
            if call.module in self.whole or (call.parent is not None and call.parent.module in self.whole):
                seen = call.inputs if call.module in self.whole else call.outputs
                inside = call if call.module in self.whole else call.parent
                for node in {n for n in seen.values() if n in self.dims}:
                    uses[node].append(Use(inside, None, size=True))
        return uses
