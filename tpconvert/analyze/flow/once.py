"""Whole values that are added to terms of a sum, and so count on one rank only.

A bias counts once where it is read.  What a forward computes is made a term of a sum where a module returns it: the
value on one rank, zeros on the others.  That is for forwards that have no boundary to make the sum at before they add;
elsewhere it is made first.
"""

from __future__ import annotations

from torch import fx

from tpconvert.analyze.axes.run import nodes_in, tensors
from tpconvert.analyze.flow.states import ConflictError, Flow, Hosts, Placed, involved, rule_of


def may_be_once(flow: Flow, node: fx.Node) -> bool:
    """A whole parameter that is only ever added."""
    root = root_parameter(node)
    return root is not None and root not in flow.cut and all(_adds(flow, u, n) for u, n in _final_users(root))


PICKS = frozenset(
    [
        "__getitem__",
        "index_select",
        "select",
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "expand",
        "narrow",
        "alias",
        "item",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type_as",
        "contiguous",
        "clone",
    ]
)
"""Ops that only pick, spread or cast entries of a parameter."""


def root_parameter(node: fx.Node) -> fx.Node | None:
    """The parameter a value is picked from, if it is."""
    while node.meta["op"] in PICKS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if node.meta["op"] == "parameter" else None


def _final_users(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """``(op, operand)`` where entries of a parameter are used other than to be picked from again."""
    out = []
    for user in node.users:
        picked = user.op != "output" and user.meta["op"] in PICKS and user.args[0] is node
        out += _final_users(user) if picked else [(user, node)]
    return out


def _adds(flow: Flow, user: fx.Node, node: fx.Node) -> bool:
    rule = rule_of(flow, user)
    if rule is None:
        return False
    bound = flow.ax.bound.get(user, {})
    names = {name for name, value in bound.items() if node in nodes_in(value)}
    return bool(names) and (names == {rule.added} or names <= rule.joint)


def check_once(flow: Flow) -> None:
    """Refuse a bias that is added to a partial value in one place and to a whole one in another."""
    for node in flow.once:
        for user, _ in _final_users(node):
            if user not in flow.partial:
                raise ConflictError(
                    involved(flow, node),
                    user,
                    f"{node.target} is added to a partial value here and to a whole one there",
                )


def is_zero(node: fx.Node) -> bool:
    """Whether a value is all zeros (or not yet written)."""
    op = node.meta["op"]
    if op in ("zeros", "new_zeros", "zeros_like", "empty", "new_empty", "empty_like"):
        return True
    return op in ("to", "expand", "view", "reshape", "contiguous") and is_zero(node.args[0])  # type: ignore[arg-type]


def added_to_terms(flow: Flow, node: fx.Node, partial: list[fx.Node]) -> list[fx.Node]:
    """The whole values that an op adds to terms of sums."""
    rule = rule_of(flow, node)
    bound = flow.ax.bound.get(node, {})
    group = [n for name in (rule.joint if rule is not None else ()) for n in nodes_in(bound.get(name))]
    if not set(partial) <= set(group):
        return []
    return [n for n in group if n not in partial and not is_zero(n) and not may_be_once(flow, n)]


def count_once(flow: Flow, hosts: Hosts, node: fx.Node, added: list[fx.Node]) -> bool:
    """Have whole operands of an op count on one rank; False where one of them cannot, and where there are none."""
    found = [_places(flow, hosts, operand, node) for operand in added]
    if not found or None in found:
        return False
    for place in set().union(*found):  # type: ignore[arg-type]
        host = hosts.output(place)
        assert host is not None
        flow.counted[place] = Placed("once", place, host, host.call)
    return True


def _places(flow: Flow, hosts: Hosts, node: fx.Node, user: fx.Node) -> set[fx.Node] | None:
    """Where a value begins to count on one rank, so that it does for ``user`` and nobody else; None if nowhere."""
    if is_zero(node) or may_be_once(flow, node):
        return set()
    others = [u for u in node.users if u is not user and (u.op == "output" or u.users)]
    if others or node.op != "call_function" or not flow.whole(node) or node in {*flow.counted, *flow.uncounted}:
        return None
    if not all(t.is_floating_point() for t in tensors(node.meta["val"])):
        return None
    if (host := hosts.output(node)) is not None:
        return None if host.call.module.startswith("?") else {node}
    rule, bound = rule_of(flow, node), flow.ax.bound.get(node, {})
    if rule is None or rule.added or any(bound.get(name) not in (None, 0) for name in rule.unless):
        return None
    if terms := [n for name in rule.joint for n in nodes_in(bound.get(name))]:
        found = [_places(flow, hosts, n, node) for n in terms]
        return None if None in found else set().union(*found)  # type: ignore[arg-type]
    operands = nodes_in(list(bound.values()))
    for factor in (bound.get(name) for name in sorted(rule.linear)):
        fits = isinstance(factor, fx.Node) and operands.count(factor) == 1 and factor.meta["op"] != "parameter"
        if fits and (places := _places(flow, hosts, factor, node)):
            return places
    return None


def drop_useless(flow: Flow) -> bool:
    """Take back what is summed right where it began to be a term; True when there was some."""
    useless = [n for n in flow.counted if n in flow.reduced]
    drop(flow, useless)
    for node in useless:
        del flow.reduced[node]
    return bool(useless)


def drop(flow: Flow, nodes: list[fx.Node]) -> None:
    """Have values not count on one rank, nor try to again."""
    for node in nodes:
        del flow.counted[node]
        flow.uncounted.add(node)
