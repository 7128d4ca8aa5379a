"""Whether a plan is for a module: what both must have alike, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tpconvert.errors import PlanError
from tpconvert.spec.plan import MEND, Plan
from tpconvert.spec.reading.consistent import at, near
from tpconvert.spec.reading.typed import WrongError


def check_plan(module: nn.Module, plan: Plan, where: str = "The plan") -> None:
    """Raise PlanError where the plan is not for this module; ``where`` is the file it is from."""
    try:
        _tensors(module, plan)
        _modules(module, plan)
    except WrongError as error:
        raise PlanError(f"{where}: {error.sentence}", hint=MEND) from None


def _tensors(module: nn.Module, plan: Plan) -> None:
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    missing = [name for name in tensors if name not in plan]
    for i, verdict in enumerate(plan.verdicts):
        with at("verdicts", i, verdict):
            if verdict.name not in tensors:
                raise WrongError(f"the module has no such parameter or buffer{near(verdict.name, missing)}")
            shape = tuple(tensors[verdict.name].shape)
            if shape != verdict.shape:
                raise WrongError(f"it is for shape {list(verdict.shape)}, the module has {list(shape)}")
    if missing:
        raise WrongError(f"there is no verdict for {missing[0]}")
    for i, axis in enumerate(plan.axes):
        with at("axes", i, axis):
            if unknown := [name for name in axis.parameters if name not in plan]:
                raise WrongError(f"there is no verdict for {unknown[0]}{near(unknown[0], tensors)}")


def _modules(module: nn.Module, plan: Plan) -> None:
    paths = {path for path, _ in module.named_modules(remove_duplicate=False)}
    lists: dict[str, Sequence[Any]] = {
        "boundaries": plan.boundaries,
        "edits": plan.edits,
        "rewrites": plan.rewrites,
        "switches": plan.switches,
        "unreached": plan.unreached,
        "ranks": plan.ranks,
        "seeds": plan.seeds,
        "slices.boundaries": plan.slices.boundaries,
        "slices.switches": plan.slices.switches or (),
        "slices.whole": plan.slices.whole,
        "slices.unreached": plan.slices.unreached or (),
    }
    for name, items in lists.items():
        for i, item in enumerate(items):
            with at(name, i, item):
                path = item if isinstance(item, str) else item.module
                if path not in paths:
                    raise WrongError(f"the module has no part {path}{near(path, paths)}")
