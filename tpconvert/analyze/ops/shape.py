"""Rules of the ops that move, split and join dims.  They are linear, and most carry integer sizes (sites)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tpconvert.analyze.axes.run import Axes, Dims, product, tensors, where
from tpconvert.analyze.axes.terms import P, S, V

Bound = dict[str, Any]


def reshape(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """view, reshape, flatten, squeeze: refine dims into factors, or join factors into dims."""
    if any(isinstance(v, torch.dtype) for v in node.args):
        raise ValueError("a view as another dtype")
    out = regroup(ax, node, ax.of(a["input"]), node.meta["shape"])
    op = node.meta["op"]
    if op == "squeeze":  # a rank that holds one index would lose the dim
        dims = ax.of(a["input"])
        asked = _varargs(node, 1, "dim")
        ax.block([dims[i] for i in asked] if asked else dims, node, "squeeze drops a dim that comes down to one index")
    if op in ("view_as", "reshape_as"):
        for t, u in zip(out, ax.of(a["other"]), strict=True):
            ax.unify(t, u, node)
    if op in ("view", "reshape", "_unsafe_view", "view_"):
        for path, size, term in zip(*_sizes(node, 1, "shape", "size"), out, strict=False):
            if size != -1:
                ax.site(node, path, term)
    return out


def unflatten(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """One dim into several."""
    out = regroup(ax, node, ax.of(a["input"]), node.meta["shape"])
    dim = a["dim"] % len(ax.of(a["input"]))
    for i, size in enumerate(a["sizes"]):
        if size != -1:
            ax.site(node, (*where(node, ("input", "dim", "sizes"), "sizes"), i), out[dim + i])
    return out


def regroup(ax: Axes, node: fx.Node, dims: Dims, shape: Sequence[int]) -> Dims:
    """Align the products of the old and the new dims from the left, and unify group by group."""
    out: Dims = [V(n) for n in shape]
    if 0 in shape:
        return out
    old, new = [t for t in dims if t.n != 1], [i for i, n in enumerate(shape) if n != 1]
    i = j = 0
    while i < len(old):
        left, right = [old[i]], [new[j]]
        size_left, size_right = old[i].n, shape[new[j]]
        i, j = i + 1, j + 1
        while size_left != size_right:
            if size_left < size_right:
                left.append(old[i])
                size_left *= old[i].n
                i += 1
            else:
                right.append(new[j])
                size_right *= shape[new[j]]
                j += 1
        if len(left) == len(right) == 1:
            out[right[0]] = left[0]
        else:
            ax.unify(product(*left), product(*(out[k] for k in right)), node)
    return out


def transpose(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Two dims change places."""
    dims = list(ax.of(a["input"]))
    i, j = a["dim0"], a["dim1"]
    dims[i], dims[j] = dims[j], dims[i]
    return dims


def matrix_transpose(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """``.T``, ``.mT``, ``t()``."""
    dims = ax.of(a["input"])
    return dims[::-1] if node.meta["op"] in (".T", "t", "numpy_T") else [*dims[:-2], dims[-1], dims[-2]]


def permute(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Dims in another order."""
    order = _varargs(node, 1, "dims")
    return [ax.of(a["input"])[i] for i in order]


def movedim(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Some dims to other places, the rest in order."""
    dims = ax.of(a["input"])
    source, target = ([v % len(dims) for v in _as_list(a[k])] for k in ("source", "destination"))
    rest = iter(d for i, d in enumerate(dims) if i not in source)
    return [dims[source[target.index(i)]] if i in target else next(rest) for i in range(len(dims))]


def expand(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Dims of one index become whole new dims."""
    shape = node.meta["shape"]
    dims = ax.of(a["input"])
    dims = [V(1)] * (len(shape) - len(dims)) + dims
    out = [t if t.n == n and n != 1 else V(n) for t, n in zip(dims, shape, strict=True)]
    if node.meta["op"] in ("expand", "broadcast_to"):
        for path, size, term in zip(*_sizes(node, 1, "sizes", "size"), out, strict=False):
            if size not in (-1, 1):
                ax.site(node, path, term)
    return out


def expand_as(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """As ``expand``, to the dims of another tensor, which the new dims are."""
    return ax.broadcast(node, [ax.of(a["input"]), ax.of(a["other"])], node.meta["shape"])


def repeat(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """The whole dim again and again: the number of times is an outer factor."""
    shape = node.meta["shape"]
    dims = ax.of(a["input"])
    dims = [V(1)] * (len(shape) - len(dims)) + dims
    out = []
    paths, counts = _sizes(node, 1, "repeats", "dims")
    few = len(dims) - len(counts)  # tile may name the last dims only
    for path, times, term in zip([()] * few + paths, [1] * few + counts, dims, strict=True):
        if isinstance(times, fx.Node):
            out.append(V(shape[len(out)]))
            ax.block([term, out[-1]], node, "repeat: counted by data")
            continue
        if times == 1:
            out.append(term)
            continue
        factor = V(times)
        ax.site(node, path, factor)
        out.append(factor if term.n == 1 else P(factor, term))
    return out


def repeat_interleave(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Each index again and again: the number of times is an inner factor."""
    times, dim = a.get("repeats"), a.get("dim")
    if not isinstance(times, int) or dim is None:
        raise ValueError("repeats that depend on data")
    dims = list(ax.of(a["input"]))
    if times > 1:
        factor = V(times)
        ax.site(node, where(node, ("input", "repeats", "dim"), "repeats"), factor)
        dims[dim] = P(dims[dim], factor) if dims[dim].n > 1 else factor
    if a.get("output_size") is not None:
        ax.site(node, (1, "output_size"), dims[dim])
    return dims


def split(ax: Axes, node: fx.Node, a: Bound) -> list[Dims]:
    """A dim falls into segments."""
    dims = ax.of(a["input"])
    dim = a.get("dim", 0) % len(dims)
    ax.splits[node] = dim
    rest, out = dims[dim], []
    for tensor in tensors(node.meta["val"]):
        part, rest = ax.cut(rest, tensor.shape[dim], node)
        out.append([*dims[:dim], part, *dims[dim + 1 :]])
    if node.meta["op"] in ("split", "split_with_sizes", "unsafe_split"):
        path = where(node, ax.names(node), "sizes") if "sizes" in a else ()
        if isinstance(a.get("sizes"), int):
            ax.site(node, path, out[0][dim])
        for i, _ in enumerate(a["sizes"] if isinstance(a.get("sizes"), tuple | list) else ()):
            ax.site(node, (*path, i), out[i][dim])
    return out


def unbind(ax: Axes, node: fx.Node, a: Bound) -> list[Dims]:
    """Each index of a dim by itself."""
    dims = ax.of(a["input"])
    dim = a.get("dim", 0) % len(dims)
    if dims[dim].n > 64:
        ax.block(dims[dim], node, "unbind: one by one over many indices")
    else:
        rest = dims[dim]
        for _ in range(dims[dim].n):
            _, rest = ax.cut(rest, 1, node)
    return [[*dims[:dim], *dims[dim + 1 :]] for _ in range(dims[dim].n)]


def cat(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Segments become a dim; the other dims meet."""
    operands = [ax.of(t) for t in a["tensors"]]
    operands = [d for d in operands if not (len(d) == 1 and d[0].n == 0)]
    dim = a.get("dim", 0) % len(node.meta["shape"])
    out = []
    for i in range(len(node.meta["shape"])):
        if i == dim:
            out.append(S(*(d[i] for d in operands)))
            continue
        for other in operands[1:]:
            ax.unify(operands[0][i], other[i], node)
        out.append(operands[0][i])
    return out


def stack(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """A new dim with a segment of one index for each operand."""
    operands = [ax.of(t) for t in a["tensors"]]
    out = ax.broadcast(node, operands, [t.n for t in operands[0]])
    dim = a.get("dim", 0) % (len(out) + 1)
    return [*out[:dim], S(*(V(1) for _ in operands)), *out[dim:]]


def pad(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Whole segments before and after; negative padding cuts segments off."""
    dims = list(ax.of(a["input"]))
    widths = a["pad"]
    for j in range(len(widths) // 2):
        left, right = widths[2 * j], widths[2 * j + 1]
        i = len(dims) - 1 - j
        if any(isinstance(width, fx.Node) for width in (left, right)):
            ax.block(dims[i], node, "pad: counted by data")
            dims[i] = V(node.meta["shape"][i])
            continue
        if not left and not right:
            continue
        if a.get("mode", "constant") != "constant":
            ax.block(dims[i], node, f"pad {a['mode']} reads the edge of the dim")
            dims[i] = V(dims[i].n + left + right)
            continue
        term = dims[i]
        path = where(node, ("input", "pad"), "pad")
        if left < 0:
            off, term = ax.cut(term, -left, node)
            ax.site(node, (*path, 2 * j), off, -1)
        if right < 0:
            term, off = ax.cut(term, term.n + right, node)
            ax.site(node, (*path, 2 * j + 1), off, -1)
        dims[i] = S(V(max(left, 0)), term, V(max(right, 0)))
    return dims


def constant_pad(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """``pad`` in constant mode."""
    return pad(ax, node, a)


def glu(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Two halves of a dim meet."""
    dims = list(ax.of(a["input"]))
    dim = a.get("dim", -1)
    left, right = ax.cut(dims[dim], dims[dim].n // 2, node)
    ax.unify(left, right, node)
    dims[dim] = left
    return dims


def meshgrid(ax: Axes, node: fx.Node, a: Bound) -> list[Dims]:
    """A dim for each operand."""
    operands = node.args[0] if isinstance(node.args[0], tuple | list) else node.args
    dims = [ax.of(t)[0] if ax.of(t) else V(1) for t in operands]
    if node.kwargs.get("indexing", "ij") == "xy":
        dims[:2] = dims[1::-1]
    return [dims for _ in operands]


def view_as_complex(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """The last dim of two becomes the number."""
    ax.block(ax.of(a["input"])[-1], node, "the two parts of a complex number")
    return ax.of(a["input"])[:-1]


def view_as_real(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """The number becomes a last dim of two."""
    return [*ax.of(a["input"]), V(2)]


def _as_list(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _varargs(node: fx.Node, first: int, *names: str) -> list[Any]:
    """The integers of ``f(x, 1, 2, 3)`` or ``f(x, (1, 2, 3))`` or ``f(x, dims=(1, 2, 3))``."""
    for name in names:
        if name in node.kwargs:
            return _as_list(node.kwargs[name])
    rest = node.args[first:]
    return list(rest[0]) if rest and isinstance(rest[0], tuple | list) else list(rest)


def _sizes(node: fx.Node, first: int, *names: str) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Paths and values of those integers."""
    values = _varargs(node, first, *names)
    for name in names:
        if name in node.kwargs:
            return [(1, name, i) for i in range(len(values))], values
    nested = len(node.args) > first and isinstance(node.args[first], tuple | list)
    return [(0, first, i) if nested else (0, first + i) for i in range(len(values))], values
