"""Reads a box of a tensor that a recipe makes, touching only the bytes that the box needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tpconvert.errors import CheckpointError
from tpconvert.spec.recipe import Join, Narrow, Permute, Recipe, Shape, Take

Box = tuple[tuple[int, int], ...]
"""A half-open range of each dim."""

Leaf = Callable[[str], Tensor]
"""The tensor a :class:`Take` names, best as a view of a mapped file."""

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def full(shape: Sequence[int]) -> Box:
    """The box that is the whole tensor."""
    return tuple((0, n) for n in shape)


def compose(recipe: Recipe, box: Box, leaf: Leaf) -> Tensor:
    """The elements of ``box``, bit for bit, as integers of the same width (so that no dtype is in the way)."""
    match recipe:
        case Take(name=name):
            return raw(leaf(name))[tuple(slice(start, stop) for start, stop in box)]
        case Narrow(of=of, dim=dim, start=start):
            low, high = box[dim]
            return compose(of, (*box[:dim], (low + start, high + start), *box[dim + 1 :]), leaf)
        case Permute(of=of, dims=dims):
            inner = [(0, 0)] * len(dims)
            for out, dim in enumerate(dims):
                inner[dim] = box[out]
            return compose(of, tuple(inner), leaf).permute(dims)
        case Join():
            return _compose_join(recipe, box, leaf)
    return _compose_reshape(recipe.of, recipe.shape, box, leaf)


def raw(tensor: Tensor) -> Tensor:
    """The tensor as integers of the same width: a view."""
    if tensor.dtype in _RAW.values():
        return tensor
    return tensor.view(_RAW[tensor.dtype.itemsize])


def runs(shape: Shape, itemsize: int, limit: int) -> Iterator[Box]:
    """Boxes of whole rows of the first dim, of about ``limit`` bytes each, that make up the tensor in order."""
    row = math.prod(shape[1:]) * itemsize
    if not shape or row * shape[0] <= limit:
        yield full(shape)
        return
    step = max(limit // row, 1)
    for start in range(0, shape[0], step):
        yield ((start, min(start + step, shape[0])), *full(shape[1:]))


def _compose_join(join: Join, box: Box, leaf: Leaf) -> Tensor:
    low, high = box[join.dim]
    found, at = [], 0
    for part in join.parts:
        size = part.shape[join.dim]
        start, stop = max(low - at, 0), min(high - at, size)
        if start < stop:
            found.append(compose(part, (*box[: join.dim], (start, stop), *box[join.dim + 1 :]), leaf))
        at += size
        if at >= high:
            break
    if not found:
        first = join.parts[0]
        return compose(first, (*box[: join.dim], (0, 0), *box[join.dim + 1 :]), leaf)
    if len(found) == 1:
        return found[0]
    if len({part.dtype for part in found}) > 1:
        raise CheckpointError("A tensor is made of stored ones of several dtypes, which cannot be joined unchanged.")
    return torch.cat(found, join.dim)


def _compose_reshape(of: Recipe, shape: Shape, box: Box, leaf: Leaf) -> Tensor:
    """Read the smallest box of ``of`` that is one run of elements and holds the wanted ones, then cut it down."""
    if any(start >= stop for start, stop in box):
        inner = full(of.shape)
        empty = compose(of, ((0, 0), *inner[1:]) if inner else inner, leaf).reshape(-1)[:0]
        return empty.reshape([stop - start for start, stop in box])
    inner_box: list[tuple[int, int]] = []
    outer_box: list[tuple[int, int]] = []
    for ins, outs in _groups(of.shape, shape):
        low, high = _span(shape[outs], box[outs])
        while True:
            inner_part = _cover(of.shape[ins], low, high)
            outer_part = _cover(shape[outs], *_span(of.shape[ins], inner_part))
            wider = _span(shape[outs], outer_part)
            if wider == _span(of.shape[ins], inner_part):
                break
            low, high = wider
        inner_box += inner_part
        outer_box += outer_part
    value = compose(of, tuple(inner_box), leaf).reshape([stop - start for start, stop in outer_box])
    return value[tuple(slice(a - b, z - b) for (a, z), (b, _) in zip(box, outer_box, strict=True))]


def _groups(a: Shape, b: Shape) -> Iterator[tuple[slice, slice]]:
    """Runs of dims of ``a`` and of ``b`` that hold the same elements, as short as they can be."""
    i = j = 0
    while i < len(a) or j < len(b):
        first_i, first_j = i, j
        size_a = size_b = 1
        if i < len(a):
            size_a, i = a[i], i + 1
        if j < len(b):
            size_b, j = b[j], j + 1
        while size_a != size_b:
            if (size_a < size_b or j == len(b)) and i < len(a):
                size_a, i = size_a * a[i], i + 1
            else:
                size_b, j = size_b * b[j], j + 1
        if i == len(a) or j == len(b):  # what is left on one side is ones
            i, j = len(a), len(b)
        yield slice(first_i, i), slice(first_j, j)


def _span(shape: Shape, box: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first flat index of a box, and one past its last."""
    low = high = 0
    for size, (start, stop) in zip(shape, box, strict=True):
        low, high = low * size + start, high * size + stop - 1
    return low, high + 1


def _cover(shape: Shape, low: int, high: int) -> list[tuple[int, int]]:
    """The smallest box that is one run of flat indices and holds ``low`` to ``high``."""
    out: list[tuple[int, int]] = []
    for i in range(len(shape)):
        inner = math.prod(shape[i + 1 :])
        first, last = low // inner, (high - 1) // inner
        out.append((first, last + 1))
        if first != last:
            return out + [(0, n) for n in shape[i + 1 :]]
        low, high = low - first * inner, high - first * inner
    return out
