"""Plans that another library can follow: what it cannot say is left whole, and the rest planned again."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from tpconvert.analyze.capture.run import Inputs
from tpconvert.analyze.trace.copies import light
from tpconvert.errors import PlanError, VerifyError
from tpconvert.formats.layerwise import Layers, Misfit, Style, cut_within, layers
from tpconvert.planning.layers import norms_apart
from tpconvert.planning.make import captured, make_plan
from tpconvert.planning.reproduce import reproduce
from tpconvert.spec.plan import Edit, Plan


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a library can say."""

    name: str
    styles: frozenset[Style]
    edits: bool = False
    """Whether integers of modules can be changed with it."""
    alike: bool = False
    """Whether it names layers by a wildcard only, so that all must be treated alike."""
    segments: Mapping[str, int] = field(default_factory=dict)
    """Module -> how many features at the end of its output it can sum the gradient of."""


@dataclass(frozen=True, slots=True)
class Expressed:
    """A plan that can be said in full by styles, and what was left whole for that."""

    plan: Plan
    styles: dict[str, Style]
    left: tuple[Misfit, ...]

    def notes(self) -> list[str]:
        """What was left whole and why, layers folded."""
        found: dict[str, set[str]] = {}
        for misfit in self.left:
            found.setdefault(folded(misfit.why), set()).add(folded(_common(misfit.parameters)))
        return [f"left whole: {', '.join(sorted(names))}: {why}." for why, names in found.items()]


def express(
    module: nn.Module,
    inputs: Inputs,
    *,
    tp: int,
    abilities: Abilities,
    overrides: Sequence[str] = (),
    rules: Sequence[Path | str] = (),
    source: Mapping[str, Any] | None = None,
) -> Expressed:
    """The plan for ``tp`` ranks, without what ``abilities`` cannot say; it is proved as any plan is.

    Raises PlanError where nothing is left.
    """
    left: list[Misfit] = []
    whole: dict[str, None] = {}
    module = light(module)
    trace = captured(module, inputs)
    while True:
        pinned = [f"{_escaped(name)}=whole" for name in whole]
        plan = make_plan(module, inputs, tp=tp, overrides=[*overrides, *pinned], rules=rules, source=source)
        if (apart := norms_apart(plan)) != trace.apart:
            trace = captured(module, inputs, None, apart)
        try:
            flow = reproduce(trace, plan, [Path(r) for r in rules]).choice.flow
        except VerifyError as error:
            raise PlanError(f"The plan cannot be told as {abilities.name}: {error.message}") from None
        told = layers(module, plan, flow)
        misfits = [m for m in (*told.misfits, *_unable(module, plan, told, abilities)) if m.parameters]
        new = dict.fromkeys(name for m in misfits for name in sorted(m.parameters) if name not in whole)
        for misfit in misfits:
            if not any(misfit.parameters <= other.parameters for other in left):
                left.append(misfit)
        if not new:
            break
        whole |= new
    if misfits or not told.styles:
        why = f" {Expressed(plan, {}, tuple(left)).notes()[0]}" if left else ""
        raise PlanError(f"Nothing of this plan can be told as {abilities.name}.{why}")
    return Expressed(plan, told.styles, tuple(left))


def _unable(module: nn.Module, plan: Plan, told: Layers, abilities: Abilities) -> list[Misfit]:
    """What has a style, but not one of this library's."""
    out = []
    for name, style in told.styles.items():
        if style not in abilities.styles:
            out.append(_of(plan, name, f"{abilities.name} has no style for {name} ({style})"))
        elif style == "segment" and abilities.segments.get(name) != told.segments[name]:
            out.append(
                _of(plan, name, f"{abilities.name} sums no gradient of {told.segments[name]} features of {name}")
            )
    for edit in plan.edits:
        if not abilities.edits or not simple(edit):
            where = f"{edit.module}.{edit.attribute}".lstrip(".")
            out.append(_of(plan, edit.module, f"{where} would have to change, which {abilities.name} does not do"))
    if abilities.alike:
        out += _unlike(module, plan, told, abilities)
    return out


def simple(edit: Edit) -> bool:
    """Whether an edit sets an attribute of a module itself."""
    return "." not in edit.attribute


def _unlike(module: nn.Module, plan: Plan, told: Layers, abilities: Abilities) -> list[Misfit]:
    """Layers that a wildcard cannot tell from others that are treated in another way."""
    found: dict[str, set[str]] = {}
    for name in [n for n, _ in module.named_modules()] + [n for n, _ in module.named_parameters()]:
        found.setdefault(folded(name), set()).add(told.styles.get(name, ""))
    unlike = {name for name, styles in found.items() if len(styles) > 1}
    return [
        _of(plan, name, f"{abilities.name} names {folded(name)} by *, and not all of them are cut alike")
        for name in told.styles
        if folded(name) in unlike
    ]


def _of(plan: Plan, name: str, why: str) -> Misfit:
    return Misfit(frozenset(cut_within(plan, name) if name not in plan else _axis_of(plan, name)), why)


def _axis_of(plan: Plan, name: str) -> Sequence[str]:
    return next((a.parameters for a in plan.axes if a.name == plan[name].axis), (name,))


def _common(names: Iterable[str]) -> str:
    """The module that holds all of these, or their names."""
    parts = [name.split(".") for name in sorted(names)]
    shared = [column[0] for column in zip(*parts, strict=False) if len(set(column)) == 1]
    prefix = parts[0][: next((i for i, token in enumerate(shared) if token != parts[0][i]), len(shared))]
    return ".".join(prefix) or ", ".join(map(".".join, parts))


def folded(name: str) -> str:
    """A name as transformers writes it in a plan: ``model.layers.*.mlp``; of two numbers in a row only the first."""
    return re.sub(r"\.\d+(?P<end>\.|$|[^\w.])", r".*\g<end>", name)


def members(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a pattern matches, token by token."""
    tokens = pattern.split(".")
    parts = [(name, name.split(".")) for name in names]
    return [n for n, p in parts if len(p) == len(tokens) and all(map(fnmatch.fnmatchcase, p, tokens))]


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
