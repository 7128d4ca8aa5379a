"""What a choice of axes makes of every value, forward and backward, and the collectives that follow.

Forward, a value on a rank is *cut* (a part), *partial* (a term of a sum) or *whole*.  A contraction over a cut axis
makes a partial value, which stays partial through linear ops and is *reduced* as late as a module boundary allows.

Backward, the gradient of a value that every rank holds may be a term of a sum: that is so where the value enters an
op with a cut or partial result.  Such a gradient is summed once for each value, at the nearest boundary upstream (a
*copy*), or where the parameter is read.  Values between the boundary and the op form a zone of partial gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tpconvert.analyze.axes import Axes, Rule, flat, inplace_target, is_many, nodes_in
from tpconvert.analyze.capture import Call
from tpconvert.analyze.ops_math import EXPANDING, UNIFORM
from tpconvert.analyze.terms import Term, half_cut, leaves


class Conflict(Exception):
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
    """copy, scatter inside a forward: the ops that see the result."""


@dataclass(eq=False)
class Flow:
    """The states and collectives of one choice."""

    ax: Axes
    cut_atoms: frozenset[Term]
    inline: frozenset[fx.Node] = frozenset()
    cut: set[fx.Node] = field(default_factory=set)
    """Values a rank holds a part of."""
    made: set[fx.Node] = field(default_factory=set)
    """Ops that make a cut dim out of nothing (an expand, a constant fill) and do so in its local size."""
    partial: set[fx.Node] = field(default_factory=set)
    """Values that are terms of a sum when computed (before their reduce, if they have one)."""
    reduced: dict[fx.Node, Placed] = field(default_factory=dict)
    gathered: dict[fx.Node, Placed] = field(default_factory=dict)
    once: set[fx.Node] = field(default_factory=set)
    sum_grad: set[fx.Node] = field(default_factory=set)
    """Parameters whose gradient is partial."""
    zone: set[fx.Node] = field(default_factory=set)
    """Values whose gradient is partial."""
    copies: list[Placed] = field(default_factory=list)
    scatters: list[Placed] = field(default_factory=list)
    _atoms: dict[fx.Node, set[Term]] = field(default_factory=dict)

    @property
    def placed(self) -> list[Placed]:
        """Every collective."""
        return [*self.reduced.values(), *self.gathered.values(), *self.copies, *self.scatters]

    def atoms(self, node: fx.Node) -> set[Term]:
        """The cut atoms among a value's dims."""
        if node not in self._atoms:
            self._atoms[node] = set().union(*(leaves(t) for t in flat(self.ax.dims[node]))) & self.cut_atoms
        return self._atoms[node]

    def whole(self, node: fx.Node) -> bool:
        """Whether consumers see all of the value."""
        return node not in self.cut and (node not in self.partial or node in self.reduced)


def trace_flow(ax: Axes, cut_atoms: Iterable[Term], inline: frozenset[fx.Node] = frozenset()) -> Flow:
    """The flow of one choice of atoms; ``inline`` lookups are summed where they are made.

    Raises Conflict where they cannot be cut.
    """
    flow = Flow(ax, frozenset(cut_atoms), inline)
    hosts = Hosts(ax)
    _check_sums(flow)
    while _forward(flow, hosts) or _make_local(flow) or _outputs(flow, hosts):
        pass
    _check_once(flow)
    _scatter(flow, hosts)
    Backward(flow, hosts).run()
    return flow


class Hosts:
    """Finds module boundaries for values."""

    def __init__(self, ax: Axes) -> None:
        self.outputs: dict[fx.Node, list[Call]] = defaultdict(list)
        self.inputs: dict[fx.Node, list[Call]] = defaultdict(list)
        for call in ax.trace.calls:
            for node in dict.fromkeys(call.outputs.values()):
                self.outputs[node].append(call)
            for node in dict.fromkeys(call.inputs.values()):
                self.inputs[node].append(call)

    def output(self, node: fx.Node) -> Host | None:
        """The innermost call that returns the value it computed, when nothing inside uses it further."""
        for call in sorted(self.outputs[node], key=lambda c: -c.position):
            made = node.meta["call"]
            if made is None or not made.inside(call):
                continue
            if any(_is_op(u) and u.meta["call"] is not None and u.meta["call"].inside(call) for u in node.users):
                continue
            return Host(call, "output", tuple(s for s, n in call.outputs.items() if n is node))
        return None

    def covering(self, node: fx.Node, wanted: set[fx.Node], others: set[fx.Node]) -> tuple[list[tuple[Host, set[fx.Node]]], set[fx.Node]]:
        """Calls whose input is ``node`` and which hold only ``wanted`` consumers: ``(hosts with theirs, consumers left)``."""
        found = []
        left = set(wanted)
        for call in sorted(self.inputs[node], key=lambda c: c.position):
            inside = {u for u in left if u.meta["call"] is not None and u.meta["call"].inside(call)}
            if not inside or any(u.meta["call"] is not None and u.meta["call"].inside(call) for u in others):
                continue
            made = node.meta["call"]
            if made is not None and made.inside(call):
                continue
            found.append((Host(call, "input", tuple(s for s, n in call.inputs.items() if n is node)), inside))
            left -= inside
        return found, left


# -- forward ----------------------------------------------------------------------------------------------


def _check_sums(flow: Flow) -> None:
    for term, node in flow.ax.contracts:
        if half := half_cut(term, set(flow.cut_atoms)):
            raise Conflict(half, node, f"{node.meta['op']} contracts it together with a part that stays whole")


def _forward(flow: Flow, hosts: Hosts) -> bool:
    """One walk over the graph; True when a reduce was placed and the walk must be done again."""
    flow.cut.clear()
    flow.partial.clear()
    flow.once.clear()
    contracts: dict[fx.Node, bool] = defaultdict(bool)
    contracted: dict[fx.Node, set[Term]] = defaultdict(set)
    for term, node in flow.ax.contracts:
        contracts[node] |= term.n > 1
        contracted[node] |= leaves(term) & flow.cut_atoms
    for node in flow.ax.trace.nodes:
        op = node.meta["op"]
        if op in ("parameter", "constant", "input"):
            if op == "parameter" and flow.atoms(node):
                flow.cut.add(node)
            continue
        operands = list(dict.fromkeys(n for n in node.all_input_nodes if n is not node))
        partial = [n for n in operands if n in flow.partial and n not in flow.reduced]
        seen_cut = any(n in flow.cut for n in operands)
        summed = any(n in flow.cut and flow.atoms(n) & contracted[node] for n in operands)
        if ((seen_cut and flow.atoms(node)) or node in flow.made) and node not in flow.gathered:
            flow.cut.add(node)
        if partial:
            bad = _not_linear(flow, node, partial)
            if not bad and contracts[node]:
                bad = partial  # a layer on top of a pending sum would only make the sum wider
            for operand in bad:
                _reduce(flow, hosts, operand)
            if not all(operand in flow.reduced for operand in bad):
                return True  # summed further up, so what was seen since is stale
            if not bad:
                flow.partial.add(node)
        if summed and node not in flow.partial:
            flow.partial.add(node)
            if node in flow.inline:
                flow.reduced[node] = Placed("reduce", node, None, node.meta["call"])
            _add_once(flow, node, contracted[node])
        if node in flow.partial and (target := inplace_target(node)) is not None:
            flow.partial.add(target) if target.meta["op"] in UNIFORM else None
    for node in flow.ax.trace.outputs.values():
        if node in flow.partial and node not in flow.reduced:
            _reduce(flow, hosts, node)
            return True
    stale = [n for n in flow.reduced if n not in flow.partial]
    for node in stale:
        del flow.reduced[node]
    return bool(stale)


def _make_local(flow: Flow) -> bool:
    """Find an expand or a constant fill whose new dim meets cut values further on; True when one was found."""
    found = False
    for node in flow.ax.trace.nodes:
        if node in flow.cut or node.op != "call_function" or is_many(flow.ax.dims[node]) or not flow.atoms(node):
            continue
        if node.meta["op"] not in UNIFORM | EXPANDING or any(flow.atoms(n) for n in node.all_input_nodes):
            continue
        if _meets_cut(flow, node):
            flow.made.add(node)
            found = True
    return found


def _meets_cut(flow: Flow, node: fx.Node) -> bool:
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        for user in current.users:
            if user in seen or not _is_op(user):
                continue
            seen.add(user)
            if any(n in flow.cut for n in user.all_input_nodes):
                return True
            if is_many(flow.ax.dims[user]) or flow.atoms(user):
                pending.append(user)
    return False


def _not_linear(flow: Flow, node: fx.Node, partial: list[fx.Node]) -> list[fx.Node]:
    """The partial operands that must be whole before this op."""
    if node.meta["op"] in ("item", "alias"):
        return []
    rule = _rule(flow, node)
    if rule is None:
        return partial
    bound = flow.ax.bound.get(node, {})
    names = {id(n): name for name, value in bound.items() for n in nodes_in(value)}
    kinds = {names.get(id(n), "") for n in partial}
    if kinds <= rule.joint:
        group = [n for name in rule.joint for n in nodes_in(bound.get(name))]
        mixed = [n for n in group if n not in partial and not is_zero(n) and not _may_be_once(flow, n)]
        scalars = [bound[n] for n in rule.joint if isinstance(bound.get(n), int | float) and bound[n] != 0]
        if mixed or scalars:
            return partial
        flow.once |= {n for n in group if n not in partial and not is_zero(n)}
        return []
    if kinds == {rule.added} and rule.added:
        return partial
    if kinds <= rule.linear and len(partial) == 1 and sum(n is partial[0] for n in nodes_in(list(bound.values()))) == 1:
        added = bound.get(rule.added) if rule.added else None
        if isinstance(added, fx.Node) and not is_zero(added):
            if not _may_be_once(flow, added):
                return partial
            flow.once.add(added)
        return []
    return partial


def _add_once(flow: Flow, node: fx.Node, atoms: set[Term]) -> None:
    rule = _rule(flow, node)
    added = flow.ax.bound.get(node, {}).get(rule.added) if rule is not None and rule.added else None
    if not isinstance(added, fx.Node) or is_zero(added):
        return
    if not _may_be_once(flow, added):
        raise Conflict(atoms, node, f"{node.meta['op']} adds a whole value to a partial one")
    flow.once.add(added)


def _may_be_once(flow: Flow, node: fx.Node) -> bool:
    """A whole parameter that is only ever added."""
    return node.meta["op"] == "parameter" and node not in flow.cut and all(_adds(flow, u, node) for u in node.users)


def _adds(flow: Flow, user: fx.Node, node: fx.Node) -> bool:
    rule = _rule(flow, user)
    if rule is None:
        return False
    bound = flow.ax.bound.get(user, {})
    names = {name for name, value in bound.items() if node in nodes_in(value)}
    return bool(names) and (names == {rule.added} or names <= rule.joint)


def _check_once(flow: Flow) -> None:
    for node in flow.once:
        for user in node.users:
            if user not in flow.partial:
                raise Conflict(involved(flow, node), user, f"{node.target} is added to a partial value here and to a whole one there")


def involved(flow: Flow, node: fx.Node) -> set[Term]:
    """The cut atoms around a value, for telling which axes a conflict is about."""
    near = {node, *node.all_input_nodes, *(u for u in node.users if _is_op(u))}
    found = set().union(*(flow.atoms(n) for n in near))
    contracted = {t for term, n in flow.ax.contracts if n in near for t in leaves(term)} & flow.cut_atoms
    return found | contracted or set(flow.cut_atoms)


def _rule(flow: Flow, node: fx.Node) -> Rule | None:
    op = node.meta["op"]
    return flow.ax.rules.get(op) or flow.ax.rules.get(op.rstrip("_"))


def is_zero(node: fx.Node) -> bool:
    """Whether a value is all zeros (or not yet written)."""
    op = node.meta["op"]
    if op in ("zeros", "new_zeros", "zeros_like", "empty", "new_empty", "empty_like"):
        return True
    return op in ("to", "expand", "view", "reshape", "contiguous") and is_zero(node.args[0])  # type: ignore[arg-type]


def _reduce(flow: Flow, hosts: Hosts, node: fx.Node) -> None:
    """Sum a partial value where a boundary allows: at itself, or further up the linear chain."""
    host = hosts.output(node)
    if host is not None:
        flow.reduced[node] = Placed("reduce", node, host, host.call)
        return
    upstream = [n for n in node.all_input_nodes if n in flow.partial and n not in flow.reduced]
    if not upstream or not all(_reachable_host(flow, hosts, n) for n in upstream):
        flow.reduced[node] = Placed("reduce", node, None, node.meta["call"])
        return
    for operand in upstream:
        _reduce(flow, hosts, operand)


def _reachable_host(flow: Flow, hosts: Hosts, node: fx.Node) -> bool:
    if hosts.output(node) is not None:
        return True
    upstream = [n for n in node.all_input_nodes if n in flow.partial and n not in flow.reduced]
    return bool(upstream) and all(_reachable_host(flow, hosts, n) for n in upstream)


def _outputs(flow: Flow, hosts: Hosts) -> bool:
    """Gather one cut value that leaves the model, as early as a boundary allows; False when there is none left."""
    for node in dict.fromkeys(flow.ax.trace.outputs.values()):
        if node not in flow.cut:
            continue
        start = _first_cut(flow, node)
        host = hosts.output(start)
        while host is None and start is not node:
            start = _towards(flow, start, node)
            host = hosts.output(start)
        if host is None:
            raise Conflict(flow.atoms(node), node, "it reaches the model's output where no module returns it")
        if len([t for t in flow.ax.of(start) if leaves(t) & flow.cut_atoms]) != 1:
            raise Conflict(flow.atoms(node), node, "it reaches the model's output in two dims")
        flow.gathered[start] = Placed("gather", start, host, host.call)
        flow.reduced.clear()
        flow.made.clear()
        return True
    return False


def _first_cut(flow: Flow, node: fx.Node) -> fx.Node:
    """The op upstream where the value became cut: it has no cut operand but parameters."""
    while True:
        cut = [n for n in node.all_input_nodes if n in flow.cut and n.meta["op"] != "parameter"]
        if not cut:
            return node
        if len(cut) > 1:
            return node
        node = cut[0]


def _towards(flow: Flow, start: fx.Node, end: fx.Node) -> fx.Node:
    """The consumer of ``start`` on the way to ``end``."""
    node = end
    while True:
        cut = [n for n in node.all_input_nodes if n in flow.cut and n.meta["op"] != "parameter"]
        if start in cut or not cut:
            return node
        node = cut[0]


def _scatter(flow: Flow, hosts: Hosts) -> None:
    """A whole value that meets a cut one along the cut dim is taken in part."""
    for node in flow.ax.trace.nodes:
        if node in flow.cut or node in flow.gathered or is_many(flow.ax.dims[node]) or not flow.atoms(node):
            continue
        users = [u for u in node.users if _is_op(u)]
        wanted = {u for u in users if u in flow.cut or (u in flow.partial and any(n in flow.cut for n in u.all_input_nodes))}
        if not wanted:
            continue
        covered, left = hosts.covering(node, wanted, set(users) - wanted)
        flow.scatters += [Placed("scatter", node, host, host.call) for host, _ in covered]
        for call in dict.fromkeys(u.meta["call"] for u in left):
            mine = tuple(u for u in left if u.meta["call"] is call)
            flow.scatters.append(Placed("scatter", node, None, call, consumers=mine))


# -- backward ---------------------------------------------------------------------------------------------


class Backward:
    """Finds the zones of partial gradients and closes each with a copy."""

    def __init__(self, flow: Flow, hosts: Hosts) -> None:
        self.flow, self.hosts = flow, hosts
        self.returned = set(flow.ax.trace.outputs.values())
        self.scattered = {(p.node, u) for p in flow.scatters for u in p.node.users}
        self.inside: set[fx.Node] = set()
        for node in flow.ax.trace.nodes:
            entered = node in flow.cut or node in flow.partial
            passed = any(n in self.inside and n not in flow.reduced and n not in flow.gathered for n in node.all_input_nodes)
            if node.meta["op"] != "parameter" and (entered or passed):
                self.inside.add(node)

    def run(self) -> None:
        """Visit values from the last to the first."""
        for node in reversed(self.flow.ax.trace.nodes):
            if is_many(self.flow.ax.dims[node]):
                if any(u in self.flow.zone for u in node.users):
                    self.flow.zone.add(node)
            elif node.meta.get("grad"):
                self.visit(node)

    def visit(self, node: fx.Node) -> None:
        """Decide where the gradient of one value is summed."""
        flow = self.flow
        users = [u for u in node.users if _is_op(u) and self.differentiable(u)]
        partial = {u for u in users if self.edge_is_partial(node, u)}
        returned = node in self.returned
        mixed_many = [u for u in partial if is_many(flow.ax.dims[u]) and not self.all_items(u)]
        if not partial:
            return
        if node.meta["op"] == "parameter":
            self.parameter(node, users, partial)
            return
        outside = node not in self.inside or node in flow.reduced or node in flow.gathered
        if len(partial) == len(users) and not mixed_many and not returned:
            if not outside or not self.close(node, partial):
                flow.zone.add(node)
            return
        if not outside:
            if not self.segments_agree(node, users):
                raise Conflict(involved(flow, node), node, "part of its gradient is summed over ranks and part is not")
            flow.zone.add(node)
            return
        self.mixed(node, users, partial, mixed_many)

    def close(self, node: fx.Node, partial: set[fx.Node]) -> bool:
        """Place the copy of a value all of whose consumers are in the region; False where no boundary fits."""
        host = self.hosts.output(node)
        if host is not None:
            self.flow.copies.append(Placed("copy", node, host, host.call))
            return True
        covered, left = self.hosts.covering(node, partial, set())
        if left and node not in self.flow.reduced and node not in self.flow.gathered:
            return False
        self.place(node, covered, left)
        return True

    def place(self, node: fx.Node, covered: list[tuple[Host, set[fx.Node]]], left: set[fx.Node]) -> None:
        """Copies at module inputs, and for the consumers left, inside the forward that holds them."""
        self.flow.copies += [Placed("copy", node, host, host.call) for host, _ in covered]
        for call in dict.fromkeys(u.meta["call"] for u in sorted(left)):
            mine = tuple(u for u in left if u.meta["call"] is call)
            self.flow.copies.append(Placed("copy", node, None, call, consumers=mine))

    def parameter(self, node: fx.Node, users: list[fx.Node], partial: set[fx.Node]) -> None:
        """A parameter whose every use gives a term of its gradient has it summed where it is read."""
        if len(partial) < len(users):
            raise Conflict(involved(self.flow, node), node, f"{node.target} is used both inside and outside the cut region")
        self.flow.sum_grad.add(node)

    def mixed(self, node: fx.Node, users: list[fx.Node], partial: set[fx.Node], mixed_many: list[fx.Node]) -> None:
        """Only part of a value enters the region: a segment of it, or some of its consumers."""
        spans = self.spans(node, users) if node not in self.returned else None
        host = self.hosts.output(node)
        if spans is not None and host is not None:
            self.flow.copies += [Placed("copy", node, host, host.call, span) for span in spans]
            return
        if mixed_many:
            raise Conflict(involved(self.flow, node), node, "only a segment of it enters the cut region, and no module returns it")
        self.place(node, *self.hosts.covering(node, partial, set(users) - partial))

    def edge_is_partial(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether the gradient ``user`` sends to ``node`` is a term of a sum over ranks."""
        flow = self.flow
        if user in flow.zone:
            return True
        if (node, user) in self.scattered and node not in flow.cut:
            return False
        if user.meta["op"] in ("item", "alias"):
            return False
        if node in flow.partial and node not in flow.reduced:
            return False
        if is_many(flow.ax.dims[user]):
            return any(i in flow.zone or (i in flow.cut and self.missing(node, i)) for i in user.users)
        if user in flow.partial:
            rule = _rule(flow, user)
            names = {name for name, value in flow.ax.bound.get(user, {}).items() if node in nodes_in(value)}
            if rule is not None and (names <= rule.joint or names == {rule.added}):
                return False
            if node in flow.once:
                return False
            return node not in flow.cut
        return (user in flow.cut or user in flow.gathered) and self.missing(node, user)

    def missing(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether the result is cut along an axis the operand is not."""
        if node not in self.flow.cut:
            return True
        return bool(self.flow.atoms(user) - self.flow.atoms(node))

    def differentiable(self, user: fx.Node) -> bool:
        """Whether a gradient comes back from ``user``."""
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
        """The ranges of one dim with partial gradients, when every consumer takes a range of it and the others stay apart."""
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


def _is_op(node: fx.Node) -> bool:
    return node.op != "output"
