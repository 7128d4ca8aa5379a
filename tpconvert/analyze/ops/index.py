"""Rules of indexing: slices take segments, integers one index, tensors look up by data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tpconvert.analyze.axes.run import Axes, Dims, nodes_in, where
from tpconvert.analyze.axes.terms import P, S, Term, V

Bound = dict[str, Any]


def getitem(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """``x[...]``: slices take segments, integers take one index, tensors look up."""
    return index(ax, node, ax.of(a["input"]), a["index"], (0, 1), node.meta["shape"])


def setitem(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """``x[...] = value``: what is written meets what is there."""
    dims = index(ax, node, ax.of(a["input"]), a["index"], (0, 1), None)
    ax.written[node] = dims
    data = [n for n in nodes_in(a["index"]) if n.meta["shape"]]
    ax.block([t for n in data for t in ax.of(n)], node, "places to write to")
    if isinstance(a["value"], fx.Node):
        value = ax.of(a["value"])
        for here, there in zip(dims[::-1], value[::-1], strict=False):
            if here.n == there.n:
                ax.unify(here, there, node)
            elif there.n > 1:
                ax.block(there, node, "written by data")
    return dims


def select(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """One index of a dim."""
    dims = list(ax.of(a["input"]))
    dim = a["dim"] % len(dims)
    _take(ax, node, dims[dim], a["index"], where(node, ("input", "dim", "index"), "index"))
    return [*dims[:dim], *dims[dim + 1 :]]


def narrow(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """A run of indices of a dim."""
    names = ("input", "dim", "start", "length")
    dims = list(ax.of(a["input"]))
    dim = a["dim"] % len(dims)
    left, rest = ax.cut(dims[dim], a["start"] % dims[dim].n, node)
    dims[dim], _ = ax.cut(rest, a["length"], node)
    ax.site(node, where(node, names, "start"), left)
    ax.site(node, where(node, names, "length"), dims[dim])
    return dims


def index(ax: Axes, node: fx.Node, dims: Dims, items: Any, path: tuple[Any, ...], shape: Sequence[int] | None) -> Dims:
    """The dims of ``x[items]``; ``shape`` is the result's, where it is known."""
    single = not isinstance(items, tuple)
    items = [items] if single else list(items)
    paths = [path if single else (*path, i) for i in range(len(items))]
    if not any(i is ... for i in items):
        items, paths = [*items, ...], [*paths, ()]
    used = sum(_index_dims(i) for i in items)
    out: Dims = []
    looked_up: list[Dims] = []
    place: int | None = None
    basic = all(i is None or i is ... or isinstance(i, int | slice) for i in items)
    d = 0
    for item, at in zip(items, paths, strict=True):
        if item is ...:
            out += dims[d : d + len(dims) - used]
            d += len(dims) - used
        elif item is None:
            out.append(V(1))
        elif isinstance(item, bool):
            raise ValueError("an index that is a bool")
        elif isinstance(item, int):
            _take(ax, node, dims[d], item, at)
            d += 1
        elif isinstance(item, list) and len(item) == 1 and type(item[0]) is int:
            first = item[0] % dims[d].n
            out.append(_slice(ax, node, dims[d], slice(first, first + 1), ()))
            d += 1
        elif isinstance(item, slice):
            size = shape[len(out)] if shape is not None and basic else None
            out.append(_slice(ax, node, dims[d], item, at, size))
            d += 1
        else:
            n = _index_dims(item)
            ax.block(dims[d : d + n], node, "indexed by data")
            mask = isinstance(item, fx.Node) and item.meta["val"].dtype == torch.bool
            terms = ax.of(item) if isinstance(item, fx.Node) else [V(len(item))]
            if mask:
                ax.block(terms, node, "a boolean mask picks by data")
                terms = [V(-1)]
            if place is None:
                place = len(out)
            elif looked_up and len(out) != place:
                place = 0
            looked_up.append(terms)
            d += n
    if looked_up:
        out[place:place] = _looked_up(ax, node, looked_up, place, len(out), shape)
    return out


def _looked_up(
    ax: Axes, node: fx.Node, terms: list[Dims], place: int | None, others: int, shape: Sequence[int] | None
) -> Dims:
    if any(t.n == -1 for d in terms for t in d):
        count = 1 if shape is None else len(shape) - others
        return [V(-1 if shape is None else shape[(place or 0) + i]) for i in range(count)]
    rank = max(map(len, terms))
    sizes = [max(d[-i].n for d in terms if len(d) >= i) for i in range(rank, 0, -1)]
    return ax.broadcast(node, terms, sizes)


def _index_dims(item: Any) -> int:
    if item is None or item is ...:
        return 0
    if isinstance(item, fx.Node) and item.meta["val"].dtype == torch.bool:
        return len(item.meta["shape"])
    return 1


def _take(ax: Axes, node: fx.Node, term: Term, position: int, path: tuple[Any, ...]) -> None:
    left, rest = ax.cut(term, position % term.n, node)
    ax.cut(rest, 1, node)
    if position > 0:
        ax.site(node, path, left)


def _slice(ax: Axes, node: fx.Node, term: Term, item: slice, path: tuple[Any, ...], size: int | None = None) -> Term:
    """A run of a dim; ``size`` is the result's, where it is known."""
    if any(isinstance(v, fx.Node) for v in (item.start, item.stop, item.step)):
        ax.block(term, node, "sliced by data")
        if size is None:
            raise ValueError("a slice that depends on data")
        return V(size)
    start, stop, step = item.indices(term.n)
    if step != 1:
        return _strided(ax, node, term, start, stop, step)
    left, rest = ax.cut(term, start, node)
    middle, right = ax.cut(rest, max(0, stop - start), node)
    if path and item.start is not None and item.start != 0:
        ax.site(node, (*path, "start"), left if item.start > 0 else S(middle, right), 1 if item.start > 0 else -1)
    if not path:
        return middle
    if item.stop is not None and item.stop < 0:
        ax.site(node, (*path, "stop"), right, -1)
    elif item.stop is not None and item.stop <= term.n:
        ax.site(node, (*path, "stop"), S(left, middle))
    return middle


def _strided(ax: Axes, node: fx.Node, term: Term, start: int, stop: int, step: int) -> Term:
    """``x[start::step]``: the stride is an inner factor of which one index is taken."""
    if step > 0 and term.n % step == 0 and stop == term.n and start < step:
        outer, inner = V(term.n // step), V(step)
        ax.unify(term, P(outer, inner), node)
        ax.block(inner, node, "a strided slice takes one index in each stride")
        return outer
    ax.block(term, node, "a strided slice")
    return V(len(range(start, stop, step)))
