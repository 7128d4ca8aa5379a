"""Collectives of a compiled graph that two GPUs do themselves: which NCCL would do is replaced by :mod:`peers`' ops.

What was traced, and what is run::

    all_reduce(x), wait_tensor                              begin(x), end
    cat of two, each of which is summed                     begin(x), begin(y), end(x, y), which joins them
    reduce_scatter(a @ b), wait_tensor                      begin(the other's rows of a @ b), end(own rows of a @ b)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

NAMESPACE = "tpconvert_peers"
KINDS = {"all_reduce": "sum", "all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}
"""Collectives by the names of their ops -> exchanges."""
AT_ONCE = 4
"""Tensors that one op joins."""

ROWS = 256
"""Of a product that is made in halves, each at least."""
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
        begin, end, least, rank = pairs[group]
        if not _large(start.args[0].meta["val"], 2 * least if kind == "scatter" else least):  # half of it is sent
            continue
        with graph.inserting_before(start):
            halves = _halves(graph, start.args[0], rank) if kind == "scatter" else None
            kind, given, sent = ("cross", *halves) if halves else (kind, start.args[0], start.args[0])
            token = graph.call_function(_op(begin), (sent, kind, before.get(group)))
            token.meta["val"] = sent.meta["val"].new_empty(1)
        with graph.inserting_before(users[0]):
            rest = (sent, None, None) if halves else (None, None, None)
            ended = graph.call_function(_op(end), (token, kind, given, *rest))
            ended.meta = _told(given if halves else users[0])
            if halves:
                shaped = graph.call_function(torch.ops.aten.view.default, (ended, list(users[0].meta["val"].shape)))
                shaped.meta = _told(users[0])
        users[0].replace_all_uses_with(shaped if halves else ended)
        _erase(graph, users[0])
        before[group] = token
        ends.add(ended)
    for node in list(graph.nodes):
        if sums := _joins(node, ends):
            _join(graph, node, sums)


def _halves(graph: fx.Graph, x: Any, rank: int) -> tuple[fx.Node, fx.Node] | None:
    """Of a product that is scattered: this rank's rows and the other's, which can be on their way beside the first."""
    node = x
    while len(node.users) == 1 and _views(node):
        node = node.args[0]
    value = node.meta["val"]
    rows = value.shape[0] if node.target is torch.ops.aten.mm.default and len(node.users) == 1 else None
    if not isinstance(rows, int) or rows % 2 or rows < 2 * ROWS or x.meta["val"].numel() != value.numel():
        return None
    made = []
    for part in (rank, 1 - rank):
        given = (node.args[0], 0, part * rows // 2, (part + 1) * rows // 2)
        half = graph.call_function(torch.ops.aten.slice.Tensor, given)
        half.meta["val"] = node.args[0].meta["val"][: rows // 2]
        product = graph.call_function(node.target, (half, node.args[1]))
        product.meta["val"] = value[: rows // 2]
        made.append(product)
    return made[0], made[1]


def _erase(graph: fx.Graph, node: Any) -> None:
    """A node, and what it alone was made of: a collective, and the product in one piece and its views."""
    while isinstance(node, fx.Node) and not node.users and node.op == "call_function":
        made_of = node.args[0]
        graph.erase_node(node)
        node = made_of


def _views(node: fx.Node) -> bool:
    """Whether an op leaves what is in memory in its order."""
    name = getattr(node.target, "_opname", "")
    if name not in VIEWS or not isinstance(node.args[0], fx.Node):
        return False
    return all(n.meta["val"].is_contiguous() for n in (node, node.args[0]))


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
