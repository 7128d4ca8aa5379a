"""The collectives and edits of a plan against those that a recorded graph asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tpconvert.analyze.capture.run import Inputs, Trace
from tpconvert.analyze.choice.patterns import Classifier, load_patterns
from tpconvert.analyze.choice.planner import Planner
from tpconvert.analyze.flow.run import Flow
from tpconvert.analyze.slices.rows import unlike_rows
from tpconvert.analyze.slices.slicing import slice_flow
from tpconvert.errors import VerifyError
from tpconvert.planning.proof.held import AsRecorded, heard_of
from tpconvert.planning.proof.training import Training
from tpconvert.planning.reproduce import Reproduced
from tpconvert.spec.plan import Boundary, Edit, Plan
from tpconvert.verify.measure.values import UNEQUAL
from tpconvert.verify.result import Check


def sliced_flow(flow: Flow, plan: Plan) -> Flow:
    """The flow in the sliced form of a plan.  Raises VerifyError where the graph has none."""
    sliced, why = slice_flow(flow, frozenset(plan.slices.whole), plan.slices.sequences)
    if sliced is None:
        raise VerifyError(f"The plan has a form with slices, which cannot be: {why}.")
    if plan.slices.rows and (apart := unlike_rows(sliced)):
        path, why = next(iter(apart.items()))
        raise VerifyError(f"The plan has slices of rows, which cannot be: {path or 'the model'}: {why}.")
    return replace(sliced, rows=plan.slices.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What one recorded graph asks for."""

    mode: str
    called: set[str]
    used: frozenset[str]
    """The parameters that it used."""
    boundaries: tuple[Boundary, ...]
    edits: tuple[Edit, ...]


def asked(
    module: nn.Module,
    inputs: Inputs,
    trace: Trace,
    found: Reproduced,
    plan: Plan,
    sliced: Flow | None = None,
    mode: str = "eval",
) -> Asked:
    """What the graph asks for of the plan; ``sliced`` is for that form."""
    ax = found.choice.flow.ax
    planner = Planner(ax, Classifier(ax, load_patterns(())), found.choice, plan.tp)
    draft = planner.draft({r.module: r.reason for r in plan.rewrites}, Training(module, inputs, ax)).plan
    if sliced is not None:
        draft, _ = planner.sliced(sliced, AsRecorded())
    called = {call.module for call in trace.calls}
    return Asked(mode, called, frozenset(trace.parameters), draft.boundaries, draft.edits)


def compare_asked(plan: Plan, graphs: Sequence[Asked]) -> Iterator[Check]:
    """One check for each boundary and each edit that the plan has or a graph asks for.

    An edit is for all calls, though not all may ask for it.  Modules that were not called, such as experts without a
    token, say nothing; nor do those whose axis was not used.
    """
    for graph in graphs:
        have = heard_of(plan, graph.used)
        untold = {_key(b) for b in plan.boundaries} - {_key(b) for b in have}  # an axis' siblings may ask for them
        asked = [b for b in graph.boundaries if _key(b) not in untold]
        yield from _compared("boundary", have, asked, graph.called, graph.mode)
    edits = [edit for graph in graphs for edit in graph.edits]
    called = {module for graph in graphs for module in graph.called}
    yield from _compared("edit", plan.edits, edits, called, graphs[0].mode)


def _compared(kind: str, have: Iterable[Any], asked: Iterable[Any], called: set[str], mode: str) -> Iterator[Check]:
    mine, theirs = ({_key(item): item for item in items if item.module in called} for items in (have, asked))
    for key, item in (mine | theirs).items():
        error = 0.0 if key in mine and key in theirs else UNEQUAL
        yield Check(kind, _name(item), error, 0.0, mode)


def _key(item: Boundary | Edit) -> tuple[Any, ...]:
    """What it does, without what is only told of it."""
    if isinstance(item, Edit):
        return item.module, item.attribute, item.value, item.blocks, item.per
    return item.kind, item.module, item.side, item.slots, item.dim, item.blocks, item.span, item.call


def _name(item: Boundary | Edit) -> str:
    where = item.module or "the model"
    return f"{item.attribute} of {where}" if isinstance(item, Edit) else f"{item.kind} at the {item.side} of {where}"
