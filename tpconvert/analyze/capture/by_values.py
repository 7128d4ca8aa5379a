"""Which values have a shape that hangs on other values, and which values hang on nothing."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import fx

from tpconvert.analyze.trace.draws import is_random
from tpconvert.analyze.trace.provenance import dims_read, integers

DATA_SHAPED = frozenset(["nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"])
"""Ops whose result has a shape that hangs on values."""

WRITES = frozenset(
    ["index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce", "masked_scatter"]
)
"""Ops that write into a copy of their first operand: as in-place ops do, they give its shape, whatever they write."""

SIZED = frozenset(["arange", "empty", "full", "ones", "rand", "randn", "zeros"])
"""Ops that make a tensor of a size that may be given as a tensor."""

WRITTEN = frozenset(["tensor", "as_tensor", "scalar_tensor", "full", "ones", "zeros", "arange", "linspace", "eye"])
"""Ops that make a tensor of numbers alone."""

UNFILLED = frozenset(["empty", "empty_like", "new_empty", "empty_strided"])
"""Ops that give memory that nothing was written to; with values it holds zeros, the same at every run."""


def is_written(node: fx.Node, sizes: bool = False) -> bool:
    """Whether a value is made of the numbers in a forward alone: a question about it has one answer for all calls.

    With ``sizes``, or of these and sizes of the inputs: one answer for all calls of these sizes.
    """
    pending, seen = [node], {node}
    while pending:
        made = pending.pop()
        op, operands = made.meta["op"], made.all_input_nodes
        if made.op != "call_function" or is_random(op) or (not operands and op not in WRITTEN):
            return False
        if not sizes and _is_sized(made):
            return False
        pending += [n for n in operands if n not in seen]
        seen.update(operands)
    return True


def _is_sized(node: fx.Node) -> bool:
    """Whether an op is given a size of a tensor, which is another one for other inputs."""
    return bool(_sizes_read(node))


def _sizes_read(node: fx.Node) -> set[fx.Node]:
    """The tensors whose sizes an op is given, as they are or in a formula."""
    sizes = (n.expression for _, n in integers((node.args, dict(node.kwargs))))
    return {tensor for made in sizes for tensor, _ in dims_read(made)}


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
    if inplace or op in WRITES:
        return any(n in known for n in node.args[:1])
    return bool(known) and not known.isdisjoint({*node.all_input_nodes, *_sizes_read(node)})
