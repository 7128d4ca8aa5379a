"""Rows in the order in which slices come: a product takes them in any, so that nothing is copied to sort them.

The slices of a batch are gathered rank by rank, so tokens lie in the order (ranks, sequences, tokens of a rank) where
the model has (sequences, ranks, tokens of a rank)::

    as traced    gather, sort, mm, gelu, mm, sort, scatter
    as run       gather, mm, sort, gelu, sort, mm, scatter

What is left to be sorted is between products, where a compiler sorts as it reads and writes for something else, and
where a rank has its part of the features only.  Weight gradients sum over rows, in any order that both factors have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tpconvert.parallel.compiled.sums import VIEWS

aten, wire = torch.ops.aten, torch.ops._c10d_functional
CAST = torch.ops.prims.convert_element_type.default
PRODUCTS = (aten.mm.default, aten.addmm.default)
PARTS = (
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int,
    aten.expand.default,
)  # fmt: skip
REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.var_mean.correction)
SORTS = (aten.permute.default, aten.t.default, aten.clone.default)

AGAIN = "tpconvert_again"
"""Marks what a backward had better make again than be given."""

Order = tuple[int, int, int]
"""Ranks, sequences and tokens of a rank, whose product is the number of rows."""


def take_as_they_come(graph: fx.Graph) -> None:
    """Let products take rows as they are gathered and make them as they are scattered, in place.

    Not where more would have to be sorted behind products, or before them, than is spared.
    """
    rows = _Rows(graph)
    for node in list(graph.nodes):
        if node.target is wire.reduce_scatter_tensor.default:
            rows.scatter(node)
    for node in list(graph.nodes):
        if node.target is aten.permute.default and _was_gathered(node.args[0]):
            rows.gathered(node)
    for node in list(graph.nodes):
        if node.target is aten.sum.dim_IntList and node.args[1] == [0]:
            rows.sum(node)
    for node in reversed(list(graph.nodes)) if rows.known else ():
        if not node.users and node.target in (*PRODUCTS, *VIEWS, *SORTS, CAST, aten.add.Tensor, aten.sum.dim_IntList):
            graph.erase_node(node)


class _Rows:
    """Changes a graph whose values of two dims are rows of tokens."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.known: dict[tuple[fx.Node, Order], fx.Node] = {}
        """Rows in the model's order -> the same as slices come."""

    def gathered(self, permuted: fx.Node) -> None:
        """Rows that were gathered: products take them as they came, and sums over rows, if that spares anything."""
        for clone in [u for u in permuted.users if u.target is aten.clone.default]:
            plain, turned = [], []
            for rows in [n for n in _seen_as(clone) if n.meta["val"].dim() == 2 and self.order(n)]:
                plain += [u for u in rows.users if _is_product(u) and u.args[-2] is rows]
                turned += [u for u in rows.users if _is_product(u) and u.args[-1] is rows and _is_turned(u.args[-2])]
                turned += [
                    p for u in rows.users if _is_turned(u) for p in u.users if _is_product(p) and p.args[-2] is u
                ]
            spared = permuted.meta["val"].numel()
            if plain and spared > sum(p.meta["val"].numel() for p in plain if not _is_fused(p)):
                for product in plain:
                    self.take(product)
            if turned and spared > sum(r.meta["val"].numel() for r in map(self.other, turned) if r is not None):
                for product in turned:
                    self.take_turned(product)

    def other(self, product: fx.Node) -> fx.Node | None:
        """The rows that would have to be sorted for a product that sums over rows."""
        both = product.args[-2].args[0], product.args[-1]  # type: ignore[union-attr]
        orders = [self.order(rows) for rows in both]  # type: ignore[arg-type]
        if None not in orders:
            return None
        rows, order = both[orders.index(None)], next(o for o in orders if o is not None)
        return None if (rows, order) in self.known or _is_made_here(rows) else rows  # type: ignore[return-value]

    def take(self, product: fx.Node) -> None:
        """Sort behind a product of what was gathered, once more where its backward needs it."""
        left, right = product.args[-2:]
        order = self.order(left)  # type: ignore[arg-type]
        assert order is not None
        with self.graph.inserting_before(product):
            made = self.op(product, product.target, *product.args[:-2], self.as_come(left, order), right)
            found = self.sort(made, order, again=True)
        self.known[found, order] = made
        product.replace_all_uses_with(found)

    def take_turned(self, product: fx.Node) -> None:
        """Sum over rows in the order in which one of the factors came."""
        rows: Any = product.args[-2].args[0]  # type: ignore[union-attr]
        right: Any = product.args[-1]
        order = self.order(rows) or self.order(right)
        assert order is not None
        with self.graph.inserting_before(product):
            turned = self.op(rows, aten.permute.default, self.as_come(rows, order), [1, 0])
            made = self.op(product, product.target, *product.args[:-2], turned, self.as_come(right, order))
        product.replace_all_uses_with(made)

    def sum(self, node: fx.Node) -> None:
        """A sum over rows, of which any order will do: that which is there for another reason."""
        rows: Any = node.args[0]
        found = [there for (these, _), there in self.known.items() if these is rows and there.users]
        if found:
            node.replace_input_with(rows, found[0])

    def scatter(self, node: fx.Node) -> None:
        """A product that is scattered, or a sum of products: they make the rows in the order in which they go."""
        clone: Any = node.args[0]
        permuted: Any = clone.args[0] if clone.target is aten.clone.default else clone
        if permuted.target is not aten.permute.default or len(clone.users) > 1 or len(permuted.users) > 1:
            return
        made, dims = permuted.args[0], _dims(permuted)
        at, shape = dims[0], made.meta["val"].shape
        if not at or dims != [at, *range(at), *range(at + 1, len(dims))] or not _fixed(shape):
            return
        parts = list(_products(made))
        rows = {p.meta["val"].shape[0] for p in parts if p is not None}
        ranks, sequences = shape[at], math.prod(shape[:at])
        if None in parts or len(rows) != 1 or sequences == 1 or (count := rows.pop()) % (ranks * sequences):
            return
        order = ranks, sequences, count // (ranks * sequences)
        lefts = [p.args[-2].meta["val"].numel() for p in parts if not _is_made_here(p.args[-2])]
        if sum(lefts) >= made.meta["val"].numel():
            return
        with self.graph.inserting_before(node):
            found = self.op(clone, aten.view.default, self.made_as_they_go(made, order), list(clone.meta["val"].shape))
        node.replace_input_with(clone, found)

    def made_as_they_go(self, node: Any, order: Order) -> fx.Node:
        """The rows of a product, or of a sum of products, as slices go."""
        if node.target in PRODUCTS:
            *bias, left, right = node.args
            return self.op(node, node.target, *bias, self.as_come(left, order), right)
        if node.target is aten.add.Tensor:
            given = [self.made_as_they_go(term, order) for term in node.args]
            return self.op(given[0], aten.add.Tensor, *given)
        given = [self.made_as_they_go(node.args[0], order)]
        return self.op(given[0], CAST, *given, node.args[1]) if node.target is CAST else given[0]

    def as_come(self, rows: fx.Node, order: Order) -> fx.Node:
        """Rows of the model's order as slices come: as they came, or sorted."""
        if self.order(rows) != order and (rows, order) not in self.known:
            behind = rows.next
            while behind.op == "placeholder":
                behind = behind.next
            with self.graph.inserting_before(behind):
                ranks, sequences, tokens = order
                self.known[rows, order] = self.sort(rows, (sequences, ranks, tokens))
        return self.known[rows, order]

    def order(self, rows: fx.Node) -> Order | None:
        """The order in which rows came, if they were gathered and sorted since."""
        casts, node = [], rows
        while node.target in (*VIEWS, CAST):
            casts += [node] * (node.target is CAST)
            node = node.args[0]  # type: ignore[assignment]
        permuted: Any = node.args[0] if node.target is aten.clone.default else None
        if permuted is None or permuted.target is not aten.permute.default or not _was_gathered(permuted.args[0]):
            return None
        came, dims = permuted.args[0], _dims(permuted)
        at, shape = dims.index(0), came.meta["val"].shape
        count = rows.meta["val"].shape[0]
        ranks, sequences = shape[0], math.prod(shape[1 : at + 1])
        moved = dims == [*range(1, at + 1), 0, *range(at + 1, len(dims))]
        if not moved or not _fixed(shape) or sequences == 1 or count % (ranks * sequences):
            return None
        order = ranks, sequences, count // (ranks * sequences)
        if (rows, order) not in self.known:
            with self.graph.inserting_before(rows):
                found = self.op(rows, aten.view.default, came, list(rows.meta["val"].shape))
                for cast in reversed(casts):
                    found = self.op(rows, CAST, found, cast.args[1])
            self.known[rows, order] = found
        return order

    def sort(self, rows: fx.Node, shape: Order, again: bool = False) -> fx.Node:
        """Rows that lie in this order, with its first two dims exchanged; ``again`` in a backward rather than kept."""
        apart = self.op(rows, aten.reshape.default, rows, [*shape, rows.meta["val"].shape[1]])
        turned = self.op(rows, aten.permute.default, apart, [1, 0, 2, 3])
        copied = self.op(rows, aten.clone.default, turned, memory_format=torch.contiguous_format)
        found = self.op(rows, aten.view.default, copied, list(rows.meta["val"].shape))
        for node in (apart, turned, copied, found) if again else ():
            node.meta[AGAIN] = True
        return found

    def op(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node at the point of insertion, of which torch is told what it was told of ``like``."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in like.meta.items() if k not in ("eager_input_vals", AGAIN)}
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node


def _is_product(node: fx.Node) -> bool:
    """Whether it is a product, to each row of which at most the same bias is added."""
    return node.target in PRODUCTS and not node.kwargs and all(b.meta["val"].dim() == 1 for b in node.args[:-2])  # type: ignore[union-attr]


def _dims(permuted: Any) -> list[int]:
    """The dims that a permutation takes, counted from the first."""
    return [dim % len(permuted.args[1]) for dim in permuted.args[1]]


def _is_turned(node: Any) -> bool:
    return node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0])


def _seen_as(node: fx.Node) -> Iterator[fx.Node]:
    """A value in all shapes and dtypes that it is given."""
    yield node
    for user in node.users:
        if user.target in (*VIEWS, CAST):
            yield from _seen_as(user)


def _is_fused(node: fx.Node) -> bool:
    """Whether whoever reads a value is compiled, and can as well read it in another order."""
    return all(
        _is_fused(u) if u.target in (*VIEWS, *SORTS, *PARTS) else _is_compiled(u) or u.target in REDUCTIONS
        for u in node.users
    )


def _is_made_here(node: Any) -> bool:
    """Whether what makes a value is compiled, and can as well write it in another order."""
    while node.target in (*VIEWS, *SORTS, *PARTS):
        node = node.args[0]
    return _is_compiled(node)


def _is_compiled(node: fx.Node) -> bool:
    """Whether it is an op on single numbers, which a compiler writes itself."""
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return pointwise or node.target in (aten.cat.default, aten._to_copy.default)


def _was_gathered(node: Any) -> bool:
    return node.target is wire.wait_tensor.default and node.args[0].target is wire.all_gather_into_tensor.default


def _fixed(shape: torch.Size) -> bool:
    """Whether sizes are numbers, in a graph for one length of sequences."""
    return all(isinstance(n, int) for n in shape)


def _products(node: Any) -> Iterator[fx.Node | None]:
    """The products that a value is the sum of, None for what is something else or is read elsewhere too."""
    if len(node.users) > 1:
        yield None
    elif _is_product(node):
        yield node
    elif node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2:
        for term in node.all_input_nodes:
            yield from _products(term) if term.meta["val"].shape == node.meta["val"].shape else [None]
    elif node.target in (*VIEWS, CAST):
        yield from _products(node.args[0])
    else:
        yield None
