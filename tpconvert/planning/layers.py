"""Layers that no axis runs through, to be cut by themselves: columns whose results are put together at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Set

from torch import fx

from tpconvert.analyze.axes.run import is_float
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.choice.costs import Costs, Layer
from tpconvert.analyze.flow.run import Flow
from tpconvert.spec.plan import Plan


def whole_layers(flow: Flow, plan: Plan, named: Set[str]) -> frozenset[str]:
    """Modules with a matrix among the ``named`` that a plan leaves whole and that would be worth it."""
    if plan.tp == 1 or not named:
        return frozenset()
    ax = flow.ax
    whole = {v.name for v in plan.verdicts if not v.layout.cut and v.kind == "parameter" and len(v.shape) > 1} & named
    parents = {c.parent for c in ax.trace.calls}
    found: dict[str, list[Layer | None]] = defaultdict(list)
    for _, node in ax.contracts:
        call = node.meta["call"]
        weight = _weight(node, whole)
        if weight is None or call is None or call in parents or not call.module or call.module.startswith("?"):
            continue
        result = _result(call)
        fits = result is not None and min(weight.meta["shape"]) >= plan.tp
        found[call.module].append(Layer(weight, result) if fits and result is not None else None)
    calls = [layer for layers in found.values() if None not in layers for layer in layers if layer is not None]
    pays = Costs(ax).worthwhile(flow, calls)
    return frozenset(m for m, layers in found.items() if all(layer in pays for layer in layers))


def cut_parameters(plan: Plan) -> int:
    """How many parameters a plan cuts."""
    return sum(math.prod(v.shape) for v in plan.verdicts if v.layout.cut and not v.tied_to)


def _weight(node: fx.Node, whole: Set[str]) -> fx.Node | None:
    """The whole matrix that a contraction reads, as it is, or as its forward casts or transposes it."""
    for operand in node.all_input_nodes:
        while len(operand.all_input_nodes) == 1 and operand.meta["call"] is node.meta["call"]:
            operand = operand.all_input_nodes[0]
        if operand.meta["op"] == "parameter" and operand.target in whole:
            return operand
    return None


def _result(call: Call) -> fx.Node | None:
    """The one value that a call returns and computed itself."""
    made = dict.fromkeys(call.outputs.values())
    if len(made) != 1:
        return None
    (node,) = made
    return node if node.meta["call"] is call and is_float(node) else None
