"""Slices of tokens in the emulation: of each sequence, or of rows of all sequences (``Flow.rows``).

A slice of rows is emulated in the shape of one sequence, so that ranks may have any number of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from tpconvert.analyze.axes.terms import leaves
from tpconvert.analyze.flow.states import Flow, Placed
from tpconvert.spec.layout import share

Way = Callable[[list[Tensor], list[tuple[int, Tensor, int]]], list[Tensor]]
"""A collective on the ranks' values, each with ``(dim, indices, whole size)``."""


def span(flow: Flow, node: fx.Node, dim: int, rank: int, tp: int) -> tuple[int, int]:
    """The tokens, or rows, that a rank holds."""
    dims = flow.ax.of(node)
    return share(math.prod(t.n for t in dims[:dim]) * dims[dim].n if flow.rows else dims[dim].n, rank, tp)


def own(flow: Flow, node: fx.Node, dim: int, whole: Tensor, rank: int, tp: int) -> Tensor:
    """What a rank has of a whole value."""
    first, last = span(flow, node, dim, rank, tp)
    if not flow.rows:
        return whole.narrow(dim, first, last - first)
    return whole.flatten(0, dim)[first:last].unflatten(0, [1] * dim + [last - first])


def crossed(flow: Flow, way: Way, placed: Placed, values: list[Tensor], tp: int) -> list[Tensor]:
    """What is on the other side of a collective of slices."""
    node, dim = placed.node, placed.sliced
    assert dim is not None
    held = [torch.arange(*span(flow, node, dim, rank, tp)) for rank in range(tp)]
    lead = [t.n for t in flow.ax.of(node)[: dim + 1]]
    if not flow.rows:
        return way(values, [(dim, index, lead[dim]) for index in held])
    found = way([v.flatten(0, dim) for v in values], [(0, index, math.prod(lead)) for index in held])
    if "gather" in placed.kind:
        return [v.unflatten(0, lead) for v in found]
    return [v.unflatten(0, [1] * dim + [len(v)]) for v in found]


def lengths(flow: Flow, node: fx.Node, rank: int, tp: int) -> list[tuple[Any, int]]:
    """``(path, size)`` of what an op on slices is told in place of the number of tokens, or of sequences."""
    dim = flow.sliced_dims[node]
    first, last = span(flow, node, dim, rank, tp)
    dims = flow.ax.of(node)
    before = {a for t in dims[:dim] for a in leaves(t)} if flow.rows else set()
    found = []
    for site in flow.ax.sites.get(node, ()):
        if leaves(site.term) & leaves(dims[dim]):
            found.append((site.path, last - first))
        elif leaves(site.term) & before:
            found.append((site.path, 1))
    return found
