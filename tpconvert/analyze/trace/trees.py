"""Nested arguments and results: which tensors and constants are in them, by slot, and the same with other tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import is_dataclass
from typing import Any

import torch

LEAVES = (str, int, float, complex, torch.dtype, torch.device, type(None))
"""What is in nearly all arguments and holds nothing, so that walks need not look."""


def tensor_slots(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """``(slot, tensor)`` of each tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
        return
    if isinstance(tree, LEAVES):
        return
    for key, value in children(tree):
        yield from tensor_slots(value, f"{prefix}.{key}" if prefix else key)


def constant_slots(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(slot, value)`` of each other leaf."""
    if isinstance(tree, tuple | list | Mapping):
        for key, value in children(tree):
            yield from constant_slots(value, f"{prefix}.{key}" if prefix else key)
    elif not isinstance(tree, torch.Tensor):
        yield prefix, tree


def is_plain(tree: Any) -> bool:
    """Whether a structure can be rebuilt from its contents alone."""
    if type(tree) in (tuple, list):
        return all(map(is_plain, tree))
    if type(tree) is dict:
        return all(map(is_plain, tree.values()))
    return isinstance(tree, torch.Tensor | int | float | str) or tree is None


def children(tree: Any) -> Iterator[tuple[str, Any]]:
    """``(key, child)`` of a tuple, list, mapping or dataclass; nothing of any other value."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield from zip(tree._fields, tree, strict=True)
    elif isinstance(tree, tuple | list):
        yield from ((str(i), v) for i, v in enumerate(tree))
    elif isinstance(tree, Mapping):
        yield from ((str(k), v) for k, v in tree.items())
    elif is_dataclass(tree) and not isinstance(tree, type):
        for name in tree.__dataclass_fields__:
            try:
                value = getattr(tree, name)
            except Exception:  # a field that may not be read, as of a configuration where layers differ
                continue
            yield name, value


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """A tree of the same types with ``function`` of each tensor in its place; the given tree is left as it is."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple | list):
        items = [map_tensors(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        made = {key: map_tensors(function, value) for key, value in tree.items()}
        if type(tree) is dict or not isinstance(tree, MutableMapping):
            return made
        own = copy.copy(tree)  # keeps what else it holds: a defaultdict's factory, a ModelOutput's attributes
        for key, value in made.items():
            own[key] = value
        return own
    if is_dataclass(tree) and not isinstance(tree, type):
        own = copy.copy(tree)
        for name, value in children(tree):
            object.__setattr__(own, name, map_tensors(function, value))  # a frozen one too
        return own
    return tree


def floats_as(tree: Any, dtype: torch.dtype) -> Any:
    """A tree with its floating tensors in another dtype."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of :func:`tensor_slots` without their slots, those in slices too."""
    found: list[torch.Tensor] = []
    _gather(tree, found)
    return found


def _gather(tree: Any, found: list[torch.Tensor]) -> None:
    """Put the tensors in ``tree`` into ``found``: no generator, since this runs several times for each op."""
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, tuple | list):
        for item in tree:
            _gather(item, found)
    elif isinstance(tree, slice):
        _gather((tree.start, tree.stop, tree.step), found)
    elif not isinstance(tree, LEAVES):
        for _, value in children(tree):
            _gather(value, found)


class Held(str):
    """An argument that no graph can hold (a generator, packed weights), by the name of its type: ``<Generator>``."""

    held: Any

    def __new__(cls, value: Any) -> Held:
        """The name of the type of ``value``, which is kept in ``held``."""
        self = super().__new__(cls, f"<{type(value).__name__}>")
        self.held = value
        return self


def fresh(out: Any, args: Any, kwargs: Any) -> Any:
    """``out`` with a new tensor object wherever an op returned its own argument, as ``x.to(x.dtype)`` does.

    Otherwise the argument itself would seem to have passed through the op.
    """
    if isinstance(out, torch.Tensor):
        if not any(t is out for t in tensors_in((args, kwargs))):
            return out
        with torch._C.DisableTorchFunction():
            return torch.ops.aten.alias.default(out) if out.layout is torch.strided else out.clone()  # has no views
    if type(out) not in (tuple, list):
        return out
    given = {id(t) for t in tensors_in((args, kwargs))}
    if any(id(t) in given for t in tensors_in(out)):
        return type(out)(fresh(o, args, kwargs) for o in out)
    return out
