"""Finding and replacing one tensor in the arguments or the output of a call, by its slot.

A slot is a dotted path: ``args.0``, ``kwargs.mask``, ``args.0.1``; in an output ``""``, ``0``, ``logits``, ``0.1``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from torch import Tensor, nn

from tpconvert.errors import PlanError

WAY_OUT = "It is called in another way than when it was planned; plan again with such inputs."


@dataclass(frozen=True)
class Slot:
    """A slot, taken apart once so that a call costs little."""

    text: str
    where: str
    """The module, for errors."""
    path: tuple[str, ...]
    """Within the argument or the output."""
    position: int = -1
    name: str = ""
    optional: bool = False
    """Whether the argument may be left out and is then None."""

    def error(self, what: str) -> PlanError:
        """The error for a call that has no tensor here."""
        side = "argument" if self.position >= 0 or self.name else "output"
        return PlanError(f"{self.where}: {side} {self.text!r} {what}.", hint=WAY_OUT)


def input_slots(module: nn.Module, texts: Iterable[str], where: str) -> tuple[Slot, ...]:
    """The slots of arguments, which a caller may give by position or by name as the forward's signature allows."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    slots = []
    for text in texts:
        side, first, *path = text.split(".")
        position = int(first) if side == "args" else next((i for i, p in enumerate(parameters) if p.name == first), -1)
        known = parameters[position] if 0 <= position < len(parameters) else None
        name = first if side == "kwargs" else known.name if known else ""
        slots.append(Slot(text, where, tuple(path), position, name, known is not None and known.default is None))
    return tuple(slots)


def output_slots(texts: Iterable[str], where: str) -> tuple[Slot, ...]:
    """The slots of an output."""
    return tuple(Slot(text, where, tuple(text.split(".")) if text else ()) for text in texts)


def kind_of(slot: str) -> str:
    """A slot, where entries of one list in an output are one: ``losses.0`` and ``losses.3`` are ``losses.*``."""
    first, *rest = slot.split(".")
    return ".".join([first, *("*" if step.isdigit() else step for step in rest)])


Change = Callable[[Tensor], Tensor]
Done = list[tuple[Tensor, Tensor]]


def replaced_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], slots: tuple[Slot, ...], change: Change
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``change`` made to the tensor in ``slots``; one tensor object is changed once."""
    done: Done = []
    for slot in slots:
        at = slot.position
        if slot.name in kwargs:
            kwargs = {**kwargs, slot.name: _changed(kwargs[slot.name], slot, 0, done, change)}
        elif 0 <= at < len(args):
            args = (*args[:at], _changed(args[at], slot, 0, done, change), *args[at + 1 :])
        elif not slot.optional:
            raise slot.error("is not given")
    return args, kwargs


def replaced_output(output: Any, slots: tuple[Slot, ...], change: Change) -> Any:
    """The output, of the same type, with ``change`` made to the tensor in ``slots``."""
    done: Done = []
    for slot in slots:
        output = _changed(output, slot, 0, done, change)
    return output


def _changed(tree: Any, slot: Slot, depth: int, done: Done, change: Change) -> Any:
    if tree is None:
        return None
    if depth < len(slot.path):
        key = slot.path[depth]
        return _with_child(tree, key, _changed(_child(tree, key, slot), slot, depth + 1, done, change))
    if not isinstance(tree, Tensor):
        raise slot.error(f"is a {type(tree).__name__}, not a tensor")
    for old, new in done:
        if old is tree:
            return new
    done.append((tree, change(tree)))
    return done[-1][1]


def _child(tree: Any, key: str, slot: Slot) -> Any:
    if isinstance(tree, Mapping):
        if key in tree:
            return tree[key]
        if key.isdigit() and int(key) in tree:
            return tree[int(key)]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        if key in tree._fields:
            return getattr(tree, key)
    elif isinstance(tree, tuple | list):
        if key.isdigit() and int(key) < len(tree):
            return tree[int(key)]
    elif is_dataclass(tree) and key in tree.__dataclass_fields__:
        return getattr(tree, key)
    raise slot.error(f"is not in the {type(tree).__name__} that was given")


def _with_child(tree: Any, key: str, value: Any) -> Any:
    """The same tree with one child replaced; the given tree is left as it is."""
    if isinstance(tree, Mapping):
        if is_dataclass(tree):
            return type(tree)(**{**tree, key: value})
        name = key if key in tree else int(key)
        return {**tree, name: value} if type(tree) is dict else _copied(tree, name, value)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return tree._replace(**{key: value})
    if isinstance(tree, tuple | list):
        items = [value if i == int(key) else item for i, item in enumerate(tree)]
        return items if type(tree) is list else type(tree)(items)
    return replace(tree, **{key: value})


def _copied(tree: Any, name: Any, value: Any) -> Any:
    tree = tree.copy() if hasattr(tree, "copy") else type(tree)(tree)
    tree[name] = value
    return tree
