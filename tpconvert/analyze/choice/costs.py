"""What cutting an axis or a layer saves, and what it sends: both in parameters, for each token.

A parameter that is cut saves a product for each token; an element that is sent costs as much as so many products as the
two break even at.  Sizes made of the sequence count at a realistic length, not at the few tokens traced: at 16 tokens
it would look cheap to cut head_dim and sum the scores.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term, atoms, fraction, leaves
from tpconvert.analyze.flow.run import Flow

TOKENS = 4096
"""The sequence length at which communication is weighed."""
START = 0.4
"""What it costs to start a collective, in elements per token over the width at which sending breaks even.

All-reduces of 8, 32 and 128 MiB took 0.059, 0.136 and 0.465 ms on two H200: the start is worth 8 MiB, which is 1,000
elements for each of 4,096 tokens in bf16, where a model of width 4096 breaks even at some 2,700.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """A call of a layer that might be cut by itself: its weight, and what it returns."""

    weight: fx.Node
    result: fx.Node


class Costs:
    """The costs of one trace."""

    def __init__(self, ax: Axes) -> None:
        self.ax = ax
        self.sequence: set[Term] = set()
        """The atoms of the dims along the sequence."""
        self.rows = 1.0
        """How many rows the weight that is read most at once is applied to: the tokens."""
        for node in ax.trace.nodes:
            if node.meta["op"] == "input":
                whole = node.meta["val"].is_floating_point()
                dims = ax.of(node)
                self.rows = self.rows if whole else max(self.rows, math.prod(t.n for t in dims))
                for term in dims[1:-1] if whole else dims[1:]:
                    self.sequence |= leaves(term)
        applied = [(w, _applied(term, node, w)) for term, node in ax.contracts for w in self.matrices(node)]
        self.rows = max([self.rows, *(rows for _, rows in applied)])
        self.times: dict[fx.Node, float] = defaultdict(float)
        """How often a matrix is applied to each token: more than once where layers share it."""
        for weight, rows in applied:
            self.times[weight] += rows / self.rows

    @cached_property
    def even(self) -> float:
        """Half of the width that the model's layers usually contract: parameters worth one element sent."""
        widths = [math.log(t.n) for t, node in self.ax.contracts if t.n > 1 and self.matrices(node)]
        return 0.5 * math.exp(sum(widths) / len(widths)) if widths else 0.0

    def matrices(self, node: fx.Node) -> list[fx.Node]:
        """The matrices among the operands of a contraction, tables of rows to look up aside."""
        if node in self.ax.lookups:
            return []
        return [n for n in node.all_input_nodes if n.meta["op"] == "parameter" and len(n.meta["shape"]) > 1]

    def elements(self, node: fx.Node) -> float:
        """The size of a value, where it is square in the sequence at a realistic length."""
        size = float(math.prod(node.meta["shape"]))
        along = [[a.n for a in atoms(t) if leaves(a) & self.sequence] for t in self.ax.of(node)]
        for n in [math.prod(dim) for dim in along if dim][1:]:
            size *= max(1.0, TOKENS / n)
        return size

    # -- of one axis --------------------------------------------------------------------------------------

    def saved(self, atom: Term) -> float:
        """The parameters that an axis cuts, each as often as it is applied to a token."""
        return sum(self.cut(atom, name, dim) for name, dim in self.ax.carriers[atom])

    def looked_up(self, atom: Term) -> float:
        """Of these, those in tables that rows are looked up in, and nothing else."""
        carriers = [(self.ax.trace.parameters[name], name, dim) for name, dim in self.ax.carriers[atom]]
        tables = {n.args[0] for n in self.ax.lookups}
        return sum(self.cut(atom, name, dim) for node, name, dim in carriers if node in tables - self.times.keys())

    def cut(self, atom: Term, name: str, dim: int) -> float:
        """The parameters of one tensor that an axis cuts; none of a table of numbers that no product is made with."""
        node = self.ax.trace.parameters[name]
        if node not in self.times and not node.meta["grad"] and node.meta["val"].is_floating_point():
            return 0.0
        cut = math.prod(node.meta["shape"]) * fraction(self.ax.of(node)[dim], {atom})
        return cut * max(1.0, self.times.get(node, 1.0))

    def sent(self, atom: Term) -> float:
        """What is sent because of an axis, in parameters."""
        nodes = set(self.ax.contracted.get(atom, ()))
        for node in self.ax.trace.outputs.values():
            if any(atom in leaves(t) for t in self.ax.of(node)):
                nodes.add(node)
        total = sum(self.elements(node) / self.rows * self.even for node in nodes - self.ax.parts.keys())
        total += sum(START * self.even**2 for node in nodes if self.in_norm(node))
        parts = [n for n, dims in self.ax.parts.items() if any(atom in leaves(t) for t in dims)]
        return total + sum(map(self.joining, parts))

    def in_norm(self, node: fx.Node) -> bool:
        """Whether an op is of a norm that was taken apart, whose sums are small and have to start all the same."""
        return node.meta["call"] is not None and node.meta["call"].module in self.ax.trace.apart

    # -- of a choice --------------------------------------------------------------------------------------

    def placed(self, flow: Flow) -> float:
        """What the collectives of a choice cost, in parameters."""
        return sum((self.elements(p.node) / self.rows + START * self.even) * self.even for p in flow.placed)

    def shared(self, flow: Flow) -> float:
        """What a choice saves of the products of two values, attention's scores say, in parameters."""
        return sum(self.products(term, node) for term, node in _of_values(self.ax) if node in flow.cut) / self.rows

    def products(self, term: Term, node: fx.Node) -> float:
        """How many products an op adds up, at a realistic length."""
        return self.elements(node) * (TOKENS if leaves(term) & self.sequence else term.n)

    # -- of layers cut by themselves ----------------------------------------------------------------------

    def joining(self, result: fx.Node) -> float:
        """What it costs to put a layer's result together, in parameters.

        A gather forward sends half of what a sum does and nothing backward, where an axis has a sum forward and one
        backward.  And a collective more has to start.
        """
        return (self.elements(result) / self.rows / 4 + START * self.even) * self.even

    def worthwhile(self, flow: Flow, layers: Iterable[Layer]) -> set[Layer]:
        """The layers worth cutting by themselves: a rank's part of a weight for a gather of what it returns.

        The gradient of what they are given is then summed: once for all layers that are given it, and for nothing
        where that is done for others already or where no parameter is behind it.
        """
        summed = flow.zone | {p.node for p in flow.copies}
        alike: dict[fx.Node | None, dict[Layer, float]] = defaultdict(dict)
        for layer in layers:
            saved = math.prod(layer.weight.meta["shape"]) - self.joining(layer.result)
            if saved > 0:
                given = [n for n in layer.result.meta["call"].inputs.values() if n in self.learned and n not in summed]
                alike[max(given, key=self.elements, default=None)][layer] = saved
        found: set[Layer] = set()
        for node, saved_by in alike.items():
            cost = self.elements(node) / self.rows / 2 * self.even if node is not None else 0.0
            found |= set(saved_by) if sum(saved_by.values()) > cost else set()
        return found

    @cached_property
    def learned(self) -> set[fx.Node]:
        """The values that a parameter which takes a gradient is behind."""
        found: set[fx.Node] = set()
        for node in self.ax.trace.nodes:
            if any(n in found or (n.meta["op"] == "parameter" and n.meta["grad"]) for n in node.all_input_nodes):
                found.add(node)
        return found


def _applied(term: Term, node: fx.Node, weight: fx.Node) -> float:
    """How many rows a matrix is applied to at a contraction of ``term``."""
    return term.n * math.prod(node.meta["shape"]) / max(math.prod(weight.meta["shape"]), 1)


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
