"""The flow of a plan, found anew from a trace: for running all ranks in lockstep on the recorded graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from tpconvert.analyze.axes.dealing import Deal
from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term, blocks, leaves
from tpconvert.analyze.capture.run import Trace
from tpconvert.analyze.choice.choose import Candidate, Choice, inner_atom, shares
from tpconvert.analyze.emulate.run import Emulation, emulate
from tpconvert.analyze.flow.run import ConflictError, Flow, involved, trace_flow
from tpconvert.analyze.ops.rules import load_rules
from tpconvert.errors import VerifyError
from tpconvert.spec.layout import Layout
from tpconvert.spec.plan import Axis, Plan


@dataclass(frozen=True, slots=True, eq=False)
class Reproduced:
    """A plan's choice of axes on a trace."""

    choice: Choice
    names: Mapping[Term, str]
    """Atom -> the plan's name for its axis."""

    def emulate(self, flow: Flow | None = None, floor: float = 1e-6) -> Emulation:
        """Run every rank in lockstep and compare; ``flow`` is another form of its flow."""
        return emulate(flow or self.choice.flow, self.choice.deal, floor=floor)


class NotHeldError(VerifyError):
    """A trace asks for something else than the plan has."""

    def __init__(self, message: str, axes: Iterable[str]) -> None:
        super().__init__(message)
        self.axes = frozenset(axes)
        """The plan's names of the axes it is about."""


def reproduce(trace: Trace, plan: Plan, rules: Sequence[Path] = ()) -> Reproduced:
    """The flow of ``plan``'s axes on ``trace``.

    Raises VerifyError where the recorded graph asks for another layout, another summed gradient or another
    collective than the plan has.
    """
    ax = Axes(trace, load_rules(rules), joined_in(plan, trace))
    named = _candidates(ax, [a for a in plan.axes if any(n in trace.parameters for n in a.parameters)], plan)
    named |= _siblings(ax, plan, named)
    chosen = list(named)
    names = {a: name for c, name in named.items() for a in (c.atom, *c.inner)}
    for atom, name in names.items():
        if ax.blocked.get(atom):
            raise NotHeldError(f"{name} is cut, and must stay whole: {ax.blocked[atom][0].why}.", [name])
    deal = Deal(plan.tp, {a: s for c in chosen for a, s in shares(c, plan.tp).items()})
    inline = frozenset(n for n in ax.lookups if not n.meta.get("layer"))
    try:
        flow = _flow(ax, deal, inline, plan)
    except ConflictError as conflict:
        raise NotHeldError(
            f"The plan's axes cannot be cut together: {conflict.why} (at {conflict.node.meta['op']}).",
            {names[a] for a in conflict.atoms if a in names},
        ) from None
    for name in trace.parameters:
        _check(flow, plan, name, names)
    return Reproduced(Choice(chosen, flow, deal), names)


def joined_in(plan: Plan, trace: Trace) -> frozenset[str]:
    """The layers whose results are put together where they return them, and whose axes are theirs alone.

    A layer has its parameters itself, under one of their names, and what it returns may be returned as it is by the
    module around it, where it is put together then.  What a larger module computes from its layers' results comes from
    an axis that runs through it.
    """
    names: dict[str, set[str]] = defaultdict(set)
    for v in plan.verdicts:
        names[v.tied_to or v.name].add(v.name.rpartition(".")[0])
    given: dict[str, set[fx.Node]] = defaultdict(set)
    for call in trace.calls:
        given[call.module] |= set(call.outputs.values())

    def called(path: str) -> str:
        """The module itself or the nearest around it that is called, which reads its parameters."""
        while path and path not in given:
            path = path.rpartition(".")[0]
        return path

    owners = {
        a.name: {called(m) for m in set.intersection(*(names[n] for n in a.parameters))}
        for a in plan.axes
        if a.parameters
    }
    gathers = [b for b in plan.boundaries if b.kind == "gather" and b.side == "output" and b.blocks and b.module]
    return frozenset(
        layer
        for b in gathers
        for layer in owners.get(b.axis, ())
        if layer == b.module or (given[layer] and given[layer] == given[b.module])
    )


def _check(flow: Flow, plan: Plan, name: str, names: Mapping[Term, str]) -> None:
    """Whether the flow has a parameter as the plan has it."""
    ax, verdict, node = flow.ax, plan[name], flow.ax.trace.parameters[name]
    dims = [i for i, t in enumerate(ax.of(node)) if node in flow.cut and leaves(t) & flow.cut_atoms]
    have = (dims[0], blocks(ax.of(node)[dims[0]], set(names))) if dims else (None, ())
    if have != (verdict.layout.dim, verdict.layout.blocks):
        asked = Layout(*have).to_json()
        axes = {names[a] for a in flow.atoms(node)} | ({verdict.axis} - {""})
        raise NotHeldError(f"{name}: the plan cuts it as {verdict.layout.to_json()}, its use asks for {asked}.", axes)
    for held, said, what in (
        (node in flow.sum_grad, verdict.sum_grad, "have its gradient summed over ranks"),
        (node in flow.once, verdict.once, "count on one rank only"),
    ):
        if held != said:
            axes = {names[a] for a in involved(flow, node)}
            raise NotHeldError(f"{name}: it must {'' if held else 'not '}{what}; the plan says otherwise.", axes)


def _flow(ax: Axes, deal: Deal, inline: frozenset[fx.Node], plan: Plan) -> Flow:
    """The flow of these axes in which collectives stand inside none but rewritten forwards, where that can be.

    And at the inputs at which the plan has them: a forward that first hides padding in what it is given could as well
    have its gradients summed behind that.
    """
    rewritten = {r.module for r in plan.rewrites}
    early: frozenset[str] = frozenset()
    while True:
        flow = trace_flow(ax, deal.shares, inline, early)
        inside = {p.call.module for p in flow.copies if p.host is None and p.call is not None} - rewritten
        if not inside - early:
            break
        early |= inside
    missing = _entered(plan) - _copied(flow)
    lazy = frozenset(call for call in ax.trace.calls if call.module in missing)
    if not lazy:
        return flow
    other = trace_flow(ax, deal.shares, inline, early, lazy)
    return other if missing - _copied(other) < missing else flow


def _entered(plan: Plan) -> set[str]:
    """The modules at whose inputs the plan sums gradients."""
    return {b.module for b in plan.boundaries if b.kind == "copy" and b.side == "input"}


def _copied(flow: Flow) -> set[str]:
    """The modules at whose inputs a flow does."""
    return {p.host.call.module for p in flow.copies if p.host is not None and p.host.side == "input"}


def _candidates(ax: Axes, axes: Iterable[Axis], plan: Plan) -> dict[Candidate, str]:
    """The atoms of the plan's axes, each one of its own, and their names.

    All parameters of one axis may be cut along another as well, as where two halves of a layer go into the same next
    one and the second half is read besides: so those that only one atom can be are found first.
    """
    could = {axis: _atoms(ax, axis, plan) for axis in axes}
    found: dict[Candidate, str] = {}
    taken: set[Term] = set()
    for axis in sorted(could, key=lambda axis: len(could[axis])):
        free = [_with_inner(ax, atom) for atom in could[axis] - taken or could[axis]]
        best = max(free, key=lambda c: _matches(ax, c, axis, plan))
        found[best] = axis.name
        taken.add(best.atom)
    return found


def _atoms(ax: Axes, axis: Axis, plan: Plan) -> set[Term]:
    """The atoms that all parameters of an axis carry in their cut dim."""
    common: set[Term] | None = None
    for name in axis.parameters:
        node = ax.trace.parameters.get(name)
        dim = plan[name].layout.dim if name in plan else None
        if node is None or dim is None:
            continue
        here = {a for a in leaves(ax.of(node)[dim]) if a.n == axis.size}
        common = here if common is None else common & here
    if not common:
        raise NotHeldError(
            f"{axis.name}: no axis of {axis.size} runs through all its parameters in this model.", [axis.name]
        )
    return common


def _with_inner(ax: Axes, atom: Term) -> Candidate:
    inner = inner_atom(ax, atom)
    return Candidate(atom, (inner,) if inner is not None else ())


def _matches(ax: Axes, candidate: Candidate, axis: Axis, plan: Plan) -> int:
    """Of how many parameters the plan's layout is the one this axis would give: heads and head_dim may be one size."""
    atoms = {candidate.atom, *candidate.inner}
    found = 0
    for name in axis.parameters:
        node, layout = ax.trace.parameters.get(name), plan[name].layout
        if node is not None and layout.dim is not None:
            found += blocks(ax.of(node)[layout.dim], atoms) == layout.blocks
    return found


def _siblings(ax: Axes, plan: Plan, chosen: Iterable[Candidate]) -> dict[Candidate, str]:
    """The axes of modules that the plan treats as their siblings: other experts may get tokens here than did there."""
    known = {a for c in chosen for a in (c.atom, *c.inner)}
    out: dict[Candidate, str] = {}
    for name, node in ax.trace.parameters.items():
        layout = plan[name].layout
        if layout.dim is None or known & leaves(ax.of(node)[layout.dim]):
            continue
        for atom in leaves(ax.of(node)[layout.dim]):
            found = _with_inner(ax, atom)
            if blocks(ax.of(node)[layout.dim], {atom, *found.inner}) == layout.blocks:
                known |= {atom, *found.inner}
                out[found] = plan[name].axis
                break
    return out
