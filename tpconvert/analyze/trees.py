"""Nested arguments and results: which tensors and constants are in them, by slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensor_slots(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """``(slot, tensor)`` of each tensor in nested tuples, lists and mappings."""
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
        return
    for key, value in _children(tree):
        yield from tensor_slots(value, f"{prefix}.{key}" if prefix else key)


def constant_slots(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(slot, value)`` of each other leaf."""
    if isinstance(tree, tuple | list | Mapping):
        for key, value in _children(tree):
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


def _children(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield from zip(tree._fields, tree, strict=True)
    elif isinstance(tree, tuple | list):
        yield from ((str(i), v) for i, v in enumerate(tree))
    elif isinstance(tree, Mapping):
        yield from ((str(k), v) for k, v in tree.items())
    elif hasattr(tree, "__dataclass_fields__"):
        yield from ((name, getattr(tree, name)) for name in tree.__dataclass_fields__)


def tensors_below(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in an op's arguments, those in slices too."""
    if isinstance(tree, slice):
        tree = (tree.start, tree.stop, tree.step)
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tensors_below(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_below(item)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of :func:`tensor_slots`, without their slots."""
    for _, tensor in tensor_slots(tree):
        yield tensor
