"""The sliced form of a plan: found, proved by shapes as the plan itself is, and kept in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tpconvert.analyze.capture.run import Inputs, Trace
from tpconvert.analyze.choice.choose import Choice
from tpconvert.analyze.choice.planner import Planner
from tpconvert.analyze.flow.run import Flow
from tpconvert.analyze.slices.rows import with_rows
from tpconvert.analyze.slices.slicing import slice_flow
from tpconvert.analyze.trace.trees import map_tensors, tensor_slots
from tpconvert.planning.proof.shapes import prove_shapes
from tpconvert.spec.plan import Plan, Slices
from tpconvert.spec.sliced import with_sliced_form


def with_slices(
    module: nn.Module,
    inputs: Inputs,
    trace: Trace,
    choice: Choice,
    planner: Planner,
    plan: Plan,
    training: Any,
    others: Sequence[Flow] = (),
) -> Plan:
    """``plan`` with its sliced form, or with why it has none.

    A module whose forward does not run on slices, or not in the shapes expected, is made to see whole values.
    """
    whole: frozenset[str] = frozenset()
    while True:
        found, faults = sliced_once(module, inputs, trace, choice, planner, plan, training, others, whole)
        if found is not None:
            return found
        blamed = {_outer(path, whole) for path in faults if path is not None} - {None}
        if not blamed:
            path, why = next(iter(faults.items()))
            return replace(plan, slices=Slices(why if path is None else f"{path or 'the model'}: {why}"))
        whole |= {path for path in blamed if path is not None}


def sliced_once(
    module: nn.Module,
    inputs: Inputs,
    trace: Trace,
    choice: Choice,
    planner: Planner,
    plan: Plan,
    training: Any,
    others: Sequence[Flow] = (),
    whole: frozenset[str] = frozenset(),
) -> tuple[Plan | None, dict[str | None, str]]:
    """``plan`` with its sliced form, in which the modules in ``whole`` see whole values; or what is wrong, by module.

    ``others`` are the flows of other calls.  What is wrong with the model altogether stands under None.
    """
    flow, why = slice_flow(choice.flow, whole)
    if flow is None:
        return None, {None: why}
    flow, whole = with_rows(choice.flow, flow, whole, others)
    sliced, refused = planner.sliced(flow, training)
    candidate = with_sliced_form(plan, sliced, flow.sliced_inputs, tuple(sorted(whole)), flow.rows)
    faults: dict[str | None, str] = dict(refused.items())
    if not faults:
        found = prove_shapes(module, inputs, trace, replace(choice, flow=flow), candidate)
        faults |= {f.module: f.why for f in found}
    return (None, faults) if faults else (candidate, {})


def _outer(path: str, whole: frozenset[str]) -> str | None:
    """The module at fault, or the one around it that gave it what it cannot take; None where all are known."""
    while path in whole:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def divided(inputs: Any, plan: Plan) -> Any:
    """``inputs`` with sequences cut off where ranks would not get equally many tokens; None where some get none."""
    slots = dict(tensor_slots(inputs))
    known = [(slots.get(slot.partition(".")[2]), dim) for slot, dim in plan.slices.inputs]
    dims = {(id(t), dim) for t, dim in known if t is not None}
    lengths = {t.shape[dim] for t, dim in known if t is not None}
    if min(lengths, default=plan.tp) < plan.tp:
        return None

    def cropped(t: Tensor) -> Tensor:
        kept = t
        for dim, n in enumerate(t.shape):
            alike = n in lengths and dim > 0 and not t.is_floating_point()  # a mask that the plan does not know of
            if (id(t), dim) in dims or alike:
                kept = kept.narrow(dim, 0, n // plan.tp * plan.tp)
        return kept.clone()

    return map_tensors(cropped, inputs)
