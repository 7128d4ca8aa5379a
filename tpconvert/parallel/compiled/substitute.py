"""Collectives of a compiled graph that two GPUs do themselves: which NCCL would do is replaced by :mod:`peers`' ops.

What was traced, and what is run::

    all_reduce(x), wait_tensor                              begin(x), end
    cat of two, each of which is summed                     begin(x), begin(y), end(x, y), which joins them
    reduce_scatter(a @ b), wait_tensor                      begin(the other's rows of a @ b), end(own rows of a @ b)
    all_gather(a), wait_tensor, a @ b                       begin(a), own rows of a @ b, end, the other's rows of it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import torch
from torch import fx, nn

NAMESPACE = "tpconvert_peers"
KINDS = {"all_reduce": "sum", "all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}
"""Collectives by the names of their ops -> exchanges."""
AT_ONCE = 4
"""Tensors that one op joins."""

ROWS = 256
"""Of a product that is made in halves, each at least."""
BUSY = 2**21
"""Numbers that a product makes while all of a GPU works at it; one of fewer takes as long."""
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
VIEWS = ("view", "_unsafe_view", "reshape", "permute", "unsqueeze", "squeeze", "clone")

Pair = tuple[str, str, int, int]
"""The names of the ops that begin and end, the bytes from which on they are used, and this rank."""
Pairs = Mapping[str, Pair]
"""Of groups, by name."""


def pairs_of(module: nn.Module) -> dict[str, Pair]:
    """The groups of a converted module whose two ranks reach each other's memory."""
    meshes = [mesh for part in module.modules() if (mesh := vars(part).get("tp_mesh")) is not None]
    return {m.group.group_name: (*m.peers.names, m.peers.least, m.rank) for m in meshes if m.peers is not None}


def substitute(graph: fx.Graph, pairs: Pairs) -> None:
    """Replace what can be, in place; exchanges keep the order of the collectives they replace."""
    before: dict[str, fx.Node] = {}
    ends: set[fx.Node] = set()
    for start in list(graph.nodes):
        kind, group = _meaning(start)
        users = list(start.users)
        if kind is None or group not in pairs or len(users) != 1 or not _is(users[0], "wait_tensor"):
            continue
        least = pairs[group][2]
        if not _large(start.args[0].meta["val"], 2 * least if kind == "scatter" else least):  # half of it is sent
            continue
        before[group], ended = _exchange(graph, start, users[0], kind, pairs[group], before.get(group))
        ends.add(ended)
    for node in list(graph.nodes):
        if sums := _joins(node, ends):
            _join(graph, node, sums)


def _exchange(
    graph: fx.Graph, start: fx.Node, wait: fx.Node, kind: str, pair: Pair, before: fx.Node | None
) -> tuple[fx.Node, fx.Node]:
    """The nodes that begin and end what a collective and its wait did, in their places."""
    begin, end, _, rank = pair
    x: Any = start.args[0]
    product = _product_in_halves(x) if kind == "scatter" else None
    with graph.inserting_before(start):
        sent = x if product is None else _half(graph, product, 1 - rank)
        kind = kind if product is None else "cross"
        token = graph.call_function(_op(begin), (sent, kind, before))
        token.meta["val"] = sent.meta["val"].new_empty(1)
        given = x if product is None else _half(graph, product, rank)  # is computed while the other is on its way
    with graph.inserting_before(wait):
        ended = graph.call_function(_op(end), (token, kind, given, None if product is None else sent, None, None))
        ended.meta = _told(wait if product is None else given)
        result = ended
        if product is not None:
            result = graph.call_function(torch.ops.aten.view.default, (ended, list(wait.meta["val"].shape)))
            result.meta = _told(wait)
    wait.replace_all_uses_with(result)
    _erase(graph, wait)
    if kind == "gather":
        _own_rows_first(graph, x, ended, rank)
    return token, ended


def _product_in_halves(x: Any) -> fx.Node | None:
    """The product that is scattered, if the rows that the other rank wants can be on their way beside its own."""
    node = x
    while len(node.users) == 1 and _views(node):
        node = node.args[0]
    value = node.meta["val"]
    rows = value.shape[0] if node.target is torch.ops.aten.mm.default and len(node.users) == 1 else None
    if not isinstance(rows, int) or rows % 2 or rows < 2 * ROWS or x.meta["val"].numel() != value.numel():
        return None
    return cast("fx.Node", node)


def _half(graph: fx.Graph, product: fx.Node, part: int) -> fx.Node:
    """Half of its rows."""
    left: Any = product.args[0]
    rows = product.meta["val"].shape[0] // 2
    half = graph.call_function(torch.ops.aten.slice.Tensor, (left, 0, part * rows, (part + 1) * rows))
    half.meta["val"] = left.meta["val"][:rows]
    made = graph.call_function(product.target, (half, product.args[1]))  # type: ignore[arg-type]
    made.meta["val"] = product.meta["val"][:rows]
    return made


def _own_rows_first(graph: fx.Graph, own: Any, ended: fx.Node, rank: int) -> None:
    """Of products of what is gathered, the rows that this rank has had all along need not wait for the other's."""
    for product in _products_of(ended):
        gathered, weight = product.args[-2:]
        value, made = gathered.meta["val"], product.meta["val"]
        half = value.shape[0] // 2
        if not isinstance(half, int) or half < ROWS or value.shape[0] % 2 or half * made.shape[1] < BUSY:
            continue
        with graph.inserting_before(product):
            mine = graph.call_function(torch.ops.aten.view.default, (own, [half, value.shape[1]]))
            theirs = graph.call_function(
                torch.ops.aten.slice.Tensor, (gathered, 0, (1 - rank) * half, (2 - rank) * half)
            )
            halves = []
            for rows in (mine, theirs):
                rows.meta["val"] = value[:half]
                each = graph.call_function(product.target, (*product.args[:-2], rows, weight))
                each.meta["val"] = made[:half]
                halves.append(each)
            both = graph.call_function(torch.ops.aten.cat.default, (halves if rank == 0 else halves[::-1],))
        both.meta = _told(product)
        product.replace_all_uses_with(both)
        graph.erase_node(product)


def _products_of(gathered: fx.Node) -> list[fx.Node]:
    """Those whose rows are what was gathered, in its order, and which add at most the same bias to each row."""
    found = []
    for user in list(gathered.users):
        if _views(user):
            found += _products_of(user)
        elif user.target in PRODUCTS and user.args[-2] is gathered and not user.kwargs:
            bias: Any = user.args[:-2]
            if user.args[-1] is not gathered and all(b.meta["val"].dim() == 1 for b in bias):
                found.append(user)
    return found


def _erase(graph: fx.Graph, node: Any) -> None:
    """A node, and what it alone was made of: a collective, and the product in one piece and its views."""
    while isinstance(node, fx.Node) and not node.users and node.op == "call_function":
        made_of = node.args[0]
        graph.erase_node(node)
        node = made_of


def _views(node: fx.Node) -> bool:
    """Whether an op leaves what is in memory in its order, and of its dtype."""
    name = getattr(node.target, "_opname", "")
    if name not in VIEWS or not isinstance(node.args[0], fx.Node):
        return False
    made, given = node.meta["val"], node.args[0].meta["val"]
    return made.dtype == given.dtype and made.is_contiguous() and given.is_contiguous()


def _op(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _told(node: fx.Node) -> dict[str, Any]:
    return {k: v for k, v in node.meta.items() if k != "eager_input_vals"}


def _join(graph: fx.Graph, cat: fx.Node, sums: list[fx.Node]) -> None:
    """One end for several begins that follow one another."""
    tensors: list[Any] = [s.args[2] for s in sums]
    with graph.inserting_before(cat):
        end: Any = sums[-1].target
        ended = graph.call_function(end, (sums[-1].args[0], "sum", *tensors, *[None] * (AT_ONCE - len(sums))))
    ended.meta = _told(cat)
    cat.replace_all_uses_with(ended)
    for node in (cat, *sums):
        graph.erase_node(node)


def _joins(node: fx.Node, ends: set[fx.Node]) -> list[fx.Node]:
    """The ends of sums, begun one after the other, of which a node is the cat along the first dim and the only user."""
    if node.target is not torch.ops.aten.cat.default or (len(node.args) > 1 and node.args[1] != 0):
        return []
    sums: Any = node.args[0]
    if not 1 < len(sums) <= AT_ONCE or not all(s in ends and s.args[1] == "sum" and len(s.users) == 1 for s in sums):
        return []
    tokens = [s.args[0] for s in sums]
    return list(sums) if all(b.args[2] is a for a, b in pairwise(tokens)) else []


def _meaning(node: fx.Node) -> tuple[str | None, str]:
    """The exchange that a collective is, and its group; None where it is none."""
    found = next((kind for name, kind in KINDS.items() if _is(node, name)), None)
    if found is None or (found != "gather" and node.args[1] != "sum"):
        return None, ""
    x: Any = node.args[0]
    value = x.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return None, ""
    return found, str(node.args[-1])


def _large(value: torch.Tensor, least: int) -> bool:
    """Whether it may be worth it; of an unknown size one finds out when it is there."""
    return math.prod(n if isinstance(n, int) else max(1, least) for n in value.shape) * value.element_size() >= least


def _is(node: fx.Node, name: str) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.name() == f"_c10d_functional::{name}"
