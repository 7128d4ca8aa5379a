"""Whether a ``tp_plan`` written by others cuts a model as a plan of ours does, parameter by parameter."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tpconvert.errors import PlanError
from tpconvert.formats.dealt import Dealt
from tpconvert.formats.express import folded
from tpconvert.formats.transformers import SUMMING, cut_by, own_tp_plan, style_of
from tpconvert.spec.plan import Plan, Verdict

OWN = "own"
"""What stands for the plan that a model brings along."""

WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Row:
    """Parameters that differ in nothing but their layer, as the two plans treat them."""

    name: str
    count: int
    parameters: int
    """Entries, all layers together."""
    theirs: str
    ours: str
    agree: bool
    why: str = ""
    """Where they do not agree: our reason."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two plans compared."""

    rows: tuple[Row, ...]
    unused: tuple[str, ...] = ()
    """Patterns of theirs that name nothing in the model."""

    @property
    def agree(self) -> bool:
        """Whether all parameters are treated alike."""
        return all(row.agree for row in self.rows)

    @property
    def share(self) -> float:
        """The parameters on which both agree, of those that either cuts; 1 where neither cuts any."""
        cut = [r for r in self.rows if r.theirs != WHOLE or r.ours != WHOLE]
        return sum(r.parameters for r in cut if r.agree) / max(sum(r.parameters for r in cut), 1) if cut else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"agree": self.agree, "share": self.share} | asdict(self)


def agreement(module: nn.Module, plan: Plan, tp_plan: Mapping[str, str] | None = None) -> Agreement:
    """``tp_plan`` (by default the model's own) beside ``plan``, one row for what differs in its layer only.

    Both are compared by what they make of each parameter: the rows every rank holds, and whether the gradient of a
    whole one is summed.  Raises PlanError for a style that is not known here, or a model without a plan of its own.
    """
    theirs = own_tp_plan(module) if tp_plan is None else dict(tp_plan)
    if tp_plan is None and not theirs:
        raise PlanError(f"{type(module).__name__} brings no tp_plan along.")
    groups: dict[Any, list[Verdict]] = {}
    for verdict in plan.verdicts:
        if verdict.kind == "parameter" and not verdict.tied_to:
            found = _compared(verdict, theirs, plan)
            groups.setdefault((folded(verdict.name), *found), []).append(verdict)
    rows = tuple(
        Row(name, len(alike), sum(math.prod(v.shape) for v in alike), *found)
        for (name, *found), alike in groups.items()
    )
    known = {folded(n) for n, _ in (*module.named_modules(), *module.named_parameters(remove_duplicate=False))}
    return Agreement(rows, tuple(pattern for pattern in theirs if pattern not in known))


def read_tp_plan(path: Path) -> dict[str, str]:
    """A ``tp_plan`` from a JSON file: patterns -> styles."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise PlanError(
            f"--check-against: there is no file {path}.", hint=f"Or say {OWN} for the model's own."
        ) from None
    except ValueError:
        raise PlanError(
            f"{path}: the tp_plan is not JSON.", hint='It is an object like {"model.layers.*.mlp.up_proj": "colwise"}.'
        ) from None
    if not isinstance(data, dict) or not all(isinstance(v, str) for v in data.values()):
        raise PlanError(f"{path}: a tp_plan is one object of patterns and styles, both strings.")
    return data


def agreement_text(found: Agreement, name: str) -> str:
    """What ``tpconvert plan --check-against`` prints."""
    head = "the two plans agree" if found.agree else f"they agree on {100 * found.share:.1f} % of what either cuts"
    lines = [f"{name}: {head}", ""]
    cells = [("", "", "theirs", "ours")]
    cells += [("=" if r.agree else "!", f"{r.name} x{r.count}", r.theirs, r.ours) for r in found.rows]
    widths = [max(len(c[i]) for c in cells) for i in range(4)]
    reasons = ["", *(f"    {r.why}" if r.why else "" for r in found.rows)]
    for row, why in zip(cells, reasons, strict=True):
        lines.append("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
        lines += [why] if why else []
    lines += [f"  theirs names {pattern}, which is nothing in the model" for pattern in found.unused]
    return "\n".join(lines)


def _compared(verdict: Verdict, theirs: Mapping[str, str], plan: Plan) -> tuple[str, str, bool, str]:
    """``(theirs, ours, whether they agree, our reason)`` of one parameter."""
    style = style_of(verdict.name, theirs)
    if verdict.tied_to == "" and not style:
        style = next((s for v in plan.verdicts if v.tied_to == verdict.name and (s := style_of(v.name, theirs))), "")
    cut = cut_by(style, verdict.name, verdict.shape)
    same = _pieces(cut, verdict, plan.tp) == _own_pieces(verdict, plan.tp)
    summed = style == SUMMING
    ours = _told(verdict)
    said = _dealt(cut) + (", gradient summed" if summed else "")
    if not same:
        return said, ours, False, folded(verdict.reason)
    if cut is None and summed != verdict.sum_grad:
        return (
            said,
            ours,
            False,
            "each rank computes a term of its gradient" if verdict.sum_grad else "its gradient is whole",
        )
    return said, ours, True, ""


def _pieces(cut: Dealt | None, verdict: Verdict, tp: int) -> Any:
    if cut is None:
        return None
    return cut.dim, [cut.pieces(verdict.shape[cut.dim], rank, tp) for rank in range(tp)]


def _own_pieces(verdict: Verdict, tp: int) -> Any:
    layout = verdict.layout
    return (layout.dim, [layout.pieces(rank, tp) for rank in range(tp)]) if layout.cut else None


def _dealt(cut: Dealt | None) -> str:
    return WHOLE if cut is None else f"dim {cut.dim}{', both halves' if cut.packed else ''}"


def _told(verdict: Verdict) -> str:
    layout = verdict.layout
    if not layout.cut:
        return WHOLE + (", gradient summed" if verdict.sum_grad else "")
    segments = len(layout.blocks)
    return f"dim {layout.dim}" + (
        f", {segments} segments" if segments > 2 else ", both halves" if segments == 2 else ""
    )
