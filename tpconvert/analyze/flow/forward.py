"""The forward side of a flow: what is cut, what is partial, and where partial values are summed and cut ones joined."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from tpconvert.analyze.axes.run import inplace_target, is_many, nodes_in, tensors
from tpconvert.analyze.axes.terms import Term, half_cut, leaves
from tpconvert.analyze.flow.once import (
    added_to_terms,
    count_once,
    drop,
    drop_useless,
    is_zero,
    may_be_once,
    root_parameter,
)
from tpconvert.analyze.flow.states import ConflictError, Flow, Host, Hosts, Placed, is_op, rule_of
from tpconvert.analyze.ops.math import EXPANDING, UNIFORM
from tpconvert.analyze.watch.unseen import storage_of


def check_sums(flow: Flow) -> None:
    """Refuse a contraction over a sum of which only some segments are cut."""
    for term, node in flow.ax.contracts:
        if half := half_cut(term, set(flow.cut_atoms)):
            raise ConflictError(half, node, f"{node.meta['op']} contracts it together with a part that stays whole")


def walk(flow: Flow, hosts: Hosts) -> bool:
    """One walk over the graph; True when a reduce was placed and the walk must be done again."""
    flow.cut.clear()
    flow.partial.clear()
    flow.once.clear()
    flow.began.clear()
    contracts: dict[fx.Node, bool] = defaultdict(bool)
    contracted: dict[fx.Node, set[Term]] = defaultdict(set)
    for term, node in flow.ax.contracts:
        contracts[node] |= term.n > 1 and len(node.all_input_nodes) > 1
        contracted[node] |= leaves(term) & flow.cut_atoms
    for node in flow.ax.trace.nodes:
        op = node.meta["op"]
        if op in ("parameter", "constant", "input"):
            if op == "parameter" and flow.atoms(node) and node not in flow.kept:
                flow.cut.add(node)
            continue
        operands = list(dict.fromkeys(n for n in node.all_input_nodes if n is not node))
        partial = [n for n in operands if n in flow.partial and n not in flow.reduced]
        seen_cut = any(n in flow.cut for n in operands)
        summed = any(n in flow.cut and flow.atoms(n) & contracted[node] for n in operands)
        if ((seen_cut and flow.atoms(node)) or node in flow.made) and node not in flow.gathered:
            flow.cut.add(node)
        if partial and _meets(flow, hosts, node, partial, contracts[node], summed):
            return True  # summed or counted further up, so what was seen since is stale
        if summed and (node in flow.cut or node in flow.gathered):
            raise ConflictError(contracted[node], node, f"{op} sums over it while its result is cut along another axis")
        if summed:
            flow.began.add(node)
        if summed and node not in flow.partial:
            flow.partial.add(node)
            if node in flow.inline:
                flow.reduced[node] = Placed("reduce", node, None, node.meta["call"])
            if _add_once(flow, hosts, node, contracted[node]):
                return True
        if node in flow.counted:
            if node in flow.partial or node in flow.cut:
                drop(flow, [node])
                return True
            flow.partial.add(node)
        target = inplace_target(node)
        if node in flow.partial and target is not None and target.meta["op"] in UNIFORM:
            flow.partial.add(target)
    for node in (*flow.ax.trace.outputs.values(), *flow.ax.trace.read, *flow.ax.trace.kept):
        if node in flow.partial and node not in flow.reduced:
            _reduce(flow, hosts, node)
            return True
    return _drop_stale(flow)


def _meets(flow: Flow, hosts: Hosts, node: fx.Node, partial: list[fx.Node], contracts: bool, summed: bool) -> bool:
    """Let an op see terms of sums where it may, else have them summed before; True where the walk is to begin anew.

    A layer would only make the sum wider, and parts of a sum that differ cannot be summed.
    """
    onto = summed and partial == [_added(flow, node)]
    first = (contracts and not onto) or node in flow.cut or node in flow.gathered
    first = first or writes_kept(flow, node) or _summed_early(flow, node)
    if not first and not onto and _counts(flow, hosts, node, partial):
        return True
    bad = partial if first else [] if onto else _not_linear(flow, node, partial)
    for operand in bad:
        _reduce(flow, hosts, operand)
    if any(u in flow.partial for operand in bad for u in operand.users):
        return True
    if not bad:
        flow.partial.add(node)
    return not all(operand in flow.reduced for operand in bad)


def join_parts(flow: Flow, hosts: Hosts) -> None:
    """Gather the results of modules that are cut by themselves, where they return them."""
    for node in flow.ax.parts:
        if not flow.atoms(node):
            continue
        host = hosts.output(node)
        if host is None or len([t for t in flow.ax.of(node) if leaves(t) & flow.cut_atoms]) != 1:
            raise ConflictError(flow.atoms(node), node, "its layer could not put it together where it returns it")
        check_periods(flow, node)
        flow.gathered[node] = Placed("gather", node, host, host.call)


def _drop_stale(flow: Flow) -> bool:
    """Take back reduces of what is no pending sum any more, and gathers of what is not cut any more."""
    reduces = [n for n in flow.reduced if n not in flow.partial]
    gathers = [n for n in flow.gathered if not any(o in flow.cut for o in n.all_input_nodes)]
    for node in reduces:
        del flow.reduced[node]
    for node in gathers:
        del flow.gathered[node]
    return drop_useless(flow) or bool(reduces or gathers)


def check_periods(flow: Flow, node: fx.Node) -> None:
    """Refuse to gather or scatter a dim in which a size of the inputs stands inside what is cut."""
    for term in flow.ax.of(node):
        if leaves(term) & flow.cut_atoms and flow.ax.period(term) is None:
            raise ConflictError(
                flow.atoms(node), node, "a size of the inputs stands inside the cut dim, so no plan fits all sizes"
            )


def writes_kept(flow: Flow, node: fx.Node) -> bool:
    """Whether an op writes into a parameter, a buffer or another tensor that outlives the forward, or into a view."""
    target = inplace_target(node)
    return target is not None and storage_of(target.meta["val"]) in flow.ax.lasting


def _summed_early(flow: Flow, node: fx.Node) -> bool:
    """Whether the forward that runs an op is to see no pending sums."""
    return node.meta["call"] is not None and node.meta["call"].module in flow.early


def make_local(flow: Flow) -> bool:
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
            if user in seen or not is_op(user):
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
    rule = rule_of(flow, node)
    if rule is None:
        return partial
    bound = flow.ax.bound.get(node, {})
    if any(bound.get(name) not in (None, 0) for name in rule.unless) or not _is_number(node):
        return partial
    names = {id(n): name for name, value in bound.items() for n in nodes_in(value)}
    kinds = {names.get(id(n), "") for n in partial}
    if kinds <= rule.joint:
        group = [n for name in rule.joint for n in nodes_in(bound.get(name))]
        mixed = [n for n in group if n not in partial and not is_zero(n) and not may_be_once(flow, n)]
        scalars = [bound[n] for n in rule.joint if isinstance(bound.get(n), int | float) and bound[n] != 0]
        if mixed or scalars:
            return partial
        flow.once |= {root_parameter(n) or n for n in group if n not in partial and not is_zero(n)}
        return []
    if kinds == {rule.added} and rule.added:
        return partial
    if kinds <= rule.linear and len(partial) == 1 and sum(n is partial[0] for n in nodes_in(list(bound.values()))) == 1:
        added = bound.get(rule.added) if rule.added else None
        if isinstance(added, fx.Node) and not is_zero(added):
            if not may_be_once(flow, added):
                return partial
            flow.once.add(root_parameter(added) or added)
        return []
    return partial


def _is_number(node: fx.Node) -> bool:
    """Whether a result can be a sum: integers and truth values are rounded."""
    return all(t.is_floating_point() or t.is_complex() for t in tensors(node.meta["val"]))


def _add_once(flow: Flow, hosts: Hosts, node: fx.Node, atoms: set[Term]) -> bool:
    """Have what a contraction adds to its sum count once; True where that begins further up."""
    added = _added(flow, node)
    if added is None or is_zero(added) or (added in flow.partial and added not in flow.reduced):
        return False
    if not may_be_once(flow, added):
        if not count_once(flow, hosts, node, [added]):
            raise ConflictError(atoms, node, f"{node.meta['op']} adds a whole value to a partial one")
        return True
    flow.once.add(root_parameter(added) or added)
    return False


def _added(flow: Flow, node: fx.Node) -> fx.Node | None:
    """What an op adds to its contraction."""
    rule = rule_of(flow, node)
    added = flow.ax.bound.get(node, {}).get(rule.added) if rule is not None and rule.added else None
    return added if isinstance(added, fx.Node) else None


def _counts(flow: Flow, hosts: Hosts, node: fx.Node, partial: list[fx.Node]) -> bool:
    """Whether an op adds whole values to terms that have no boundary yet, and those can count on one rank instead."""
    if not _is_number(node) or all(_reachable_host(flow, hosts, n) for n in partial):
        return False
    return count_once(flow, hosts, node, added_to_terms(flow, node, partial))


def _reduce(flow: Flow, hosts: Hosts, node: fx.Node) -> None:
    """Sum a partial value where a boundary allows: at itself, or further up the linear chain."""
    host = hosts.output(node)
    if host is not None:
        flow.reduced[node] = Placed("reduce", node, host, host.call)
        return
    upstream = _terms(flow, node)
    if not upstream or not all(_reachable_host(flow, hosts, n) for n in upstream):
        flow.reduced[node] = Placed("reduce", node, None, node.meta["call"])
        return
    for operand in upstream:
        _reduce(flow, hosts, operand)


def _terms(flow: Flow, node: fx.Node) -> list[fx.Node]:
    """What a value is a sum of, if it is nothing but that."""
    if node in flow.began:
        return []
    return [n for n in node.all_input_nodes if n in flow.partial and n not in flow.reduced]


def _reachable_host(flow: Flow, hosts: Hosts, node: fx.Node) -> bool:
    if hosts.output(node) is not None:
        return True
    upstream = _terms(flow, node)
    return bool(upstream) and all(_reachable_host(flow, hosts, n) for n in upstream)


def gather_outputs(flow: Flow, hosts: Hosts) -> bool:
    """Gather one cut value that leaves the model, as early as a boundary allows; False when there is none left."""
    for node in dict.fromkeys(flow.ax.trace.outputs.values()):
        if node not in flow.cut:
            continue
        behind = _behind(flow, node)
        start, host = _gather_place(flow, hosts, node, behind)
        if host is None:
            raise ConflictError(flow.atoms(node), node, "it reaches the model's output where no module returns it")
        if len([t for t in flow.ax.of(start) if leaves(t) & flow.cut_atoms]) != 1:
            raise ConflictError(flow.atoms(node), node, "it reaches the model's output in two dims")
        check_periods(flow, start)
        flow.gathered[start] = Placed("gather", start, host, host.call)
        flow.reduced.clear()
        flow.made.clear()
        return True
    return False


def _behind(flow: Flow, node: fx.Node) -> set[fx.Node]:
    """The cut values from where an axis enters by a contraction to where it leaves the model, parameters included."""
    contracting = {n for _, n in flow.ax.contracts}
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        here = pending.pop()
        if here not in found:
            found.add(here)
            if here not in contracting:
                pending += [n for n in here.all_input_nodes if n in flow.cut]
    return found


def _gather_place(flow: Flow, hosts: Hosts, node: fx.Node, behind: set[fx.Node]) -> tuple[fx.Node, Host | None]:
    """Where to gather.

    At the one layer the axis enters by, if nothing else takes part in it; parameters that are used only behind it (a
    bias added to the logits) then stay whole.  Else at the first boundary after which nothing needs the parts.
    """
    contracting = {n for _, n in flow.ax.contracts}
    entries = [n for n in behind if n in contracting]
    late = [n for n in behind if n.meta["op"] == "parameter"]
    host = hosts.output(entries[0]) if len(entries) == 1 else None
    if host is not None and not any(_starves(flow, n, behind) for n in (entries[0], *late)):
        flow.kept |= set(late)
        return entries[0], host
    start = _first_cut(flow, node)
    while (hosts.output(start) is None or _starves(flow, start, behind)) and start is not node:
        start = _towards(flow, start, node)
    return start, None if _starves(flow, start, behind) else hosts.output(start)


def _starves(flow: Flow, node: fx.Node, behind: set[fx.Node]) -> bool:
    """Whether a value has consumers elsewhere that need its parts: a parameter used there, or met by a cut value."""
    others = [u for u in node.users if is_op(u) and u not in behind]
    if node.meta["op"] == "parameter":
        return bool(others)
    return any(n in flow.cut and n is not node for u in others for n in u.all_input_nodes)


def _first_cut(flow: Flow, node: fx.Node) -> fx.Node:
    """The op upstream where the value became cut: it has no cut operand but parameters."""
    while True:
        cut = [n for n in node.all_input_nodes if n in flow.cut and n.meta["op"] != "parameter"]
        if len(cut) != 1:
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


def scatter_wholes(flow: Flow, hosts: Hosts) -> None:
    """A whole value that meets a cut one along the cut dim is taken in part."""
    for node in flow.ax.trace.nodes:
        if node in flow.cut or node in flow.gathered or is_many(flow.ax.dims[node]) or not flow.atoms(node):
            continue
        users = [u for u in node.users if is_op(u)]
        wanted = {
            u
            for u in users
            if u in flow.cut
            or ((u in flow.partial or u in flow.gathered) and any(n in flow.cut for n in u.all_input_nodes))
        }
        if not wanted:
            continue
        check_periods(flow, node)
        covered, left = hosts.covering(node, wanted, set(users) - wanted)
        flow.scatters += [Placed("scatter", node, host, host.call) for host, _ in covered]
        for call in dict.fromkeys(u.meta["call"] for u in left):
            mine = tuple(u for u in left if u.meta["call"] is call)
            flow.scatters.append(Placed("scatter", node, None, call, consumers=mine))
