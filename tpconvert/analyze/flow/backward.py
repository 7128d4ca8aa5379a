"""The backward side of a flow: zones of partial gradients, and the copies that close them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from tpconvert.analyze.axes.run import flat, inplace_target, is_many, nodes_in
from tpconvert.analyze.axes.terms import Term, half_cut, leaves
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.flow.states import ConflictError, Flow, Host, Hosts, Placed, around, involved, is_op, rule_of
from tpconvert.analyze.watch.gradients import has_own_backward, watchers

JOINS = frozenset(["cat", "concat", "concatenate", "__setitem__"])
"""Ops that put operands beside each other: a whole one stays whole, though the result be cut in other segments."""


class Backward:
    """Finds the zones of partial gradients and closes each with a copy."""

    def __init__(self, flow: Flow, hosts: Hosts, lazy: frozenset[Call] = frozenset()) -> None:
        self.flow, self.hosts = flow, hosts
        self.lazy = lazy
        """Calls in whose own forward zones are not closed at the children's inputs, but reach up to its own."""
        self.returned = {*flow.ax.trace.outputs.values(), *flow.ax.trace.kept}
        self.scattered = {(p.node, u) for p in flow.scatters for u in p.node.users}
        self.live = self.reaching_out()
        self.inside: set[fx.Node] = set()
        for node in flow.ax.trace.nodes:
            entered = node in flow.cut or node in flow.partial
            passed = any(
                n in self.inside and n not in flow.reduced and n not in flow.gathered for n in node.all_input_nodes
            )
            if node.meta["op"] != "parameter" and (entered or passed):
                self.inside.add(node)

    def reaching_out(self) -> set[fx.Node]:
        """Values that take part in what the forward returns or keeps: no gradient comes back from any other."""
        live: set[fx.Node] = set()
        for node in reversed(self.flow.ax.trace.nodes):
            reads = (not is_op(u) or u in live or u.meta.get("watches") for u in node.users)
            if node in self.returned or any(reads):
                live.add(node)
        return live

    def run(self) -> None:
        """Visit values from the last to the first."""
        for node in reversed(self.flow.ax.trace.nodes):
            if is_many(self.flow.ax.dims[node]):
                if any(u in self.flow.zone for u in node.users):
                    self.flow.zone.add(node)
            elif node.meta.get("grad"):
                self.visit(node)
        if self.flow.paired:  # where a gradient is a term by itself, that of each rank counts
            wholes = (p for n, p in self.flow.counted.items() if n not in self.flow.zone)
            self.flow.copies += [replace(p, kind="single") for p in wholes]

    def visit(self, node: fx.Node) -> None:
        """Decide where the gradient of one value is summed."""
        flow = self.flow
        users = [u for u in node.users if is_op(u) and self.differentiable(u)]
        partial = {u for u in users if self.edge_is_partial(node, u)}
        returned = node in self.returned
        mixed_many = [u for u in partial if is_many(flow.ax.dims[u]) and not self.all_items(u)]
        if not partial:
            return
        if seen := watchers(node):
            self.watched(node, partial, {*users, *seen} - partial, mixed_many)
            return
        if node.meta["op"] == "parameter":
            self.parameter(node, users, partial - set(mixed_many))
            return
        if node.meta["op"] == "constant":
            why = "the gradient of a tensor that is no parameter of the model cannot be summed"
            raise ConflictError(self.blamed(node), node, why)
        outside = node not in self.inside or node in flow.reduced or node in flow.gathered
        if len(partial) == len(users) and not mixed_many and not returned:
            if not outside or not self.close(node, partial):
                self.pass_on(node)
            return
        if not outside:
            if not self.segments_agree(node, users):
                raise ConflictError(
                    self.blamed(node), node, "part of its gradient is summed over ranks and part is not"
                )
            self.pass_on(node)
            return
        self.mixed(node, users, partial, mixed_many)

    def blamed(self, node: fx.Node) -> set[Term]:
        """The axes a conflict at a value is about: those around it, or else those that it lies inside the region of."""
        found, seen, pending = around(self.flow, node), {node}, [node]
        while pending and not found:
            here = pending.pop(0)
            found = self.flow.atoms(here) if here in self.flow.cut else set()
            near = {n for n in here.all_input_nodes if n in self.inside and n not in self.flow.reduced}
            pending += sorted(near - seen)
            seen |= near
        return found or involved(self.flow, node)

    def pass_on(self, node: fx.Node) -> None:
        """Let a partial gradient reach what a value was computed from, if that is linear and differentiable at all."""
        why = ""
        if has_own_backward(node):
            why = "its own backward would be given a term of a sum over ranks"
        elif node.meta["op"] == "input":
            why = "its gradient is a term of a sum over ranks, and no boundary is there to sum it at"
        if why:
            raise ConflictError(self.blamed(node), node, why)
        self.flow.zone.add(node)

    def watched(self, node: fx.Node, partial: set[fx.Node], others: set[fx.Node], mixed_many: list[fx.Node]) -> None:
        """A gradient that is seen must be whole where it is seen: summed at the inputs of the modules it comes from."""
        covered, left = self.hosts.covering(node, partial, others)
        if left or mixed_many or node.meta["op"] == "parameter":
            raise ConflictError(self.blamed(node), node, "a hook there would be given a term of a sum over ranks")
        self.place(node, covered, left)

    def close(self, node: fx.Node, partial: set[fx.Node]) -> bool:
        """Place the copy of a value all of whose consumers are in the region; False where no boundary fits.

        Where one module holds them all, at its input: then every call of it, another time too, begins with a copy.
        But what is written into is copied where it is made: at an input it has other owners.
        """
        if self.is_lazy(node):
            return False
        written = any(u.meta["op"] == "alias" or inplace_target(u) is node for u in node.users if is_op(u))
        covered, left = self.hosts.covering(node, partial, set())
        host = self.hosts.output(node)
        if host is not None and (left or len(covered) > 1 or written):
            self.flow.copies.append(Placed("copy", node, host, host.call))
            return True
        if left and node not in self.flow.reduced and node not in self.flow.gathered:
            return False
        self.place(node, covered, left)
        return True

    def is_lazy(self, node: fx.Node) -> bool:
        """Whether a zone is to reach on up from here, to the input of the forward that holds it."""
        if node in self.flow.reduced or node in self.flow.gathered:
            return False
        call = node.meta["call"]
        return any(call is not None and call.inside(c) for c in self.lazy)

    def place(self, node: fx.Node, covered: list[tuple[Host, set[fx.Node]]], left: set[fx.Node]) -> None:
        """Copies at module inputs, and for the consumers left, inside the forward that holds them."""
        self.flow.copies += [Placed("copy", node, host, host.call) for host, _ in covered]
        for call in dict.fromkeys(u.meta["call"] for u in sorted(left)):
            mine = tuple(u for u in left if u.meta["call"] is call)
            self.flow.copies.append(Placed("copy", node, None, call, consumers=mine))

    def parameter(self, node: fx.Node, users: list[fx.Node], partial: set[fx.Node]) -> None:
        """A parameter whose every use gives a term of its gradient has it summed where it is read."""
        if len(partial) < len(users):
            raise ConflictError(
                self.blamed(node), node, f"{node.target} is used both inside and outside the cut region"
            )
        self.flow.sum_grad.add(node)

    def mixed(self, node: fx.Node, users: list[fx.Node], partial: set[fx.Node], mixed_many: list[fx.Node]) -> None:
        """Only part of a value enters the region: a segment of it, or some of its consumers."""
        spans = self.spans(node, users) if node not in self.returned else None
        host = self.hosts.output(node)
        if spans is not None and host is not None:
            self.flow.copies += [Placed("copy", node, host, host.call, span) for span in spans]
            return
        if mixed_many:
            raise ConflictError(
                self.blamed(node), node, "only a segment of it enters the cut region, and no module returns it"
            )
        self.place(node, *self.hosts.covering(node, partial, set(users) - partial))

    def edge_is_partial(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether the gradient ``user`` sends to ``node`` is a term of a sum over ranks."""
        flow = self.flow
        if user.meta["op"] in JOINS and not (node in flow.partial and node not in flow.reduced):
            region = flow.ax.written.get(user, ()) if node is not user.args[0] else ()
            if any(leaves(t) & (flow.cut_atoms - flow.atoms(node)) for t in region):
                return True
            return user in flow.zone and self.joined_is_partial(node, user)
        if user in flow.zone:
            return True
        if (node, user) in self.scattered and node not in flow.cut:
            return False
        if user in flow.counted:
            return flow.paired
        if user.meta["op"] in ("item", "alias"):
            return False
        if node in flow.partial and node not in flow.reduced:
            return False
        if is_many(flow.ax.dims[user]):
            return any(i in flow.zone or (i in flow.cut and self.missing(node, i)) for i in user.users)
        if user in flow.partial:
            rule = rule_of(flow, user)
            names = {name for name, value in flow.ax.bound.get(user, {}).items() if node in nodes_in(value)}
            if rule is not None and (names <= rule.joint or names == {rule.added}):
                return False
            if node in flow.once:
                return False
            return node not in flow.cut
        partial = (user in flow.cut or user in flow.gathered) and self.missing(node, user)
        if partial and self.half_cut(user):
            # what reaches it from the cut segments is a term of a sum, from the whole ones it is the sum itself
            why = "part of its gradient is summed over ranks and part is not"
            raise ConflictError(self.blamed(user), user, why)
        return partial

    def joined_is_partial(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a partial gradient of what is joined is partial in the segment that ``node`` is.

        It is partial in the whole segments of a value that has cut ones too, and in every segment of any other, such as
        keys that several ranks share.
        """
        if node not in self.flow.cut or not self.half_cut(user) or self.half_cut(node):
            return True
        if self.is_shared(user):
            why = "part of its gradient is summed over ranks and part is not"
            raise ConflictError(self.blamed(user), user, why)
        return False

    def is_shared(self, node: fx.Node) -> bool:
        """Whether a cut value reaches, inside its zone, one that is cut along further axes too."""
        own, seen, stack = self.flow.atoms(node), {node}, [node]
        while stack:
            for user in stack.pop().users:
                if own < self.flow.atoms(user):
                    return True
                if user in self.flow.zone and user not in seen:
                    seen.add(user)
                    stack.append(user)
        return False

    def half_cut(self, node: fx.Node) -> bool:
        """Whether some segment of a cut value is whole."""
        return any(half_cut(t, set(self.flow.cut_atoms)) for t in flat(self.flow.ax.dims[node]))

    def missing(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether the result is cut along an axis the operand is not."""
        if node not in self.flow.cut:
            return True
        return bool(self.flow.atoms(user) - self.flow.atoms(node))

    def differentiable(self, user: fx.Node) -> bool:
        """Whether a gradient comes back from ``user``."""
        if user not in self.live:
            return False
        if is_many(self.flow.ax.dims[user]):
            return any(i.meta.get("grad") for i in user.users)
        return bool(user.meta.get("grad"))

    def all_items(self, user: fx.Node) -> bool:
        """Whether every differentiable result of ``user`` is in the zone (or cut, and so complete by itself)."""
        items = [i for i in user.users if i.meta.get("grad")]
        whole = [i for i in items if i not in self.flow.cut]
        return all(i in self.flow.zone for i in whole) and bool(whole or items)

    def segments_agree(self, node: fx.Node, users: list[fx.Node]) -> bool:
        """In a value cut in some segments only, whether every whole segment has a partial gradient."""
        for user in users:
            if is_many(self.flow.ax.dims[user]):
                if not self.all_items(user):
                    return False
            elif user not in self.flow.cut and user not in self.flow.zone:
                return False
        return True

    def spans(self, node: fx.Node, users: list[fx.Node]) -> list[tuple[int, int, int]] | None:
        """The ranges of one dim with partial gradients; None unless every consumer takes a range, the others apart."""
        found: list[tuple[bool, int, int, int]] = []
        for user in users:
            if is_many(self.flow.ax.dims[user]):
                if user not in self.flow.ax.splits:
                    return None
                dim, at = self.flow.ax.splits[user], 0
                sizes = [t.shape[dim] for t in user.meta["val"]]
                items = {i.args[1]: i for i in user.users}
                for k, size in enumerate(sizes):
                    item = items.get(k)
                    if item is not None and item.meta.get("grad"):
                        found.append((item in self.flow.zone, dim, at, at + size))
                    at += size
            else:
                span = slice_of(user)
                if span is None:
                    return None
                found.append((user in self.flow.zone, *span))
        if len({f[1] for f in found}) != 1:
            return None
        yes = sorted({f[1:] for f in found if f[0]})
        no = [f[1:] for f in found if not f[0]]
        if any(a[1] < b[2] and b[1] < a[2] for a in yes for b in no):
            return None
        return yes


def slice_of(node: fx.Node) -> tuple[int, int, int] | None:
    """``(dim, start, stop)`` when a node is one plain slice of its operand."""
    if node.meta["op"] != "__getitem__":
        return None
    items: Any = node.args[1]
    items = items if isinstance(items, tuple) else (items,)
    shape = node.args[0].meta["shape"]  # type: ignore[union-attr]
    if any(not isinstance(i, slice) and i is not ... for i in items):
        return None
    if ... in items:
        at = items.index(...)
        items = (*items[:at], *[slice(None)] * (len(shape) - len(items) + 1), *items[at + 1 :])
    real = [(d, *i.indices(shape[d])) for d, i in enumerate(items) if i != slice(None)]
    if len(real) != 1 or real[0][3] != 1:
        return None
    return real[0][:3]
