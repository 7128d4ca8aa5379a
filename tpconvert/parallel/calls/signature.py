"""How a module was called when its forward was recorded, and whether a call now is of that kind."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from tpconvert.errors import PlanError
from tpconvert.spec.plan import Rewrite


@dataclass(frozen=True)
class Signature:
    """The recorded call: every leaf of every argument, left-out ones with their defaults."""

    where: str
    names: tuple[str, ...]
    """Arguments that may be given by position."""
    defaults: dict[str, Any]
    slots: tuple[str, ...]
    """The tensors, as the plan spells their slots."""
    leaves: dict[str, Any]
    """Leaf by argument name -> its constant; the tensors are not among them."""
    tensor_leaves: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module, rewrite: Rewrite) -> Signature:
        """The signature of a rewrite, read with the module's own forward beside it."""
        parameters = inspect.signature(module.forward).parameters.values()
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = tuple(p.name for p in parameters if p.kind in named)
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        where = rewrite.module or "the root module"
        slots = tuple(s for s, kind in rewrite.signature.items() if kind == "tensor")
        constants = {}
        for slot, kind in rewrite.signature.items():
            if kind != "tensor":
                if not isinstance(kind, Mapping) or set(kind) != {"const"}:
                    raise PlanError(f"{where}: argument {slot} of its forward is {kind!r}, not 'tensor' or a const.")
                constants[_by_name(slot, names)] = kind["const"]
        tensors = tuple(_by_name(s, names) for s in slots)
        given = {leaf.split(".")[0] for leaf in (*constants, *tensors)}
        for name, value in defaults.items():
            if name not in given:
                constants |= dict(leaves(value, name))
        return cls(where, names, defaults, slots, constants, tensors)

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The call's tensors in the order of ``slots``; PlanError where it is not the recorded kind of call."""
        found = self.given(args, kwargs)
        if (other := self.other(found)) is not None:
            raise self.differs(*other)
        return [found[leaf] for leaf in self.tensor_leaves]

    def fits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is of the recorded kind."""
        return self.other(self.given(args, kwargs)) is None

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every leaf of a call."""
        given: dict[str, Any] = {**self.defaults}
        for i, value in enumerate(args):
            given[self.names[i] if i < len(self.names) else f"args.{i}"] = value
        given |= kwargs
        found: dict[str, Any] = {}
        for name, value in given.items():
            found |= dict(leaves(value, name))
        return found

    def other(self, found: Mapping[str, Any]) -> tuple[str, str] | None:
        """The first leaf that is not as recorded, and what it is instead."""
        for leaf, value in found.items():
            if isinstance(value, Tensor):
                if leaf not in self.tensor_leaves:
                    return leaf, "a tensor"
            elif leaf not in self.leaves or self.leaves[leaf] != value:
                return leaf, repr(value)
        for leaf in (*self.tensor_leaves, *self.leaves):
            if leaf not in found:
                return leaf, "missing"
        return None

    def differs(self, leaf: str, value: str) -> PlanError:
        """The error for a call of another kind."""
        was = (
            "a tensor"
            if leaf in self.tensor_leaves
            else repr(self.leaves[leaf])
            if leaf in self.leaves
            else "not given"
        )
        return PlanError(
            f"{self.where}: its forward was regenerated for calls where {leaf} is {was}; here it is {value}.",
            hint=f"Plan again with such inputs, or with --set '{self.where}.*=whole'.",
        )


def _by_name(slot: str, names: tuple[str, ...]) -> str:
    """``args.0.1`` -> ``x.1``, ``kwargs.mask`` -> ``mask``."""
    side, first, *rest = slot.split(".")
    if side == "args":
        first = names[int(first)] if int(first) < len(names) else f"args.{first}"
    return ".".join([first, *rest])


def leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """``(slot, value)`` of each leaf of nested containers."""
    if isinstance(tree, Mapping):
        children = [(str(k), v) for k, v in tree.items()]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        children = list(zip(tree._fields, tree, strict=True))
    elif isinstance(tree, tuple | list):
        children = [(str(i), v) for i, v in enumerate(tree)]
    elif is_dataclass(tree) and not isinstance(tree, type):
        children = [(f.name, getattr(tree, f.name)) for f in fields(tree)]
    else:
        yield prefix, tree
        return
    for key, value in children:
        yield from leaves(value, f"{prefix}.{key}")
