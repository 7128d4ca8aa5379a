"""Whether a plan made from one trace holds on another: of the same model in training, or called in another way.

It may take another path there.  The plan's axes are found again on the other trace, and what they ask for there is
compared with what the plan has.  A module that only the other trace calls brings its own collectives; one that both
call must have the same.  What either edits is edited for both, which each is proved to run with, and a forward that is
written anew is written for each.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term
from tpconvert.analyze.capture.run import Trace
from tpconvert.analyze.choice.choose import Choice
from tpconvert.analyze.choice.patterns import Classifier, load_patterns
from tpconvert.analyze.choice.planner import Planner
from tpconvert.analyze.rewrite.alike import same_forward, stricter
from tpconvert.errors import VerifyError
from tpconvert.planning.reproduce import NotHeldError, reproduce
from tpconvert.spec.layout import local_size
from tpconvert.spec.plan import Boundary, Edit, Plan, Rewrite


@dataclass(frozen=True, slots=True)
class Held:
    """A plan that holds on both traces, and its choice on the other."""

    plan: Plan
    choice: Choice


class AsRecorded:
    """Stands for :class:`tpconvert.planning.proof.training.Training` where the trace itself is of training."""

    fixed: frozenset[Term] = frozenset()

    def refusal(self, path: str) -> str:
        """Why a forward cannot be written anew: what holds in training was asked where the plan was made."""
        return ""

    def constants(self, path: str) -> dict[Any, Any]:
        """What differs in training from the trace: nothing."""
        return {}

    def get(self, path: str) -> dict[Any, Any]:
        """What differs in training from the trace: nothing."""
        return {}


class NotWrittenError(VerifyError):
    """A trace asks for a forward to be written anew that the plan leaves as it is."""

    def __init__(self, rewrite: Rewrite) -> None:
        super().__init__(f"The forward of {rewrite.module or 'the model'} would have to be written anew.")
        self.module, self.why = rewrite.module, rewrite.reason


def hold(
    plan: Plan,
    trace: Trace,
    other: Trace,
    rules: Sequence[Path] = (),
    evaluation: Callable[[Axes], Any] | None = None,
    guarded: bool = False,
) -> Held:
    """``plan``, made from ``trace``, with what ``other`` needs as well.

    ``other`` is of training, or, where ``evaluation`` is given, of another call in evaluation; that tells of the axes
    there what training does otherwise.  With ``guarded``, it is no matter what forwards that are written anew would do
    on ``other``: they refuse such a call.  Raises VerifyError where ``other`` asks for another layout, another summed
    gradient, another collective or another edit.
    """
    reproduced = reproduce(other, plan, rules)
    choice, ax = reproduced.choice, reproduced.choice.flow.ax
    called, also = {c.module for c in trace.calls}, {c.module for c in other.calls}
    wanted = {r.module: r.reason for r in plan.rewrites if r.module in also}
    planner = Planner(ax, Classifier(ax, load_patterns(rules)), choice, plan.tp)
    draft = planner.draft(wanted, AsRecorded() if evaluation is None else evaluation(ax))
    if draft.forbidden:
        axes = {reproduced.names[a] for a in draft.forbidden}
        raise NotHeldError(next(iter(draft.forbidden.values())), axes)
    found = draft.plan
    forms = _forms(plan, found, called, evaluation is not None, guarded)
    its = {name: reproduced.names[c.atom] for c, name in planner.names.items()}
    told = heard_of(plan, other.parameters)
    have, want = ({_unnamed(b): b for b in bs if b.module in called & also} for bs in (told, found.boundaries))
    untold = {_unnamed(b) for b in plan.boundaries} - have.keys()  # others of an axis' siblings may be met here
    if (lacking := want.keys() - have.keys() - untold) or have.keys() - want.keys():
        item = min(lacking | (have.keys() - want.keys()), key=repr)
        axes = {have[b].axis for b in have.keys() - want.keys()}
        axes |= {its.get(want[b].axis, "") for b in lacking}
        raise NotHeldError(f"{item.module}: only one of them needs a {item.kind} at its {item.side}.", axes - {""})
    new = also - called

    def merged(had: Iterable[Any], asked: Iterable[Any]) -> tuple[Any, ...]:
        """What was only guessed from siblings of such a module gives way to what was found of it."""
        return tuple(x for x in had if x.module not in new) + tuple(x for x in asked if x.module in new)

    edits = _edits([e for e in plan.edits if e.module not in new], found.edits, plan.tp)
    drawn = found.switches if evaluation is not None else [replace(s, always=False) for s in found.switches]
    kept = [s for s in plan.switches if s.module not in new]
    known = {replace(s, always=False) for s in kept}
    held = replace(
        plan,
        boundaries=merged(plan.boundaries, [replace(b, axis=its.get(b.axis, b.axis)) for b in found.boundaries]),
        edits=edits,
        rewrites=forms,
        switches=tuple(dict.fromkeys((*kept, *(s for s in drawn if replace(s, always=False) not in known)))),
    )
    return Held(held, choice)


def heard_of(plan: Plan, used: Container[str]) -> list[Boundary]:
    """The boundaries that a trace says something of that used these parameters: their axis, or a module's, is met."""
    idle = [a for a in plan.axes if not any(name in used for name in a.parameters)]
    names = {a.name for a in idle}
    owners = tuple({f"{name.rpartition('.')[0]}." for a in idle for name in a.parameters})
    return [b for b in plan.boundaries if b.axis not in names and not f"{b.module}.".startswith(owners)]


def _forms(plan: Plan, found: Plan, called: set[str], both: bool, guarded: bool) -> tuple[Rewrite, ...]:
    """The forwards that are written anew, in the form of each trace where they differ and ``both`` were recorded."""
    out = list(plan.rewrites)
    for rewrite in found.rewrites:
        own = [r for r in plan.rewrites if r.module == rewrite.module]
        if not own and (rewrite.module in called or not both):
            raise NotWrittenError(rewrite)
        if not both or any(same_forward(r, rewrite) for r in own) or (guarded and own):
            continue
        for mine in own:
            if mine.signature == rewrite.signature:
                if (checked := stricter(mine, rewrite)) is None:
                    raise VerifyError(
                        f"The forward of {rewrite.module or 'the model'} is called alike and takes another path."
                    )
                out[out.index(mine)] = checked
                break
        else:
            out.append(rewrite)
    return tuple(out)


def _edits(had: Iterable[Edit], asked: Iterable[Edit], tp: int) -> tuple[Edit, ...]:
    """The edits of both, of which each attribute must have one."""
    out = {(e.module, e.attribute): e for e in had}
    for edit in asked:
        mine = out.setdefault((edit.module, edit.attribute), edit)
        if any(_on_rank(mine, r, tp) != _on_rank(edit, r, tp) for r in range(tp)):
            raise VerifyError(f"{edit.module}: each of them needs another {edit.attribute}.")
    return tuple(out.values())


def _on_rank(edit: Edit, rank: int, tp: int) -> int:
    return local_size(edit.blocks, rank, tp) // (local_size(edit.per, rank, tp) if edit.per else 1)


def _unnamed(boundary: Boundary) -> Boundary:
    """A boundary without what is for reports alone: another trace may see its axis in another pattern.

    Nor does it matter how often a module is called that does the same each time, as an expert is for as many tokens as
    come to it.
    """
    calls = 1 if boundary.call == -1 else boundary.calls
    return replace(boundary, axis="", shape=(), dtype="", calls=calls)
