"""Which modules the code names that a forward calls: a weight of any other is for ``generate()`` or the like alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

_ANY = ("getattr", "modules", "children", "parameters", "named_modules", "named_children")
"""What reads modules without naming them."""
_NO_MODEL = (
    "torch.",
    "builtins",
    "transformers.modeling_utils",
    "transformers.generation",
    "transformers.integrations",
)
"""Where classes are defined that every model has something of."""


def never_named(module: nn.Module, names: set[str]) -> set[str]:
    """Those of the parameters whose module is named nowhere in the code that the module's forward can call."""
    named = _named(module)
    inside = {id(part): part for part in module.modules()}
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in names}
    return {name for name, owner in owners.items() if id(owner) in inside and id(owner) not in named}


def _named(module: nn.Module) -> set[int]:
    """Ids of the modules that are named, from the forward on, through every method that it calls."""
    found: set[int] = set()
    seen: set[tuple[int, str]] = set()
    todo: list[tuple[nn.Module, str]] = [(module, "forward")]
    while todo:
        owner, method = todo.pop()
        if (id(owner), method) in seen:
            continue
        seen.add((id(owner), method))
        found.add(id(owner))
        for part, called in _reads(owner, method):
            todo.append((part, called))
    return found


def _reads(owner: nn.Module, method: str) -> Iterator[tuple[nn.Module, str]]:
    """The modules that a method of one names, each with what is called of it."""
    for tree in _sources(type(owner), method):
        chains = list(_chains(tree))
        if tree is None or any(not chain or chain[0] in _ANY for chain in chains):
            yield from ((part, "forward") for part in owner.children())
        for chain in chains:
            yield from _followed(owner, chain)
    if isinstance(owner, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        yield from ((part, "forward") for part in owner.children())


def _followed(owner: nn.Module, chain: list[str]) -> Iterator[tuple[nn.Module, str]]:
    """Where ``self.a.b.c`` leads: to ``a``, ``b`` of it, and to methods on the way."""
    here: Any = owner
    for name in chain:
        found = getattr(here, name, None)
        if isinstance(found, nn.Module):
            yield found, "forward"
            here = found
        else:
            if callable(getattr(type(here), name, None)) or isinstance(getattr(type(here), name, None), property):
                yield here, name
            return


def _sources(kind: type, method: str) -> Iterator[ast.AST | None]:
    """The code of a method in every class that has it; None where there is none to read."""
    for base in kind.__mro__:
        held = base.__dict__.get(method)
        if held is None or base.__module__.startswith(_NO_MODEL):
            continue
        plain = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
        try:
            yield ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(plain))))
        except (OSError, TypeError, SyntaxError):
            yield None


def _chains(tree: ast.AST | None) -> Iterator[list[str]]:
    """Every ``self.a.b`` as ``[a, b]``; the empty list for a ``self`` that stands alone, as what is passed on."""
    if tree is None:
        return
    within = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "self" and id(node) not in within:
            yield []
        elif isinstance(node, ast.Attribute):
            names, root = [node.attr], node.value
            while isinstance(root, ast.Attribute):
                names.append(root.attr)
                root = root.value
            if isinstance(root, ast.Name) and root.id == "self":
                yield names[::-1]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            yield ["getattr"]
