"""Products of one value as one product: q, k and v of an attention, whose weights are joined in each step.

    as traced    x @ q^T, x @ k^T, x @ v^T          three products, each of which fills a GPU less than once
    as run       x @ cat(q, k, v)^T, three slices   and in the backward one product for each of their gradients

A rank's part of such layers is narrow.  Parameters and gradients stay apart, so nothing else knows of it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from tpconvert.parallel.compiled.sums import VIEWS, adds, after, erase, summed_terms

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
PRODUCTS = (aten.mm.default, aten.addmm.default)
ALIASES = (
    *VIEWS,
    aten.t.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.expand.default,
)
"""Ops whose result lies in the memory of what they are given."""
SPARED = (*PRODUCTS, *VIEWS, CAST, aten.t.default, aten.permute.default, aten.add.Tensor, aten.sum.dim_IntList)
"""What can be left out where nobody reads it."""
ROWS = 4096
"""Rows from which on it pays: to join weights takes about 200 / rows of what their products take."""
ALIGNED = 8
"""Features at whose multiples a slice begins where a GPU reads it quickly."""
ENTRIES = 2**22
"""Of what a product makes, up to which it does not fill a GPU; one of more than four times as many gains nothing."""


@dataclass(frozen=True)
class Linear:
    """A product of rows with a parameter, and where its gradients are computed of the gradient of what it makes."""

    made: fx.Node
    rows: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    grad: fx.Node
    to_rows: fx.Node
    to_weight: fx.Node
    to_bias: fx.Node | None

    @property
    def width(self) -> int:
        """How many features it makes."""
        return int(self.made.meta["val"].shape[1])


def merge_products(graph: fx.Graph, *, rows: int = ROWS, entries: int = ENTRIES) -> None:
    """Make one product of those that have their left operand in common, in a joint graph of forward and backward.

    Where one of them makes at most so many ``entries``, all together at most four times as many, of at least so many
    ``rows``, and all are kept for the backward: a slice that is kept keeps what it is a slice of.  No collective is
    moved: none lies between the gradients that are joined.
    """
    changed = False
    backward = after(n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target))
    for group in list(_groups(graph, backward)):
        counts = [each.made.meta["val"].numel() for each in group]
        if len(group[0].made.meta["val"]) < rows or min(counts) > entries or sum(counts) > 4 * entries:
            continue
        if _talks_between(graph, [each.grad for each in group]):
            continue
        parts = list(pairwise(accumulate((each.width for each in group), initial=0)))
        strides = _restrided(group, parts, graph)
        if strides is not None:
            _Merge(graph, group, parts).run(strides)
            changed = True
    if changed:
        stable_topological_sort(graph)


def _groups(graph: fx.Graph, backward: set[fx.Node]) -> Iterator[list[Linear]]:
    """Linear layers of the same rows, alike in biases and in what checkpointing says, each with a weight of its own."""
    found: dict[Any, list[Linear]] = defaultdict(list)
    for node in graph.nodes:
        if (linear := _linear(node)) is not None and _is_kept(node, backward):
            left = linear.rows.meta["val"]
            made, again = linear.made.meta["val"], linear.made.meta.get("recompute")
            key = _seen(linear.rows), tuple(left.shape), left.dtype, made.dtype, linear.bias is None, again
            found[key].append(linear)
    for group in found.values():
        if len(group) > 1 and len({each.weight for each in group}) == len(group):
            yield group


def _linear(node: fx.Node) -> Linear | None:
    """A node as such a product; None where it is none, or where a gradient of it is computed in another way."""
    if node.target not in PRODUCTS or node.kwargs or not all(isinstance(n, int) for n in node.meta["val"].shape):
        return None
    *biases, rows, right = node.args
    weight, turned = _straight(right)
    if node.meta["val"].shape[1] % ALIGNED or not turned or not all(_is_parameter(p) for p in (weight, *biases)):
        return None
    back = [p for p in _products_with(weight) if p.args[0].meta["val"].shape == node.meta["val"].shape]  # type: ignore[union-attr]
    if len(back) != 1:
        return None
    grad: Any = back[0].args[0]
    to_weight = [p for u in grad.users if _turns(u) for p in u.users if p.target is aten.mm.default and p.args[0] is u]
    to_bias = [u for u in grad.users if u.target is aten.sum.dim_IntList and u.args[1:] == ([0], True)]
    if len(to_weight) != 1 or _seen(to_weight[0].args[1]) != _seen(rows) or len(to_bias) != len(biases):
        return None
    bias, summed = (biases[0], to_bias[0]) if biases else (None, None)
    return Linear(node, rows, weight, bias, grad, back[0], to_weight[0], summed)  # type: ignore[arg-type]


def _products_with(weight: fx.Node) -> Iterator[fx.Node]:
    """The products whose right operand is a weight as it is, through any number of turns."""
    pending = [(weight, False)]
    while pending:
        node, turned = pending.pop()
        for user in node.users:
            if _turns(user):
                pending.append((user, not turned))
            elif not turned and user.target is aten.mm.default and user.args[1] is node:
                yield user


def _is_kept(node: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether a backward reads what a product makes, seen in whatever shape."""
    return any(u in backward or (u.target in ALIASES and _is_kept(u, backward)) for u in node.users)


def _talks_between(graph: fx.Graph, grads: Sequence[fx.Node]) -> bool:
    """Whether anything but arithmetic is done after the first of these and before the last."""
    nodes = list(graph.nodes)
    index = sorted(nodes.index(grad) for grad in grads)
    between = (n.target for n in nodes[index[0] : index[-1]] if isinstance(n.target, torch._ops.OpOverload))
    return any(target.namespace not in ("aten", "prims") or target._schema.is_mutable for target in between)


def _straight(node: Any) -> tuple[fx.Node, bool]:
    """What a matrix was before it was turned, and whether it is turned in the end."""
    turned = False
    while _turns(node):
        node, turned = node.args[0], not turned
    return node, turned


def _turns(node: Any) -> bool:
    return node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0])


def _seen(node: Any) -> tuple[Any, ...]:
    """A value before it was seen in another shape, and the dtypes it was given since: several nodes may be the same."""
    dtypes = []
    while node.target in (*VIEWS, CAST):
        dtypes += [node.args[1]] * (node.target is CAST)
        node = node.args[0]
    return node, *dtypes


def _product_of(term: Any) -> fx.Node | None:
    """The product that a term of a sum is, in whatever shape and dtype, if nobody else reads it."""
    node = term
    while node.target in (*VIEWS, CAST) and len(node.users) == 1:
        node = node.args[0]
    return node if len(node.users) == 1 else None


def _is_parameter(node: Any) -> bool:
    """Whether it is an input of the graph that is not written into, in whatever dtype."""
    while node.target is CAST:
        node = node.args[0]
    written = any(u.target is aten.copy_.default for u in node.users)
    return node.op == "placeholder" and "tangents" not in str(node.target) and not written


def _restrided(group: Sequence[Linear], parts: Sequence[tuple[int, int]], graph: fx.Graph) -> dict[fx.Node, Any] | None:
    """What changes its strides where products are slices of one; None where something could not be computed of them.

    A compiler copies what a library's kernel is given into the strides that it was traced with.
    """
    count, width = group[0].made.meta["val"].shape[0], parts[-1][1]
    whole = group[0].made.meta["val"].new_empty(count, width)
    found: dict[fx.Node, Any] = {each.made: whole[:, a:b] for each, (a, b) in zip(group, parts, strict=True)}

    def value(node: fx.Node) -> Any:
        return found.get(node, node.meta.get("val"))

    for node in graph.nodes:
        if node.op != "call_function" or node in found or not any(n in found for n in node.all_input_nodes):
            continue
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            return None  # what runs a graph of its own
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        try:
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):  # a view that there is not of a slice
            return None
        old, new = ([t for t in tree_leaves(v) if isinstance(t, Tensor)] for v in (node.meta["val"], made))
        if [t.shape for t in old] != [t.shape for t in new]:
            return None
        if [t.stride() for t in old] != [t.stride() for t in new]:
            found[node] = made
    (output,) = (n for n in graph.nodes if n.op == "output")
    return None if any(n in found for n in output.all_input_nodes) else found


class _Merge:
    """Puts one product and its gradients in the place of several."""

    def __init__(self, graph: fx.Graph, group: Sequence[Linear], parts: Sequence[tuple[int, int]]) -> None:
        self.graph, self.group, self.parts = graph, group, parts

    def run(self, strides: Mapping[fx.Node, Any]) -> None:
        """Change the graph, which has to be sorted after."""
        for node, value in strides.items():
            node.meta["val"] = value
            for user in node.users:
                user.meta.pop("eager_input_vals", None)
        weight = self.forward()
        grad = self.joined([each.grad for each in self.group], 1, self.group[0].to_rows)
        self.to_weights(grad)
        self.to_rows(grad, weight)
        old = (n for each in self.group for n in (each.made, each.to_weight, each.to_bias, each.to_rows))
        erase(self.graph, [n for n in old if n is not None], SPARED)

    def forward(self) -> fx.Node:
        """One product for all; the weights that were joined are joined again in the backward, rather than kept."""
        first = self.group[0]
        weight = self.again(self.joined([each.weight for each in self.group], 0, first.made))
        turned = self.again(self.op(first.made, aten.permute.default, weight, [1, 0]))
        biases = [each.bias for each in self.group if each.bias is not None]
        bias = [self.joined(biases, 0, first.made)] if biases else []
        made = self.op(first.made, first.made.target, *bias, first.rows, turned)
        self.slices(made, [each.made for each in self.group], 1)
        return weight

    def to_weights(self, grad: fx.Node) -> None:
        """One product for the gradients of all weights, and one sum for those of biases."""
        first = self.group[0]
        turned = self.op(first.to_weight, aten.permute.default, grad, [1, 0])
        made = self.op(first.to_weight, aten.mm.default, turned, first.to_weight.args[1])
        self.slices(made, [each.to_weight for each in self.group], 0)
        if first.to_bias is not None:
            summed = self.op(first.to_bias, first.to_bias.target, grad, *first.to_bias.args[1:])
            self.slices(summed, [each.to_bias for each in self.group], 1)

    def to_rows(self, grad: fx.Node, weight: fx.Node) -> None:
        """One product for the sum of the gradients of the rows, where they are terms of one sum."""
        ours = {each.to_rows for each in self.group}
        for total in reversed(self.graph.nodes):
            if not adds(total):
                continue
            terms = list(summed_terms(total))
            mine = [t for t in terms if _product_of(t) in ours]
            if len(mine) == len(ours):
                made = self.op(self.group[0].to_rows, aten.mm.default, grad, weight)
                value = total.meta["val"]
                cast = made if made.meta["val"].dtype == value.dtype else self.op(total, CAST, made, value.dtype)
                found = self.op(total, aten.view.default, cast, list(value.shape))
                for other in (t for t in terms if t not in mine):
                    found = self.op(total, aten.add.Tensor, found, other)
                total.replace_all_uses_with(found)
                erase(self.graph, [total], SPARED)
                return

    def joined(self, nodes: Sequence[Any], dim: int, like: Any) -> fx.Node:
        """Matrices side by side."""
        return self.op(like, aten.cat.default, list(nodes), dim)

    def slices(self, made: fx.Node, nodes: Sequence[Any], dim: int) -> None:
        """Parts of one value in the place of several."""
        for node, (start, stop) in zip(nodes, self.parts, strict=True):
            part = self.op(node, aten.slice.Tensor, made, dim, start, stop)
            if "recompute" in part.meta:
                part.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.replace_all_uses_with(part)

    def again(self, node: fx.Node) -> fx.Node:
        """Marks for the partitioner what a backward makes again."""
        node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": node.meta.get("ac_graph_id", 0)}
        return node

    def op(self, like: Any, target: Any, *args: Any) -> fx.Node:
        """A node before another, of which torch is told what it was told of that one."""
        with self.graph.inserting_before(like):
            node = self.graph.call_function(target, args)
        node.meta = {k: v for k, v in like.meta.items() if k != "eager_input_vals"}
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node
