"""How one tensor is made of others without changing an element: take, narrow, permute, reshape, join.

A fused weight made of separate ones, and a separate one cut out of it again::

    Join(0, (Take("q", (8, 4)), Take("k", (2, 4))))         module: qkv [10, 4]
    Narrow(Take("qkv", (10, 4)), 0, 8, 10)                  file: k [2, 4]

:func:`invert` turns the first kind into the second.  Nothing here reads a tensor; recipes only know shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tpconvert.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """A named tensor, all of it."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Narrow:
    """Rows ``start`` to ``stop`` of ``dim``."""

    of: Recipe
    dim: int
    start: int
    stop: int
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        size = list(self.of.shape)
        if not (0 <= self.dim < len(size) and 0 <= self.start <= self.stop <= size[self.dim]):
            raise CheckpointError(f"A recipe takes {self.start}:{self.stop} of dim {self.dim} of a {size} tensor.")
        size[self.dim] = self.stop - self.start
        object.__setattr__(self, "shape", tuple(size))


@dataclass(frozen=True, slots=True)
class Permute:
    """Dim ``i`` is dim ``dims[i]`` of the tensor it is made of."""

    of: Recipe
    dims: tuple[int, ...]
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        if sorted(self.dims) != list(range(len(self.of.shape))):
            raise CheckpointError(f"A recipe permutes a {list(self.of.shape)} tensor by {list(self.dims)}.")
        object.__setattr__(self, "shape", tuple(self.of.shape[d] for d in self.dims))


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in row-major order under another shape."""

    of: Recipe
    shape: Shape

    def __post_init__(self) -> None:
        if math.prod(self.shape) != math.prod(self.of.shape):
            raise CheckpointError(f"A recipe reshapes a {list(self.of.shape)} tensor to {list(self.shape)}.")


@dataclass(frozen=True, slots=True)
class Join:
    """Parts laid one after another along ``dim``."""

    dim: int
    parts: tuple[Recipe, ...]
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        first = self.parts[0].shape if self.parts else ()
        others = {p.shape[: self.dim] + p.shape[self.dim + 1 :] for p in self.parts}
        if len(others) != 1 or not 0 <= self.dim < len(first):
            raise CheckpointError(f"A recipe joins tensors of other shapes along dim {self.dim}.")
        total = sum(p.shape[self.dim] for p in self.parts)
        object.__setattr__(self, "shape", (*first[: self.dim], total, *first[self.dim + 1 :]))


Recipe: TypeAlias = Take | Narrow | Permute | Reshape | Join


def to_json(recipe: Recipe) -> Any:
    """A name for a :class:`Take`, a list that begins with the verb for the others."""
    match recipe:
        case Take(name=name):
            return name
        case Narrow(of=of, dim=dim, start=start, stop=stop):
            return ["narrow", to_json(of), dim, start, stop]
        case Permute(of=of, dims=dims):
            return ["permute", to_json(of), list(dims)]
        case Reshape(of=of, shape=shape):
            return ["reshape", to_json(of), list(shape)]
        case Join(dim=dim, parts=parts):
            return ["join", dim, *map(to_json, parts)]


def from_json(data: Any, shapes: Mapping[str, Shape]) -> Recipe:
    """The inverse of :func:`to_json`, given the shapes of the named tensors."""
    if isinstance(data, str):
        if data not in shapes:
            raise CheckpointError(f"A recipe names the tensor {data}, which the manifest does not have.")
        return Take(data, shapes[data])
    match data:
        case ["narrow", of, int(dim), int(start), int(stop)]:
            return Narrow(from_json(of, shapes), dim, start, stop)
        case ["permute", of, [*dims]]:
            return Permute(from_json(of, shapes), tuple(map(int, dims)))
        case ["reshape", of, [*shape]]:
            return Reshape(from_json(of, shapes), tuple(map(int, shape)))
        case ["join", int(dim), *parts]:
            return Join(dim, tuple(from_json(p, shapes) for p in parts))
    raise CheckpointError(f"The manifest has a recipe that cannot be read: {str(data)[:80]}.")


def takes(recipe: Recipe) -> list[Take]:
    """Every named tensor in the recipe, in order, as often as it occurs."""
    match recipe:
        case Take():
            return [recipe]
        case Join(parts=parts):
            return [take for part in parts for take in takes(part)]
    return takes(recipe.of)


def substitute(recipe: Recipe, find: Callable[[Take], Recipe]) -> Recipe:
    """The recipe with each named tensor replaced by the recipe ``find`` gives for it."""
    match recipe:
        case Take():
            return find(recipe)
        case Narrow(of=of, dim=dim, start=start, stop=stop):
            return Narrow(substitute(of, find), dim, start, stop)
        case Permute(of=of, dims=dims):
            return Permute(substitute(of, find), dims)
        case Reshape(of=of, shape=shape):
            return Reshape(substitute(of, find), shape)
        case Join(dim=dim, parts=parts):
            return Join(dim, tuple(substitute(part, find) for part in parts))


def invert(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """For recipes ``made -> of taken``, the recipes ``taken -> of made``.

    Narrows of one tensor must be narrows of one and the same node, as ``torch.chunk`` gives them, and cover it.

    >>> joined = {"ab": Join(0, (Take("a", (2,)), Take("b", (1,))))}
    >>> invert(joined)["b"]
    Narrow(of=Take(name='ab', shape=(3,)), dim=0, start=2, stop=3, shape=(1,))
    """
    uses: dict[Any, list[_Use]] = {}
    seen: set[int] = set()
    leaves: dict[str, Take] = {}
    for name, root in recipes.items():
        uses.setdefault(_key(root), []).append(_Use(Take(name, root.shape)))
        _collect(root, uses, seen, leaves)
    memo: dict[Any, Recipe] = {}
    return {name: _value(leaf, uses, memo) for name, leaf in leaves.items()}


@dataclass(frozen=True, slots=True)
class _Use:
    """One place where a node's value goes: into a made tensor (a Take), or into ``parent`` at ``start``."""

    parent: Recipe
    start: int = 0


def _key(node: Recipe) -> Any:
    return node.name if isinstance(node, Take) else id(node)


def _collect(node: Recipe, uses: dict[Any, list[_Use]], seen: set[int], leaves: dict[str, Take]) -> None:
    if isinstance(node, Take):
        leaves[node.name] = node
        return
    if id(node) in seen:
        return
    seen.add(id(node))
    start = 0
    for child in node.parts if isinstance(node, Join) else (node.of,):
        uses.setdefault(_key(child), []).append(_Use(node, start))
        start += child.shape[node.dim] if isinstance(node, Join) else 0
        _collect(child, uses, seen, leaves)


def _value(node: Recipe, uses: dict[Any, list[_Use]], memo: dict[Any, Recipe]) -> Recipe:
    key = _key(node)
    if key not in memo:
        whole = [use for use in uses[key] if not isinstance(use.parent, Narrow)]
        memo[key] = _undo(node, whole[0], uses, memo) if whole else _patch(node, uses, memo)
    return memo[key]


def _undo(node: Recipe, use: _Use, uses: dict[Any, list[_Use]], memo: dict[Any, Recipe]) -> Recipe:
    match use.parent:
        case Take():
            return use.parent
        case Join(dim=dim):
            value = _value(use.parent, uses, memo)
            return value if value.shape == node.shape else Narrow(value, dim, use.start, use.start + node.shape[dim])
        case Permute(dims=dims):
            return Permute(_value(use.parent, uses, memo), tuple(sorted(range(len(dims)), key=dims.__getitem__)))
    return Reshape(_value(use.parent, uses, memo), node.shape)


def _patch(node: Recipe, uses: dict[Any, list[_Use]], memo: dict[Any, Recipe]) -> Recipe:
    """The node put together from its narrows, which must lie along one dim and leave no gap."""
    narrows = sorted(
        (use.parent for use in uses[_key(node)] if isinstance(use.parent, Narrow)), key=lambda n: (n.start, n.stop)
    )
    dim, at, parts = narrows[0].dim, 0, []
    for narrow in narrows:
        if narrow.dim == dim and narrow.start == at and narrow.stop > at:
            parts.append(_value(narrow, uses, memo))
            at = narrow.stop
    if at != node.shape[dim]:
        name = node.name if isinstance(node, Take) else "a joined tensor"
        raise CheckpointError(f"Only rows 0:{at} of {node.shape[dim]} of {name} are used, so it cannot be given back.")
    return parts[0] if len(parts) == 1 else Join(dim, tuple(parts))
