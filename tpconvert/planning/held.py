"""Whether a plan made from one trace holds on another: of the same model in training, where it may take another path.

The plan's axes are found again on the other trace, and what they ask for there is compared with what the plan has.
A module that only the other trace calls brings its own collectives; one that both call must have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpconvert.analyze.capture import Trace
from tpconvert.analyze.choose import Choice
from tpconvert.analyze.patterns import Classifier, load_patterns
from tpconvert.analyze.planner import Planner
from tpconvert.analyze.terms import Term
from tpconvert.errors import VerifyError
from tpconvert.planning.reproduce import NotHeldError, reproduce
from tpconvert.spec.plan import Boundary, Plan


@dataclass(frozen=True, slots=True)
class Held:
    """A plan that holds on both traces, and its choice on the other."""

    plan: Plan
    choice: Choice


class AsRecorded:
    """Stands for :class:`tpconvert.planning.training.Training` where the trace itself is of training."""

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


def hold(plan: Plan, trace: Trace, other: Trace, rules: Sequence[Path] = ()) -> Held:
    """``plan``, made from ``trace``, with what modules that only ``other`` calls need as well.

    Raises VerifyError where ``other`` asks for another layout, another summed gradient or another collective.
    """
    reproduced = reproduce(other, plan, rules)
    choice, ax = reproduced.choice, reproduced.choice.flow.ax
    called, also = {c.module for c in trace.calls}, {c.module for c in other.calls}
    wanted = {r.module: r.reason for r in plan.rewrites if r.module in also}
    planner = Planner(ax, Classifier(ax, load_patterns(rules)), choice, plan.tp)
    draft = planner.draft(wanted, AsRecorded())
    if draft.forbidden:
        axes = {reproduced.names[a] for a in draft.forbidden}
        raise NotHeldError(next(iter(draft.forbidden.values())), axes)
    found = draft.plan
    if extra := {r.module for r in found.rewrites} - {r.module for r in plan.rewrites}:
        raise VerifyError(f"The forward of {min(extra)} would have to be written anew.")
    both = called & also
    its = {name: reproduced.names[c.atom] for c, name in planner.names.items()}
    for had, asked in ((plan.boundaries, found.boundaries), (plan.edits, found.edits)):
        have, want = ({_unnamed(x): x for x in items if x.module in both} for items in (had, asked))
        if have.keys() != want.keys():
            item = min(have.keys() ^ want.keys(), key=repr)
            axes = {getattr(have[x], "axis", "") for x in have.keys() - want.keys()}
            axes |= {its.get(getattr(want[x], "axis", ""), "") for x in want.keys() - have.keys()}
            raise NotHeldError(f"{item.module}: only one of them needs {_what(item)}.", axes - {""})
    new = also - called

    def merged(had: Sequence[Any], asked: Sequence[Any]) -> tuple[Any, ...]:
        """What was only guessed from siblings of such a module gives way to what was found of it."""
        return tuple(x for x in had if x.module not in new) + tuple(x for x in asked if x.module in new)

    drawn = [replace(s, always=False) for s in found.switches]  # as recorded: in training
    kept = [s for s in plan.switches if s.module not in new]
    known = {replace(s, always=False) for s in kept}
    held = replace(
        plan,
        boundaries=merged(plan.boundaries, found.boundaries),
        edits=merged(plan.edits, found.edits),
        switches=tuple(dict.fromkeys((*kept, *(s for s in drawn if s not in known)))),
    )
    return Held(held, choice)


def _unnamed(item: Any) -> Any:
    """A boundary without what is for reports alone: another trace may see its axis in another pattern."""
    return replace(item, axis="", shape=(), dtype="") if isinstance(item, Boundary) else item


def _what(item: Any) -> str:
    return f"a {item.kind} at its {item.side}" if isinstance(item, Boundary) else f"another {item.attribute}"
