"""Layers to be looked at again: those that no axis runs through, and norms that alone stand in the way of one.

The first are cut by themselves, as columns whose results are put together at once.  The second are taken apart into
the means that they are made of, which ranks can sum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Set

from torch import fx

from tpconvert.analyze.axes.run import Axes, is_float
from tpconvert.analyze.axes.terms import find
from tpconvert.analyze.capture.parts import NORMS
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.choice.costs import Costs, Layer, is_parameter
from tpconvert.analyze.flow.once import root_parameter
from tpconvert.analyze.flow.run import Flow
from tpconvert.spec.plan import Plan

FEW = 2
"""Norms of an axis that is one layer's: the width of a model has those of every layer."""


def inner_norms(ax: Axes) -> frozenset[str]:
    """Modules whose norms alone block an axis that one matrix reads, as the inner width of a layer is read.

    What several read is a stream that layers add to: there a norm is better left as it is.
    """
    out: set[str] = set()
    for atom, blocked in ax.blocked.items():
        calls = [b.node.meta["call"] for b in blocked if b.node.meta["op"] in NORMS]
        modules = {c.module for c in calls if c is not None and not c.module.startswith("?")}
        if find(atom) is not atom or len(calls) < len(blocked) or not 0 < len(modules) <= FEW:
            continue
        operands = (n for node in ax.contracted.get(atom, ()) for n in node.all_input_nodes)
        if len({root_parameter(n) for n in operands if is_parameter(n) and len(n.meta["shape"]) > 1}) == 1:
            out |= modules
    return frozenset(out)


def norms_apart(plan: Plan) -> frozenset[str]:
    """Modules whose norms a plan has taken apart, as far as their forwards are written anew."""
    fused = {r.module for r in plan.rewrites if any(str(n.get("target", "")).endswith(tuple(NORMS)) for n in r.nodes)}
    return frozenset(r.module for r in plan.rewrites) - fused


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
