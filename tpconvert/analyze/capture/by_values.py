"""Which values have a shape that hangs on other values."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import fx

DATA_SHAPED = frozenset(["nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"])
"""Ops whose result has a shape that hangs on values."""

WRITES = frozenset(
    ["index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce", "masked_scatter"]
)
"""Ops that write into a copy of their first operand: as in-place ops do, they give its shape, whatever they write."""

SIZED = frozenset(["arange", "empty", "full", "ones", "rand", "randn", "zeros"])
"""Ops that make a tensor of a size that may be given as a tensor."""


def holds_tensor(tree: Any) -> bool:
    """Whether a size holds a tensor."""
    return isinstance(tree, fx.Node) or (isinstance(tree, tuple | list) and any(map(holds_tensor, tree)))


def shaped_by_values(node: fx.Node, inplace: bool, known: Set[fx.Node]) -> bool:
    """Whether the shape of an op's result hangs on values, ``known`` being those of which it does."""
    op = node.meta["op"]
    if op in DATA_SHAPED or (op == "where" and len(node.args) == 1):
        return True
    if op == "repeat_interleave" and len(node.all_input_nodes) > 1:
        return True
    if op.removeprefix("new_") in SIZED and any(holds_tensor(a) for a in node.args[op.startswith("new_") :]):
        return True
    shaping = node.args[:1] if inplace or op in WRITES else node.all_input_nodes
    return any(n in known for n in shaping)
