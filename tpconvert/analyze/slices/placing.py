"""The collectives of sliced values: where slices are made, and where they are put together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from tpconvert.analyze.axes.run import is_many
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.flow.states import Flow, Host, Placed, differentiable, is_op, seeing
from tpconvert.analyze.slices.tokens import Use

if TYPE_CHECKING:
    from tpconvert.analyze.slices.slicing import Slicer


class Placing:
    """Writes the flow of what a :class:`Slicer` found."""

    def __init__(self, found: Slicer) -> None:
        self.found, self.dims, self.out = found, found.dims, sliced_copy(found)

    def flow(self) -> Flow:
        """The flow with these slices."""
        found, out = self.found, self.out
        for node in self.dims:
            wholes, slices = found.wanted(node)
            if node in found.sliced:
                self.begin(node)
                self.join(node, wholes, slices)
            elif slices:
                self.scatter(node, found.covered(node, slices, wholes)[0])
        out.copies += found.copies
        return out

    def begin(self, node: fx.Node) -> None:
        """The collective that makes slices of a whole value or of a pending sum, right where it is returned."""
        host, dim, out = self.found.own_host(node), self.dims[node], self.out
        if node in out.reduced:
            out.reduced[node] = replace(out.reduced[node], kind="reduce_scatter", sliced=dim)
        elif host is not None:
            out.scatters.append(Placed("scatter", node, host, host.call, sliced=dim))

    def scatter(self, node: fx.Node, covered: list[tuple[Call, list[Use]]]) -> None:
        """The collectives that make slices of a whole value for some of its consumers.

        A pending sum is made whole before, where it is returned: a caller may give those modules another value,
        embeddings of its own say, and what they are given is whole.
        """
        for call, uses in covered:
            mine = tuple(u.user for u in uses if u.user is not None and not u.size)
            placed = Placed("scatter", node, entry(call, node), call, consumers=mine, sliced=self.dims[node])
            self.out.scatters.append(placed)

    def join(self, node: fx.Node, wholes: list[Use], slices: list[Use]) -> None:
        """The collectives that put slices together, in the place of copies where their gradient is partial."""
        found = self.found
        covered, left = found.covered(node, wholes, slices)
        host = found.hosts.output(node)
        if (left or found.copied_at_output(node)) and not slices and host is not None:
            self.out.sliced.pop(node)
            self.joined(node, host, wholes)
            return
        for call, uses in covered:
            self.joined(node, entry(call, node), uses)
        if left and found.root is not None:
            slots = tuple(s for s, n in found.root.outputs.items() if n is node)
            self.joined(node, Host(found.root, "output", slots), left)

    def joined(self, node: fx.Node, host: Host, uses: Iterable[Use]) -> None:
        """One such collective."""
        users = {u.user for u in uses if u.user is not None and not u.size}
        terms = self.terms(node, host, users)
        kind = "gather"
        if terms is not None and terms[0]:
            kind = "all_gather"
            self.out.copies = [p for p in self.out.copies if p not in terms[0]] + terms[1]
        placed = Placed(kind, node, host, host.call, consumers=tuple(users), sliced=self.dims[node])
        self.out.joins.append(placed)

    def terms(self, node: fx.Node, host: Host, users: set[fx.Node]) -> tuple[list[Placed], list[Placed]] | None:
        """How the gradient that comes back from ``users`` could be a term of a sum: ``(copies to leave out, singles)``.

        A copy is left out, so that the gather sums instead, once, and slices what it sums; a gradient that is the same
        on all ranks is made a term by a ``single``.  None where one of these has no place.
        """
        if any(p.node is node for p in self.out.scatters) or any(p.node is node and p.span for p in self.out.copies):
            return None
        copies = {p: seen for p in self.out.copies if p.node is node and (seen := seeing(p)) <= users}
        summed = set().union(*copies.values())
        left_out, singles, rest = list(copies), [], set()
        for user in users - summed:
            if not is_op(user):
                return None
            if (deeper := self.through(user, node, host)) is not None:
                left_out += deeper[0]
                singles += deeper[1]
            elif differentiable(self.found.ax, user):
                rest.add(user)
        others = {u for u in node.users if is_op(u) and u not in rest}
        covered, missed = self.found.hosts.covering(node, rest, others)
        if missed or not all(h.call.inside(host.call) or host.side == "output" for h, _ in covered):
            return None
        return left_out, singles + [Placed("single", node, h, h.call, consumers=tuple(seen)) for h, seen in covered]

    def through(self, user: fx.Node, node: fx.Node, host: Host) -> tuple[list[Placed], list[Placed]] | None:
        """The same of all that becomes of a value which is made of ``node`` alone, a view of it say."""
        found = self.found
        if is_many(found.ax.dims[user]) or user in found.returned or user in found.sliced or not user.meta.get("grad"):
            return None
        if user in self.out.zone or not self.out.whole(user):
            return None
        if any(n is not node and n.meta.get("grad") for n in user.all_input_nodes):
            return None
        terms = self.terms(user, host, set(user.users))
        return terms if terms is not None and terms[0] else None


def sliced_copy(found: Slicer) -> Flow:
    """The flow with what is known of its values, before their collectives."""
    flow = found.flow
    return replace(
        flow,
        reduced=dict(flow.reduced),
        copies=list(flow.copies),
        scatters=list(flow.scatters),
        sum_grad=flow.sum_grad | found.sums,
        local=set(found.local),
        joins=[],
        sliced={n: found.dims[n] for n in found.sliced},
        sliced_dims=found.dims,
        sliced_inputs=found.tokens.inputs,
    )


def entry(call: Call, node: fx.Node) -> Host:
    """A call's input where a value enters it."""
    return Host(call, "input", tuple(s for s, n in call.inputs.items() if n is node))
