"""The sliced form of a plan: found, proved by shapes as the plan itself is, and kept in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.analyze.capture.run import Inputs, Trace
from tpconvert.analyze.choice.choose import Choice
from tpconvert.analyze.choice.planner import Planner
from tpconvert.analyze.flow.run import Flow
from tpconvert.analyze.slices.rows import with_rows
from tpconvert.analyze.slices.slicing import is_odd, slice_flow
from tpconvert.analyze.trace.trees import map_tensors, tensor_slots
from tpconvert.planning.proof.shapes import prove_shapes
from tpconvert.spec.plan import Plan, Slices
from tpconvert.spec.sliced import with_sliced_form


@dataclass(frozen=True, slots=True, eq=False)
class SlicedForm:
    """What the sliced form of a plan is found and proved by."""

    module: nn.Module
    inputs: Inputs
    trace: Trace
    choice: Choice
    planner: Planner
    plan: Plan
    training: Any
    others: Sequence[Flow] = ()
    """The flows of other calls."""

    def found(self) -> Plan:
        """The plan with its sliced form, or with why it has none."""
        if self.shares_sequences() and not (plan := self.with_slices(True)).slices.reason:
            return plan
        return self.with_slices(False)

    def shares_sequences(self) -> bool:
        """Whether ranks cannot have equally many tokens, whatever the model is called with."""
        flow, _ = slice_flow(self.choice.flow)
        return flow is not None and is_odd(flow, self.plan.tp)

    def with_slices(self, sequences: bool) -> Plan:
        """The plan with slices of tokens, or whole sequences, or with why it has none.

        A module whose forward does not run on slices, or not in the shapes expected, is made to see whole values.
        """
        whole: frozenset[str] = frozenset()
        while True:
            found, faults = self.once(sequences, whole)
            if found is not None:
                return found
            blamed = {_outer(path, whole) for path in faults if path is not None} - {None}
            if not blamed:
                path, why = next(iter(faults.items()))
                return replace(self.plan, slices=Slices(why if path is None else f"{path or 'the model'}: {why}"))
            whole |= {path for path in blamed if path is not None}

    def once(self, sequences: bool, whole: frozenset[str] = frozenset()) -> tuple[Plan | None, dict[str | None, str]]:
        """The plan with such slices, of which the modules in ``whole`` see none; or what is wrong, by module.

        What is wrong with the model altogether stands under None.
        """
        choice, plan = self.choice, self.plan
        flow, why = slice_flow(choice.flow, whole, sequences)
        if flow is None:
            return None, {None: why}
        if sequences and is_odd(flow, plan.tp):
            return None, {None: "ranks can have equally many neither of its tokens nor of its sequences"}
        if not sequences:
            flow, whole = with_rows(choice.flow, flow, whole, self.others)
        sliced, refused = self.planner.sliced(flow, self.training)
        made = Slices("", flow.sliced_inputs, whole=tuple(sorted(whole)), rows=flow.rows, sequences=sequences)
        made = replace(made, common=tuple(one_for_all(self.trace))) if sequences else made
        candidate = with_sliced_form(plan, sliced, made)
        faults: dict[str | None, str] = dict(refused.items())
        if not faults:
            found = prove_shapes(self.module, self.inputs, self.trace, replace(choice, flow=flow), candidate)
            faults |= {f.module: f.why for f in found}
        return (None, faults) if faults else (candidate, {})


def one_for_all(trace: Trace) -> Iterator[str]:
    """The inputs whose first dim has a single entry, which broadcasts over all sequences, and over a slice of them."""
    for node in trace.nodes:
        if node.meta["op"] == "input" and tuple(node.meta["shape"][:1]) == (1,):
            yield str(node.meta["slot"])


def _outer(path: str, whole: frozenset[str]) -> str | None:
    """The module at fault, or the one around it that gave it what it cannot take; None where all are known."""
    while path in whole:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def divided(inputs: Any, plan: Plan) -> Any:
    """``inputs`` with sequences cut off where ranks would not get equally many tokens; None where some get none.

    Where ranks share out whole sequences, some are left out, or come again where there are fewer than ranks.
    """
    slots = dict(tensor_slots(inputs))
    known = [(slots.get(slot.partition(".")[2]), dim) for slot, dim in plan.slices.inputs]
    dims = {(id(t), dim) for t, dim in known if t is not None}
    lengths = {t.shape[dim] for t, dim in known if t is not None}
    least = 1 if plan.slices.sequences else plan.tp
    if min(lengths, default=plan.tp) < least:
        return None

    def repeated(t: Tensor) -> Tensor:
        for dim in [d for d in range(t.dim()) if (id(t), d) in dims]:
            n = t.shape[dim]
            t = t.index_select(dim, torch.arange(max(n // plan.tp, 1) * plan.tp, device=t.device) % n)
        return t.clone()

    def cropped(t: Tensor) -> Tensor:
        kept = t
        for dim, n in enumerate(t.shape):
            alike = n in lengths and dim > 0 and not t.is_floating_point()  # a mask that the plan does not know of
            if (id(t), dim) in dims or alike:
                kept = kept.narrow(dim, 0, n // plan.tp * plan.tp)
        return kept.clone()

    return map_tensors(repeated if plan.slices.sequences else cropped, inputs)
