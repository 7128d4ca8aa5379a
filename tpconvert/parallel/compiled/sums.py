"""Sums of matrix products that a collective takes: each term is added where the one before it is.

What several column-parallel layers read has a gradient of as many products, and the sum over ranks waits for all::

    as traced    mm, mm, mm, add, add, all_reduce     three products are written, read again, and their sum is written
    as run       sum_of_products, all_reduce          mm, then addmm_ of each other product

A compiler leaves products to a library and adds them in a kernel of its own, with which it can fuse nothing here: a
collective takes what is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
LAYOUT = (*VIEWS, aten.permute.default, aten.clone.default)
"""Ops that leave a tensor's numbers as they are."""
LIBRARY = torch.library.Library("tpconvert", "FRAGMENT")
"""Where torch keeps the op: a compiled graph can name an op, but hold no function."""


def sum_of_products(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    """``lefts[0] @ rights[0] + lefts[1] @ rights[1] + ...``, each (N, I) by (I, O) with an I of its own."""
    total = torch.mm(lefts[0], rights[0])
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        total.addmm_(left, right)
    return total


LIBRARY.define("sum_of_products(Tensor[] lefts, Tensor[] rights) -> Tensor")
LIBRARY.impl("sum_of_products", sum_of_products, "CompositeExplicitAutograd")


@torch.library.register_fake("tpconvert::sum_of_products", lib=LIBRARY)
def _(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    return lefts[0].new_empty(lefts[0].shape[0], rights[0].shape[1])


SUM_OF_PRODUCTS = torch.ops.tpconvert.sum_of_products.default


def add_in_place(graph: fx.Graph, starts: Callable[[fx.Node], bool]) -> None:
    """Make one op of the products in each sum that collectives alone take; ``starts`` tells which nodes those are."""
    for node in list(graph.nodes):
        if not adds(node) or not _taken(node, starts):
            continue
        terms = list(summed_terms(node))  # in which what is no product may be twice
        products = {term: p for term in terms if (p := _product(term)) is not None}
        if len(products) > 1:
            _replace(graph, node, products, [term for term in terms if term not in products])


def adds(node: fx.Node) -> bool:
    """Whether it adds two tensors of one shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    made, *given = (n.meta["val"] for n in (node, *node.all_input_nodes))
    return all(t.shape == made.shape and t.dtype == made.dtype for t in given)


def _taken(node: fx.Node, starts: Callable[[fx.Node], bool]) -> bool:
    """Whether collectives read a value, in whatever layout, and nobody else does."""
    users = list(node.users)
    return bool(users) and all(starts(u) or (u.target in LAYOUT and _taken(u, starts)) for u in users)


def summed_terms(total: fx.Node) -> Iterator[fx.Node]:
    """What a sum adds, and what the sums in it add that nobody else reads."""
    for term in total.all_input_nodes:
        if adds(term) and len(term.users) == 1:
            yield from summed_terms(term)
        else:
            yield term


def _product(term: fx.Node) -> fx.Node | None:
    """The product that a term is, in the rows and columns of its last dim, if nobody else reads it."""
    node: Any = term
    while node.target in VIEWS and len(node.users) == 1:
        node = node.args[0]
    made = node.meta["val"]
    is_product = node.target is aten.mm.default and len(node.users) == 1
    return node if is_product and made.shape[-1] == term.meta["val"].shape[-1] else None


def _replace(graph: fx.Graph, total: fx.Node, products: dict[fx.Node, fx.Node], others: list[fx.Node]) -> None:
    """One op for the products of a sum, in the shape of its terms, and what else it adds after it."""
    first, product = next(iter(products.items()))
    with graph.inserting_before(total):
        lefts, rights = ([p.args[i] for p in products.values()] for i in range(2))
        made = graph.call_function(SUM_OF_PRODUCTS, (lefts, rights))
        made.meta["val"] = product.meta["val"]
        found = _viewed(graph, made, first, product)
        for other in others:
            found = graph.call_function(aten.add.Tensor, (found, other))
            found.meta["val"] = total.meta["val"]
    total.replace_all_uses_with(found)
    erase(graph, [total], (aten.add.Tensor, aten.mm.default, *VIEWS))


def _viewed(graph: fx.Graph, made: fx.Node, term: Any, product: fx.Node) -> fx.Node:
    """``made`` as ``term`` sees its product."""
    if term is product:
        return made
    found = graph.call_function(term.target, (_viewed(graph, made, term.args[0], product), *term.args[1:]))
    found.meta["val"] = term.meta["val"]
    return found


def erase(graph: fx.Graph, nodes: Iterable[fx.Node], ops: Container[Any]) -> None:
    """Erase what nobody reads any more, and what was computed for it alone, where it is of these ``ops``."""
    for node in nodes:
        if not node._erased and not node.users and node.target in ops:
            given = node.all_input_nodes
            graph.erase_node(node)
            erase(graph, given, ops)


def after(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """``nodes`` and all that depends on them."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.users
    return found
