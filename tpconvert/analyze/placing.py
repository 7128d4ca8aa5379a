"""The collectives of sliced values: where slices are made, and where they are put together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from tpconvert.analyze.capture import Call
from tpconvert.analyze.states import Flow, Host, Placed, differentiable, seeing
from tpconvert.analyze.tokens import Use

if TYPE_CHECKING:
    from tpconvert.analyze.slicing import Slicer


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
        out = self.out
        users = {u.user for u in uses if u.user is not None and not u.size}
        within = {p: seen for p in out.copies if p.node is node and p.span is None and (seen := seeing(p)) <= users}
        summed = set().union(*within.values())
        kind = "gather"
        if within and all(u in summed or not differentiable(self.found.ax, u) for u in users):
            kind = "all_gather"
            out.copies = [p for p in out.copies if p not in within]
        out.joins.append(Placed(kind, node, host, host.call, consumers=tuple(users), sliced=self.dims[node]))


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
