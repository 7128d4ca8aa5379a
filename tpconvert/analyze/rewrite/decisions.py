"""What one capture shows of whether a forward does the same at each call, and what a later call must be asked."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from typing import Any

from torch import fx

from tpconvert.analyze.axes.run import Axes, is_many
from tpconvert.analyze.axes.terms import Term, find, leaves
from tpconvert.analyze.capture.by_values import is_written
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.trace.provenance import dims_read

Question = tuple[Any, Any, Any, bool]
"""``(comparison, left, right, answer)``, of two expressions."""


def hindrance(ax: Axes, call: Call) -> str:
    """Why a forward cannot be written from its recorded ops; empty where nothing is in the way."""
    if not call.plain:
        return "it returns an object, not plain tensors"
    if any(n in ax.trace.by_data for n in ax.trace.nodes if n.meta["call"] is call):
        return "its shapes hang on values"
    if _counted(call):
        return "its caller counts by values, and gives it a number that may be another next time"
    if any(_is_free(ax, n, i) for n, i in call.sized):
        return "it makes a number of a size of its inputs"
    if call.asked:
        return f"it branches on values ({call.asked})"
    if hooked := next((c.module for c in ax.trace.calls if c.parent is call and c.hooked), None):
        return f"what the hooks of {hooked} do would be done twice"
    if call.casts:
        return "it turns autocast on or off, or asks whether it is on"
    if given := next((c.module for c in ax.trace.calls if c.stand_ins and c is not call and c.inside(call)), None):
        return f"it runs {given} on other values than its parameters"
    return f"it sets {call.assigned}, which others may read" if call.assigned else ""


def questions(ax: Axes, call: Call, fixed: Set[Term]) -> list[Question]:
    """What a forward decided by sizes of the inputs, and, as equalities, its inputs' sizes that are ``fixed``."""
    asked = [
        (question, left, right, answer)
        for (question, left, right), answer in call.decided.items()
        if left != right and any(_is_free(ax, n, i) for side in (left, right) for n, i in dims_read(side))
    ]
    for node in dict.fromkeys(call.inputs.values()):
        terms = () if is_many(ax.dims[node]) else ax.of(node)
        stays = [i for i, t in enumerate(terms) if {find(t), *leaves(t)} & fixed]
        asked += [(operator.eq, ("dim", node, i), terms[i].n, True) for i in stays]
    return asked


def idle(call: Call, steps: Sequence[fx.Node | Call]) -> set[fx.Node]:
    """Ops of a forward that only a question with one answer was about: they change nothing, and nothing uses them."""
    given = {n for step in steps if isinstance(step, Call) for n in step.inputs.values()}
    kept, out = {*call.outputs.values(), *given}, set[fx.Node]()
    for step in reversed(steps):
        if isinstance(step, fx.Node) and step not in kept and is_written(step) and out.issuperset(step.users):
            out.add(step)
    return out


def _is_free(ax: Axes, node: fx.Node, dim: int) -> bool:
    """Whether a dim hangs on a size of the model's inputs, as one without atoms may."""
    atoms = leaves(ax.of(node)[dim])
    return bool(atoms & ax.input_atoms) or (not atoms and node.meta["op"] != "parameter")


def _counted(call: Call) -> bool:
    """Whether a number among its arguments may come from values that a caller read."""
    numbers = any(type(v) in (int, float) for v in call.constants.values())
    caller = call.parent
    while caller is not None:
        if numbers and caller.asked in ("tolist", "item", "__int__", "__index__", "__float__"):
            return True
        caller = caller.parent
    return False
