"""The states of values under one choice of axes, and the places where collectives can stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from tpconvert.analyze.axes.run import Axes, Rule, flat, is_many
from tpconvert.analyze.axes.terms import Term, leaves
from tpconvert.analyze.capture.run import Call


class ConflictError(Exception):
    """These axes cannot be cut (together), for this reason."""

    def __init__(self, atoms: Iterable[Term], node: fx.Node, why: str) -> None:
        super().__init__(why)
        self.atoms, self.node, self.why = set(atoms), node, why


@dataclass(frozen=True, slots=True)
class Host:
    """A place a hook can stand: the input or the output of a module call."""

    call: Call
    side: str
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A collective and where it stands; without a host it stands inside ``call``'s own forward."""

    kind: str
    node: fx.Node
    host: Host | None
    call: Call | None
    span: tuple[int, int, int] | None = None
    """copy: ``(dim, start, stop)`` of the whole tensor."""
    consumers: tuple[fx.Node, ...] = ()
    """The ops that see the result: inside a forward, and where it is about slices."""
    sliced: int | None = None
    """The dim along which slices are put together or made (see :mod:`tpconvert.analyze.slices.slicing`)."""


@dataclass(eq=False)
class Flow:
    """The states and collectives of one choice."""

    ax: Axes
    cut_atoms: frozenset[Term]
    inline: frozenset[fx.Node] = frozenset()
    early: frozenset[str] = frozenset()
    """Modules whose own forward is to see no pending sums: what it would need inside has no place there."""
    lazy: frozenset[Call] = frozenset()
    """Calls whose gradients are to be summed at their own inputs, rather than at those of modules within them."""
    cut: set[fx.Node] = field(default_factory=set)
    """Values a rank holds a part of."""
    made: set[fx.Node] = field(default_factory=set)
    """Ops that make a cut dim out of nothing (an expand, a constant fill) and do so in its local size."""
    partial: set[fx.Node] = field(default_factory=set)
    """Values that are terms of a sum when computed (before their reduce, if they have one)."""
    began: set[fx.Node] = field(default_factory=set)
    """Those that are terms since their op sums over a cut axis."""
    reduced: dict[fx.Node, Placed] = field(default_factory=dict)
    gathered: dict[fx.Node, Placed] = field(default_factory=dict)
    kept: set[fx.Node] = field(default_factory=set)
    """Parameters that carry a cut axis but are used only behind its gather, and so stay whole."""
    once: set[fx.Node] = field(default_factory=set)
    counted: dict[fx.Node, Placed] = field(default_factory=dict)
    """Values that are whole when computed, and from where a module returns them terms of a sum."""
    paired: bool = False
    """Whether these count on one rank backward too, so that what they are computed from gets a term of its gradient."""
    uncounted: set[fx.Node] = field(default_factory=set)
    """Values that were to be, and would have been summed right there."""
    sum_grad: set[fx.Node] = field(default_factory=set)
    """Parameters whose gradient is partial."""
    zone: set[fx.Node] = field(default_factory=set)
    """Values whose gradient is partial."""
    copies: list[Placed] = field(default_factory=list)
    scatters: list[Placed] = field(default_factory=list)
    sliced: dict[fx.Node, int] = field(default_factory=dict)
    """Values of which each rank has a slice along this dim, wherever no collective puts the slices together."""
    local: set[fx.Node] = field(default_factory=set)
    """Of these, those that their op computes slice by slice."""
    sliced_dims: dict[fx.Node, int] = field(default_factory=dict)
    """The dim of the tokens in each value that has one."""
    sliced_inputs: tuple[tuple[str, int], ...] = ()
    """``(slot, dim)`` of the tokens in the model's inputs."""
    joins: list[Placed] = field(default_factory=list)
    """Where slices are put together."""
    rows: bool = False
    """Slices are runs of the tokens of all sequences, rather than of each (:mod:`tpconvert.analyze.slices.rows`)."""
    _atoms: dict[fx.Node, set[Term]] = field(default_factory=dict)

    @property
    def placed(self) -> list[Placed]:
        """Every collective."""
        sums = [*self.counted.values(), *self.reduced.values(), *self.gathered.values()]
        return [*sums, *self.joins, *self.copies, *self.scatters]

    def atoms(self, node: fx.Node) -> set[Term]:
        """The cut atoms among a value's dims."""
        if node not in self._atoms:
            self._atoms[node] = set().union(*(leaves(t) for t in flat(self.ax.dims[node]))) & self.cut_atoms
        return self._atoms[node]

    def whole(self, node: fx.Node) -> bool:
        """Whether consumers see all of the value."""
        return node not in self.cut and (node not in self.partial or node in self.reduced)


class Hosts:
    """Finds module boundaries for values; what a module in ``closed`` returns leaves it there, not where it is made."""

    def __init__(self, ax: Axes, closed: frozenset[str] = frozenset()) -> None:
        self.outputs: dict[fx.Node, list[Call]] = defaultdict(list)
        self.inputs: dict[fx.Node, list[Call]] = defaultdict(list)
        for call in ax.trace.calls:
            around = call.parent if call.parent is not None and call.parent.module in closed else None
            for node in dict.fromkeys(call.outputs.values()):
                if around is None or node not in around.outputs.values():
                    self.outputs[node].append(call)
            for node in dict.fromkeys(call.inputs.values()):
                self.inputs[node].append(call)

    def output(self, node: fx.Node) -> Host | None:
        """The innermost call that returns the value it computed, when nothing inside uses it further."""
        for call in sorted(self.outputs[node], key=lambda c: -c.position):
            made = node.meta["call"]
            if made is None or not made.inside(call):
                continue
            if any(is_op(u) and u.meta["call"] is not None and u.meta["call"].inside(call) for u in node.users):
                continue
            return Host(call, "output", tuple(s for s, n in call.outputs.items() if n is node))
        return None

    def covering(
        self, node: fx.Node, wanted: set[fx.Node], others: set[fx.Node]
    ) -> tuple[list[tuple[Host, set[fx.Node]]], set[fx.Node]]:
        """Calls that ``node`` enters and that hold only ``wanted`` consumers: ``(hosts with theirs, those left)``.

        The fewest calls, and of those the innermost that hold the same consumers: so all calls of a module are alike,
        whoever makes them.  None that returns the value as it is to consumers outside: these would see the copy too.
        """
        found = []
        left = set(wanted)
        entered = [call for call in self.inputs[node] if not _hands_on(call, node)]
        for call in sorted(entered, key=lambda c: c.position):
            inside = {u for u in left if u.meta["call"] is not None and u.meta["call"].inside(call)}
            if not inside or any(u.meta["call"] is not None and u.meta["call"].inside(call) for u in others):
                continue
            made = node.meta["call"]
            if made is not None and made.inside(call):
                continue
            deeper = [c for c in entered if c.inside(call) and all(u.meta["call"].inside(c) for u in inside)]
            inner = deeper[-1]
            found.append((Host(inner, "input", tuple(s for s, n in inner.inputs.items() if n is node)), inside))
            left -= inside
        return found, left


def _hands_on(call: Call, node: fx.Node) -> bool:
    """Whether a call returns what it is given, and something outside of it uses that."""
    if node not in call.outputs.values():
        return False
    return any(not is_op(u) or u.meta["call"] is None or not u.meta["call"].inside(call) for u in node.users)


def involved(flow: Flow, node: fx.Node) -> set[Term]:
    """The cut atoms around a value, for telling which axes a conflict is about; all of them where there are none."""
    return around(flow, node) or further_on(flow, node) or set(flow.cut_atoms)


def around(flow: Flow, node: fx.Node) -> set[Term]:
    """The cut atoms of a value, of what it is computed from and of what is computed from it."""
    near = {node, *node.all_input_nodes, *(u for u in node.users if is_op(u))}
    found = set().union(*(flow.atoms(n) for n in near))
    contracted = {t for term, n in flow.ax.contracts if n in near for t in leaves(term)} & flow.cut_atoms
    return found | contracted


def further_on(flow: Flow, node: fx.Node) -> set[Term]:
    """The cut atoms that make the gradient of a value partial: those of what it enters behind its zone."""
    found: set[Term] = set()
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user in seen or not is_op(user):
                continue
            seen.add(user)
            if user in flow.cut or user in flow.partial:
                found |= flow.atoms(user) | set().union(*(flow.atoms(n) for n in user.all_input_nodes))
            elif user in flow.zone:
                pending.append(user)
    return found


def rule_of(flow: Flow, node: fx.Node) -> Rule | None:
    """The rule of an op."""
    return flow.ax.rule(node.meta["op"])


def is_op(node: fx.Node) -> bool:
    """Whether a node is not the graph's output."""
    return node.op != "output"


def seeing(placed: Placed) -> set[fx.Node]:
    """The consumers that see a collective's result."""
    if placed.host is None or placed.consumers:
        return set(placed.consumers)
    if placed.host.side == "output":
        return set(placed.node.users)
    call = placed.host.call
    return {u for u in placed.node.users if is_op(u) and u.meta["call"] is not None and u.meta["call"].inside(call)}


def reaches_all(placed: Placed) -> bool:
    """Whether a collective stands where its value is returned or comes in, so that everybody else sees its result."""
    if placed.host is None or (placed.host.side == "input" and placed.node.meta["op"] != "input"):
        return False
    at_start = placed.host.call.parent is None or placed.host.side == "output"
    return at_start and (not placed.consumers or set(placed.consumers) == set(placed.node.users))


def differentiable(ax: Axes, user: fx.Node) -> bool:
    """Whether a gradient comes back from a consumer."""
    if not is_op(user):
        return True
    if is_many(ax.dims[user]):
        return any(i.meta.get("grad") for i in user.users)
    return bool(user.meta.get("grad"))
