"""The sliced form of a plan, written out from what a plan keeps of it, and the other way round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from tpconvert.errors import PlanError
from tpconvert.spec.plan import UNKNOWN, Boundary, Kind, Plan, Slices

SLICED = {"copy": "all_gather", "reduce": "reduce_scatter"}
"""What stands in the place of each where values between regions are slices."""


def sliced_form(plan: Plan) -> Plan:
    """A plan in its sliced form, which is a plan like any other.  Raises PlanError where it has none."""
    if plan.slices.reason:
        hint = "Plan it again." if plan.slices.reason == UNKNOWN else "Convert it without."
        raise PlanError(f"This model cannot be sequence parallel: {plan.slices.reason}.", hint=hint)
    boundaries = [_sliced(b) for b in plan.boundaries if not b.moved]
    boundaries += plan.slices.boundaries
    order = get_args(Kind)
    made = Slices("it is already", rows=plan.slices.rows, sequences=plan.slices.sequences, common=plan.slices.common)
    verdicts = (replace(v, sum_grad=True, on_slices=False) if v.on_slices else v for v in plan.verdicts)
    return replace(
        plan,
        verdicts=tuple(verdicts),
        boundaries=tuple(sorted(boundaries, key=lambda b: order.index(b.kind))),
        switches=plan.switches if plan.slices.switches is None else plan.slices.switches,
        unreached=plan.unreached if plan.slices.unreached is None else plan.slices.unreached,
        slices=made,
    )


def with_sliced_form(plan: Plan, form: Plan, told: Slices) -> Plan:
    """A plan with ``form`` as its sliced form, of which :func:`sliced_form` is the inverse, and ``told`` of it."""
    summed = {v.name for v in form.verdicts if v.sum_grad}
    left = {_whole(b): b for b in form.boundaries}
    boundaries = []
    for b in plan.boundaries:
        same = left.pop(b, None)
        sliced = None if same is None or same == b else same.dim
        boundaries.append(replace(b, sliced=sliced, moved=same is None))
    verdicts = (replace(v, on_slices=v.name in summed and not v.sum_grad) for v in plan.verdicts)
    switches = None if form.switches == plan.switches else form.switches
    unreached = None if form.unreached == plan.unreached else form.unreached
    return replace(
        plan,
        verdicts=tuple(verdicts),
        boundaries=tuple(boundaries),
        slices=replace(told, boundaries=tuple(left.values()), switches=switches, unreached=unreached),
    )


def _sliced(boundary: Boundary) -> Boundary:
    """What a boundary of the plain form is in the sliced one."""
    if boundary.sliced is None:
        return boundary
    kind: Any = SLICED[boundary.kind]
    return replace(boundary, kind=kind, dim=boundary.sliced, sliced=None)


def _whole(boundary: Boundary) -> Boundary:
    """What a boundary of the sliced form is in the plain one, if it is there too."""
    kinds: dict[str, Any] = {there: here for here, there in SLICED.items()}
    return replace(boundary, kind=kinds[boundary.kind], dim=None) if boundary.kind in kinds else boundary
