"""A converted module must stay as it was converted: what is put in later would meet values that are a rank's part.

An adapter around a row-parallel layer, say, is given cut inputs, and nothing sums its outputs.  So the parts that a
plan speaks of are looked for, each time the module that holds them is called.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.errors import PlanError
from tpconvert.parallel.calls.signature import leaves
from tpconvert.parallel.calls.slots import kind_of
from tpconvert.parallel.comm.collectives import every, transformed
from tpconvert.parallel.comm.mesh import Mesh
from tpconvert.spec.plan import Plan

CHANGE_FIRST = "Change the model first, then plan and convert it."

LOOKED_AT, NEAR = 64, 4
"""Entries of a tensor that are compared over ranks, and by how many last bits of the largest they may part."""

REFUSED = {
    "save_pretrained": "tpconvert.save writes it as a sharded folder, tpconvert.merge makes one checkpoint of that.",
    "push_to_hub": "Push what tpconvert.merge makes of a sharded folder.",
    "resize_token_embeddings": CHANGE_FIRST,
}
"""Methods that read or write a model as if it were whole -> what to do instead."""


@dataclass(frozen=True)
class Part:
    """A module that the plan speaks of, and where it was."""

    path: str
    holder: nn.Module
    name: str
    module: nn.Module
    parameters: frozenset[str]
    """Those of its own that are not whole."""

    def there(self) -> bool:
        """Whether it is as it was; asked before each call, so at little cost."""
        module = self.module
        held = module._parameters.keys()
        return self.holder._modules.get(self.name) is module and held >= self.parameters

    def check(self) -> None:
        """Raise PlanError where another stands in its place; one that only wraps it, as compiling does, may."""
        now = self.holder._modules.get(self.name)
        if now is not self.module and not _wraps(now, self.module):
            what = "is gone" if now is None else f"is now a {type(now).__name__}"
            raise PlanError(f"{self.path}: it was replaced after the conversion and {what}.", hint=CHANGE_FIRST)
        for name in sorted(self.parameters):
            if name not in self.module._parameters:
                raise PlanError(f"{self.path}.{name}: it was replaced after the conversion.", hint=CHANGE_FIRST)


@dataclass(frozen=True)
class Kept:
    """Hook of a module: the parts it holds are those that were converted."""

    parts: tuple[Part, ...]

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look at each."""
        if not torch.compiler.is_compiling():
            for part in self.parts:
                if not part.there():
                    part.check()


@dataclass(frozen=True)
class Refused:
    """Stands in for a method that takes a rank's part for the whole model."""

    module: nn.Module
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise PlanError, but where the caller gives the whole tensors."""
        if kwargs.get("state_dict") is not None:
            return getattr(type(self.module), self.name)(self.module, *args, **kwargs)
        raise PlanError(f"{self.name} would take this rank's part for the whole model.", hint=REFUSED[self.name])


@dataclass(frozen=True)
class Unreached:
    """Hook of a module that no planned forward called."""

    path: str

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise PlanError: what it gives would count on every rank, or was meant to be one of the terms."""
        raise PlanError(
            f"{self.path} ({type(module).__name__}) is called among terms of a sum over ranks, and was not when "
            "the model was planned.",
            hint="Plan the model with inputs that reach it: a function that returns (module, inputs).",
        )


class Returned:
    """Hook of the root: what it returns where no captured call did is the same on all ranks, or that is told.

    Attention maps that an option asks for are those of a rank's heads.  Each place is looked at once.
    """

    def __init__(self, known: tuple[str, ...], mesh: Mesh) -> None:
        self.seen, self.mesh = set(known), mesh

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare some entries of each tensor in a place that is new."""
        if transformed() or self.mesh.dry:
            return
        for slot, value in leaves(output, ""):
            if isinstance(value, Tensor) and (kind := kind_of(slot.removeprefix("."))) not in self.seen:
                self.seen.add(kind)
                if not self.same(value.detach()):
                    warnings.warn(
                        f"{kind}: what the model returns here was not there when it was planned, and differs from rank "
                        "to rank: it may be a rank's part.  Plan the model with inputs that return it.",
                        stacklevel=2,
                    )

    def same(self, x: Tensor) -> bool:
        """Whether all ranks have it."""
        if x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return True
        x = torch.view_as_real(x) if x.is_complex() else x
        found = torch.full((2, LOOKED_AT), float(x.numel()), dtype=torch.float32, device=x.device)
        if x.numel():
            at = torch.linspace(0, x.numel() - 1, LOOKED_AT, device=x.device).long()
            found[1] = x.flatten()[at]
        ranks = every(found, self.mesh)
        near = NEAR * max(torch.finfo(d).eps for d in (x.dtype, found.dtype)) if x.is_floating_point() else 0.0
        near *= found[1].nan_to_num(posinf=0.0, neginf=0.0).abs().max().item()
        return torch.allclose(ranks, found.expand_as(ranks), rtol=0.0, atol=near, equal_nan=True)


def keep(root: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """See to it that the parts of a converted module stay, and tell where it returns what was not looked at."""
    cut: dict[str, list[str]] = {}
    for verdict in plan.verdicts:
        if verdict.kind == "parameter" and (verdict.layout.cut or verdict.sum_grad or verdict.once):
            path, _, name = verdict.name.rpartition(".")
            cut.setdefault(path, []).append(name)
    spoken_of = {*cut, *(item.module for item in (*plan.boundaries, *plan.edits, *plan.rewrites))}
    of_caller: dict[str, list[Part]] = {}
    for path in sorted(spoken_of - {""}):
        above, _, name = path.rpartition(".")
        part = Part(path, root.get_submodule(above), name, root.get_submodule(path), frozenset(cut.get(path, ())))
        of_caller.setdefault(_caller(root, above), []).append(part)
    for path, parts in of_caller.items():
        root.get_submodule(path).register_forward_pre_hook(Kept(tuple(parts)))
    for path in plan.unreached:
        for module in root.get_submodule(path).modules():
            module.register_forward_pre_hook(Unreached(path))
    for module in root.modules():
        for name in REFUSED:
            if hasattr(type(module), name):
                module.__dict__[name] = Refused(module, name)
    if plan.returns:
        root.register_forward_hook(Returned(plan.returns, mesh))
    root.__dict__["_tp_converted"] = True


def refuse_converted(module: nn.Module) -> None:
    """Raise PlanError where a module, or a part of it, has been converted."""
    for path, part in module.named_modules():
        if "_tp_converted" in vars(part) or "tp_mesh" in vars(part) or hasattr(type(part), "_tp_made_of"):
            raise PlanError(
                f"{path or type(module).__name__} has been converted already, so it holds a rank's part.",
                hint="Plan and convert the whole model.",
            )


def _caller(root: nn.Module, path: str) -> str:
    """The innermost module from ``path`` up that is called: lists of modules are not."""
    while path and isinstance(root.get_submodule(path), nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]
    return path


def _wraps(now: nn.Module | None, old: nn.Module) -> bool:
    """Whether a module adds no parameters to another."""
    return now is not None and any(m is old for m in now.modules()) and _ids(now) == _ids(old)


def _ids(module: nn.Module) -> set[int]:
    return {id(p) for p in module.parameters()}
