"""Finding and replacing one tensor in the arguments or the output of a call, by its slot.

A slot is a dotted path: ``args.0``, ``kwargs.mask``, ``args.0.1``; in an output ``""``, ``0``, ``logits``, ``0.1``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from torch import Tensor, nn

from tpconvert.errors import PlanError

WAY_OUT = "It is called in another way than when it was planned; plan again with such inputs."


def positional_names(module: nn.Module) -> tuple[tuple[str, bool], ...]:
    """``(name, whether it may be left out and is then None)`` of each argument that may be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple((p.name, p.default is None) for p in parameters if p.kind in kinds)


def replaced_input(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    slots: tuple[str, ...],
    names: tuple[tuple[str, bool], ...],
    change: Callable[[Tensor], Tensor],
    where: str,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``change`` made to the tensor in ``slots``; one tensor object is changed once."""
    done: list[tuple[Tensor, Tensor]] = []
    for slot in slots:
        side, first, *path = slot.split(".")
        key = _argument(args, kwargs, side, first, names, f"{where}: there is no argument {slot}.")
        if isinstance(key, int):
            new = _changed(args[key], path, done, change, f"{where}: argument {slot}")
            args = (*args[:key], new, *args[key + 1 :])
        elif key is not None:
            kwargs = {**kwargs, key: _changed(kwargs[key], path, done, change, f"{where}: argument {slot}")}
    return args, kwargs


def replaced_output(output: Any, slots: tuple[str, ...], change: Callable[[Tensor], Tensor], where: str) -> Any:
    """The output, of the same type, with ``change`` made to the tensor in ``slots``."""
    done: list[tuple[Tensor, Tensor]] = []
    for slot in slots:
        output = _changed(output, slot.split(".") if slot else [], done, change, f"{where}: output {slot!r}")
    return output


def _argument(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    side: str,
    first: str,
    names: tuple[tuple[str, bool], ...],
    missing: str,
) -> int | str | None:
    """Where the argument is in this call: a position, a keyword, or None where it is left out and defaults to None."""
    if side == "args":
        position = int(first)
        name, optional = names[position] if position < len(names) else ("", False)
    else:
        name = first
        position = next((i for i, (n, _) in enumerate(names) if n == name), len(args))
        optional = next((o for n, o in names if n == name), False)
    if name in kwargs:
        return name
    if position < len(args):
        return position
    if optional:
        return None
    raise PlanError(missing, hint=WAY_OUT)


def _changed(
    tree: Any, path: list[str], done: list[tuple[Tensor, Tensor]], change: Callable[[Tensor], Tensor], where: str
) -> Any:
    if tree is None:
        return None
    if path:
        child = _child(tree, path[0], where)
        return _with_child(tree, path[0], _changed(child, path[1:], done, change, where))
    if not isinstance(tree, Tensor):
        raise PlanError(f"{where} is a {type(tree).__name__}, not a tensor.", hint=WAY_OUT)
    for old, new in done:
        if old is tree:
            return new
    done.append((tree, change(tree)))
    return done[-1][1]


def _child(tree: Any, key: str, where: str) -> Any:
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
    raise PlanError(f"{where} is not in the {type(tree).__name__} that was given.", hint=WAY_OUT)


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
