"""What a capture gives: the graph, the parameters, and every call of every module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from tpconvert.analyze.trace.provenance import Expression, Formulas, dims_read

Answer = bool | int | float | Sequence[Any]
Turn = tuple[str, int, Answer]
"""A module's path, which of the questions about values that its own forward asks, and what it is told."""


def listed(answer: Any) -> Any:
    """An answer as a forward gets it, whose lists are no one else's."""
    return [*map(listed, answer)] if isinstance(answer, list | tuple) else answer


@dataclass(slots=True, eq=False)
class Call:
    """One call of one module: what went in, what came out, by slot (see ``spec.plan.Boundary.slots``)."""

    module: str
    index: int
    parent: Call | None
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, fx.Node] = field(default_factory=dict)
    result: Any = None
    """The output's structure with nodes in place of tensors."""
    arguments: Any = None
    asked: str = ""
    """A question about values that its own forward asked of a tensor, so that it may take another path another time."""
    answers: list[tuple[Answer, str]] = field(default_factory=list)
    """What its own forward was told where it asked for yes or no, or for numbers, of values; and at which line."""
    sized: list[tuple[fx.Node, int]] = field(default_factory=list)
    """The dims of tensors whose sizes its own forward made a number of."""
    fed: list[Expression] = field(default_factory=list)
    """Integers with a memory that fed a formula in its own forward."""
    decided: dict[tuple[Any, Expression, Expression], bool] = field(default_factory=dict)
    """``(question, left, right)`` -> the answer, for the integers with a memory that its own forward compared."""
    stand_ins: list[fx.Node] = field(default_factory=list)
    """Values that were in the places of its module's own parameters."""
    grad: bool = True
    """Whether gradients were on when it was called."""
    casts: bool = False
    """Whether its own forward turned autocast on or off, or asked whether it was on."""
    hooked: bool = False
    """Whether hooks of the user's own run around it."""
    assigned: str = ""
    """An attribute that its own forward sets, or a container of its module that changed."""
    plain: bool = True
    """Whether the output is made of tensors, tuples, lists and dicts alone."""
    position: int = 0
    """Number of nodes recorded before it was called."""
    end: int = 0
    """Number of nodes recorded before it returned."""

    def feed(self, expression: Expression) -> None:
        """Its own forward made a number of an integer with a memory."""
        self.fed.append(expression)
        self.sized += dims_read(expression)

    def inside(self, other: Call) -> bool:
        """Whether this call happened within ``other`` (or is it)."""
        call: Call | None = self
        while call is not None and call is not other:
            call = call.parent
        return call is not None


class Noted(Formulas):
    """Expressions that fed a formula; the call under way is told when a tensor's size did, and what it compared."""

    def __init__(self, stack: list[Call]) -> None:
        super().__init__()
        self.stack = stack

    def append(self, expression: Expression) -> None:
        """One more."""
        super().append(expression)
        if self.stack:
            self.stack[-1].feed(expression)

    def decided(self, question: Callable[[Any, Any], bool], left: Expression, right: Expression, answer: bool) -> None:
        """The call under way compared two integers."""
        if self.stack:
            self.stack[-1].decided[question, left, right] = answer


@dataclass(slots=True, eq=False)
class Trace:
    """A captured forward."""

    module: nn.Module
    graph: fx.Graph
    parameters: dict[str, fx.Node]
    """First name of each parameter or buffer the forward used -> its node."""
    names: dict[int, str]
    """id of a parameter or buffer -> its first name."""
    calls: list[Call]
    outputs: dict[str, fx.Node]
    owners: dict[int, Any]
    formulas: list[Expression]
    notes: list[str]
    read: set[fx.Node]
    """Values that Python read: they must be whole."""
    kept: set[fx.Node]
    """Values that are left on a module for a later call or for whoever called: they must be no terms of a sum."""
    by_data: set[fx.Node]
    """Values whose shape hangs on other values."""
    rules: Any = None
    """The op rules it was captured with, by name."""
    drawn: float | None = None
    """What each draw of a single number from [0, 1) gave, where it was asked for."""
    turned: frozenset[Turn] = frozenset()
    """What was told of values in place of what they are."""
    apart: frozenset[str] = frozenset()
    """Modules whose norms were recorded as what they are made of."""
    ranks: tuple[str, ...] = ()
    """Modules whose own forward asked torch.distributed for ranks."""
    seeds: tuple[str, ...] = ()
    """Modules whose own forward took a seed from the machine."""

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes in order of execution."""
        return [n for n in self.graph.nodes if n.op != "output"]

    def steps(self, *calls: Call) -> dict[Call, list[fx.Node | Call]]:
        """What the own forward of each call does, in order: its ops, and its children's calls."""
        out: dict[Call, list[tuple[float, fx.Node | Call]]] = {call: [] for call in calls or self.calls}
        for i, node in enumerate(self.graph.nodes):
            if node.op == "call_function" and node.meta["call"] in out:
                out[node.meta["call"]].append((i, node))
        for call in self.calls:
            if call.parent in out:
                out[call.parent].append((call.position - 0.5, call))
        return {call: [step for _, step in sorted(found, key=lambda s: s[0])] for call, found in out.items()}
