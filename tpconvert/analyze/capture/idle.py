"""Ops whose results nothing uses, such as scores that a faster kernel computes once more: they bind no axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from tpconvert.analyze.trace.call import Call, Trace
from tpconvert.analyze.trace.draws import is_random
from tpconvert.analyze.trace.provenance import Expression, Int, dims_read


def without_idle(trace: Trace) -> Trace:
    """The trace without ops that have no effect: their results enter no other op, no module, no output, no size."""
    kept, gone = set(_needed(trace)), []
    for place, node in reversed(list(enumerate(trace.graph.nodes))):
        if node.op == "call_function" and not node.users and node not in kept and not _acts(node):
            trace.graph.erase_node(node)
            gone.append(place)
    for call in trace.calls if gone else ():
        call.position -= sum(place < call.position for place in gone)
        call.end -= sum(place < call.end for place in gone)
    return trace


def _acts(node: fx.Node) -> bool:
    """Whether an op does more than it returns, or is one result of several."""
    op = node.meta["op"]
    several = op == "item" and len(node.args[0].users) > 1  # type: ignore[union-attr]
    writes = op == "alias" or op.endswith("_") or op.startswith(("__i", "__set")) or "out" in node.kwargs
    return several or writes or is_random(op) or bool(node.meta.get("watches")) or bool(node.meta.get("own_backward"))


def _needed(trace: Trace) -> Iterator[fx.Node]:
    """The values that more than ops know of."""
    yield from (*trace.outputs.values(), *trace.read, *trace.kept, *trace.by_data)
    for call in trace.calls:
        yield from _values(call)
    for node in trace.nodes:
        yield from _in(node.args, node.kwargs)
        yield from (source for source, _ in node.meta.get("dtypes", ()))
    for expression in trace.formulas:
        yield from _read(expression)


def _values(call: Call) -> Iterator[fx.Node]:
    """What a module is given and gives, and what it asked sizes of."""
    yield from (*call.inputs.values(), *call.outputs.values(), *call.stand_ins, *(n for n, _ in call.sized))
    yield from _in(call.constants, call.arguments, call.result)
    for _, left, right in call.decided:
        yield from (*_read(left), *_read(right))


def _in(*trees: Any) -> Iterator[fx.Node]:
    """The values that numbers in nested arguments are sizes of."""
    for leaf in tree_leaves(trees):
        if isinstance(leaf, Int):
            yield from _read(leaf.expression)


def _read(expression: Expression) -> Iterator[fx.Node]:
    yield from (node for node, _ in dims_read(expression))
