"""Rules of ops that move values between channels and space, sample, or resize the dim they run along."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from tpconvert.analyze.axes.run import Axes, Dims, product
from tpconvert.analyze.axes.terms import P, V

Bound = dict[str, Any]


def pixel_shuffle(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Channels hold little squares that become space."""
    *batch, channels, height, width = ax.of(a["input"])
    factor = a["factor"]
    out, rows, columns = V(channels.n // factor**2), V(factor), V(factor)
    ax.unify(channels, P(out, rows, columns), node)
    ax.block([rows, columns], node, "pixel_shuffle makes space of it")
    return [*batch, out, P(height, rows), P(width, columns)]


def pixel_unshuffle(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Little squares of space become channels."""
    *batch, channels, height, width = ax.of(a["input"])
    factor = a["factor"]
    tall, wide, rows, columns = V(height.n // factor), V(width.n // factor), V(factor), V(factor)
    ax.unify(height, P(tall, rows), node)
    ax.unify(width, P(wide, columns), node)
    ax.block([rows, columns], node, "pixel_unshuffle makes channels of it")
    return [*batch, P(channels, rows, columns), tall, wide]


def patches(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """im2col and col2im: windows of space beside the channels they are of."""
    dims, shape = ax.of(a["input"]), node.meta["shape"]
    if node.meta["op"] == "im2col":
        ax.block(dims[-2:], node, "im2col slides over space")
        window = V(math.prod(_pair(a["kernel"])))
        return [*dims[:-3], P(dims[-3], window), V(shape[-1])]
    window, channels = V(math.prod(_pair(a["kernel"]))), V(shape[-3])
    ax.unify(dims[-2], P(channels, window), node)
    ax.block([window, dims[-1]], node, "col2im adds windows of space up")
    return [*dims[:-2], channels, V(shape[-2]), V(shape[-1])]


def _pair(size: Any) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def grid_sampler(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Values at places that another tensor gives; channels are carried."""
    dims, grid = ax.of(a["input"]), ax.of(a["grid"])
    ax.unify(dims[0], grid[0], node)
    ax.block([*dims[2:], grid[-1]], node, "grid_sample looks places up in space")
    return [dims[0], dims[1], *grid[1:-1]]


def resized(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """diff and Fourier transforms: dims that are needed whole and may come out in another size."""
    dims = list(ax.of(a["input"]))
    for extra in ("prepend", "append"):
        if isinstance(a.get(extra), fx.Node):
            raise ValueError(f"with {extra}")
    for dim in _transformed(node.meta["op"], a, len(dims)):
        ax.block(dims[dim], node, f"{node.meta['op']} runs along this dim")
        dims[dim] = V(node.meta["shape"][dim])
    return dims


def _transformed(op: str, a: Bound, rank: int) -> list[int]:
    """The dims a transform runs along: one; the last two of ``fft2``; of ``fftn`` all, or the last that have sizes."""
    dim, sizes = a.get("dim"), a.get("n", a.get("s"))
    if dim is None:
        count = 2 if op.endswith("2") else 1 if not op.endswith("fftn") else len(sizes) if sizes else rank
        dim = range(-count, 0)
    return [d % rank for d in ([dim] if isinstance(dim, int) else dim)]


def tensordot(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Some dims of one tensor against some of the other."""
    left, right, over = ax.of(a["input"]), ax.of(a["other"]), a.get("dims", 2)
    pairs = (range(len(left) - over, len(left)), range(over)) if isinstance(over, int) else over
    ours, theirs = ([d % len(dims) for d in ds] for ds, dims in zip(pairs, (left, right), strict=True))
    for i, j in zip(ours, theirs, strict=True):
        ax.unify(left[i], right[j], node)
        ax.contract(left[i], node)
    return [t for i, t in enumerate(left) if i not in ours] + [t for j, t in enumerate(right) if j not in theirs]


def kron(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Every entry of one tensor times the whole of the other."""
    left, right = ax.of(a["input"]), ax.of(a["other"])
    rank = max(len(left), len(right))
    left, right = ([V(1)] * (rank - len(d)) + d for d in (left, right))
    return [product(*(t for t in pair if t.n > 1)) for pair in zip(left, right, strict=True)]


def similarity(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """cosine_similarity: a product over one dim, divided by norms over it."""
    left, right = ax.of(a["input"]), ax.of(a["other"])
    rank = max(len(left), len(right))
    sizes = [max(d[-i].n for d in (left, right) if len(d) >= i) for i in range(rank, 0, -1)]
    dims = ax.broadcast(node, [left, right], sizes)
    dim = a.get("dim", 1) % rank
    for own in (left, right):
        if len(own) >= rank - dim:
            ax.block(own[dim - rank], node, "cosine_similarity takes norms over this dim")
    return dims[:dim] + dims[dim + 1 :]
