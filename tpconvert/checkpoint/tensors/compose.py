"""Reads a box of a tensor that a recipe makes, touching only the bytes that the box needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from tpconvert.errors import CheckpointError
from tpconvert.spec.recipe import Join, Narrow, Permute, Recipe, Shape, Take

Box = tuple[tuple[int, int], ...]
"""A half-open range of each dim."""

Leaf = Callable[[str], Tensor]
"""The tensor a :class:`Take` names, best as a view of a mapped file."""

Read = Callable[[str, Box], Tensor]
"""A box of the tensor a :class:`Take` names, of any dtype of the same width."""

LEAST_RUN = 64 << 10
"""Bytes below which it is cheaper to copy runs together than to hand on each."""
_MIXED = "A tensor is made of stored ones of several dtypes, which cannot be joined unchanged."
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def full(shape: Sequence[int]) -> Box:
    """The box that is the whole tensor."""
    return tuple((0, n) for n in shape)


def compose(recipe: Recipe, box: Box, leaf: Leaf) -> Tensor:
    """The elements of ``box``, bit for bit, as integers of the same width (so that no dtype is in the way)."""
    return compose_read(recipe, box, lambda name, part: part_of(leaf(name), part))


def compose_read(recipe: Recipe, box: Box, read: Read) -> Tensor:
    """The same, from a function that reads a box at a time."""
    match recipe:
        case Take(name=name):
            return raw(read(name, box))
        case Narrow(of=of):
            return compose_read(of, _narrowed(recipe, box), read)
        case Permute(of=of, dims=dims):
            inner = [(0, 0)] * len(dims)
            for out, dim in enumerate(dims):
                inner[dim] = box[out]
            return compose_read(of, tuple(inner), read).permute(dims)
        case Join():
            return _compose_join(recipe, box, read)
    return _compose_reshape(recipe.of, recipe.shape, box, read)


def compose_runs(recipe: Recipe, box: Box, read: Read) -> list[Tensor]:
    """The same as tensors whose elements, one after another, are those of ``box``: nothing is copied to join them."""
    runs = _runs(recipe, box, read)
    if len({run.dtype for run in runs}) > 1:
        raise CheckpointError(_MIXED)
    if len(runs) > 1 and sum(run.nbytes for run in runs) < len(runs) * LEAST_RUN:
        return [_joined([run.reshape(-1) for run in runs], 0)]
    return runs


def part_of(tensor: Tensor, box: Box, start: Box = ()) -> Tensor:
    """A box of a tensor, which itself is the box that begins at ``start``: a view."""
    start = start or full(tensor.shape)
    return tensor[tuple(slice(a - low, z - low) for (a, z), (low, _) in zip(box, start, strict=True))]


def raw(tensor: Tensor) -> Tensor:
    """The tensor as integers of the same width: a view."""
    if tensor.dtype in _RAW.values():
        return tensor
    return tensor.view(_RAW[tensor.dtype.itemsize])


def run_around(shape: Shape, box: Box) -> Box:
    """The smallest box of a tensor of ``shape`` that is one run of its elements and holds ``box``."""
    if any(start >= stop for start, stop in box):
        return box
    return tuple(_cover(shape, *_span(shape, box)))


def flat_range(shape: Shape, box: Box) -> tuple[int, int]:
    """The first flat index of a box that is one run of elements, and one past its last."""
    return _span(shape, box) if all(start < stop for start, stop in box) else (0, 0)


@dataclass(frozen=True, slots=True)
class Split:
    """How tensors are taken apart into runs: ``step`` rows of ``dim`` at a time, all of the later dims."""

    dim: int
    step: int

    def boxes(self, shape: Shape) -> Iterator[Box]:
        """Boxes that make up a tensor of ``shape`` in order."""
        if not shape:
            yield ()
            return
        rest = full(shape[self.dim + 1 :])
        for at in itertools.product(*map(range, shape[: self.dim])):
            for start in range(0, shape[self.dim], self.step):
                stop = min(start + self.step, shape[self.dim])
                yield (*((i, i + 1) for i in at), (start, stop), *rest)


def split_of(shapes: Sequence[Shape], itemsize: int, limit: int) -> Split:
    """One split for tensors that differ in one dim at most, so that runs of up to ``limit`` bytes begin together."""
    shape = tuple(map(max, zip(*shapes, strict=True)))
    dim = 0
    while dim < len(shape) - 1 and math.prod(shape[dim + 1 :]) * itemsize > limit:
        dim += 1
    row = math.prod(shape[dim + 1 :]) * itemsize
    return Split(dim, max(limit // max(row, 1), 1))


def _runs(recipe: Recipe, box: Box, read: Read) -> list[Tensor]:
    if isinstance(recipe, Narrow):
        return _runs(recipe.of, _narrowed(recipe, box), read)
    if isinstance(recipe, Join) and all(stop - start <= 1 for start, stop in box[: recipe.dim]):
        return [run for part, inner in _parts_in(recipe, box) for run in _runs(part, inner, read)]
    return [compose_read(recipe, box, read)]


def _narrowed(recipe: Narrow, box: Box) -> Box:
    """The box of what is narrowed."""
    low, high = box[recipe.dim]
    return (*box[: recipe.dim], (low + recipe.start, high + recipe.start), *box[recipe.dim + 1 :])


def _parts_in(join: Join, box: Box) -> list[tuple[Recipe, Box]]:
    """The parts that hold something of a box, each with its own box of it; the first one if none does."""
    low, high = box[join.dim]
    found, at = [], 0
    for part in join.parts:
        size = part.shape[join.dim]
        start, stop = max(low - at, 0), min(high - at, size)
        if start < stop:
            found.append((part, (*box[: join.dim], (start, stop), *box[join.dim + 1 :])))
        at += size
        if at >= high:
            break
    return found or [(join.parts[0], (*box[: join.dim], (0, 0), *box[join.dim + 1 :]))]


def _compose_join(join: Join, box: Box, read: Read) -> Tensor:
    found = [compose_read(part, inner, read) for part, inner in _parts_in(join, box)]
    if len({part.dtype for part in found}) > 1:
        raise CheckpointError(_MIXED)
    return found[0] if len(found) == 1 else _joined(found, join.dim)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The same as ``torch.cat`` of integers, in this thread alone: torch would wake others, which wait by spinning."""
    return torch.from_numpy(numpy.concatenate([part.numpy() for part in parts], dim))


def _compose_reshape(of: Recipe, shape: Shape, box: Box, read: Read) -> Tensor:
    """Read the smallest box of ``of`` that is one run of elements and holds the wanted ones, then cut it down."""
    if any(start >= stop for start, stop in box):
        inner = full(of.shape)
        empty = compose_read(of, ((0, 0), *inner[1:]) if inner else inner, read).reshape(-1)[:0]
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
    value = compose_read(of, tuple(inner_box), read).reshape([stop - start for start, stop in outer_box])
    return part_of(value, box, tuple(outer_box))


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
