"""The collectives and edits of a plan against those that a recorded graph asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from tpconvert.analyze.capture import Inputs, Trace
from tpconvert.analyze.flow import Flow
from tpconvert.analyze.patterns import Classifier, load_patterns
from tpconvert.analyze.planner import Planner
from tpconvert.analyze.slicing import slice_flow
from tpconvert.errors import VerifyError
from tpconvert.planning.held import AsRecorded
from tpconvert.planning.reproduce import Reproduced
from tpconvert.planning.training import Training
from tpconvert.spec.plan import Boundary, Edit, Plan
from tpconvert.spec.sliced import sliced_form
from tpconvert.verify.result import Check
from tpconvert.verify.values import UNEQUAL


def sliced_flow(flow: Flow, plan: Plan) -> Flow:
    """The flow in the sliced form of a plan.  Raises VerifyError where the graph has none."""
    sliced, why = slice_flow(flow, frozenset(plan.slices.whole))
    if sliced is None:
        raise VerifyError(f"The plan has a form with slices, which cannot be: {why}.")
    return sliced


def compare_asked(
    module: nn.Module, inputs: Inputs, trace: Trace, found: Reproduced, plan: Plan, sliced: Flow | None = None
) -> list[Check]:
    """One check for each boundary and each edit that the plan has or the graph asks for; ``sliced`` is for that form.

    Modules that were not called, such as experts without a token, say nothing.
    """
    ax = found.choice.flow.ax
    planner = Planner(ax, Classifier(ax, load_patterns(())), found.choice, plan.tp)
    asked = planner.draft({r.module: r.reason for r in plan.rewrites}, Training(module, inputs, ax)).plan
    if sliced is not None:
        plan, (asked, _) = sliced_form(plan), planner.sliced(sliced, AsRecorded())
    called = {call.module for call in trace.calls}
    return [
        *_compared("boundary", plan.boundaries, asked.boundaries, called),
        *_compared("edit", plan.edits, asked.edits, called),
    ]


def _compared(kind: str, have: Iterable[Any], asked: Iterable[Any], called: set[str]) -> Iterator[Check]:
    mine, theirs = ({_key(item): item for item in items if item.module in called} for items in (have, asked))
    for key, item in (mine | theirs).items():
        error = 0.0 if key in mine and key in theirs else UNEQUAL
        yield Check(kind, _name(item), error, 0.0, "eval")


def _key(item: Boundary | Edit) -> tuple[Any, ...]:
    """What it does, without what is only told of it."""
    if isinstance(item, Edit):
        return item.module, item.attribute, item.value, item.blocks, item.per
    return item.kind, item.module, item.side, item.slots, item.dim, item.blocks, item.span, item.call


def _name(item: Boundary | Edit) -> str:
    where = item.module or "the model"
    return f"{item.attribute} of {where}" if isinstance(item, Edit) else f"{item.kind} at the {item.side} of {where}"
