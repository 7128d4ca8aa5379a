"""Rules of the ops that contract, reduce, normalise and look up, where a line of ``rules/ops.toml`` cannot say it."""

from __future__ import annotations

from typing import Any

from torch import fx

from tpconvert.analyze.axes.run import Axes, Dims, fresh_dims, nodes_in, where
from tpconvert.analyze.axes.terms import P, V
from tpconvert.analyze.ops.shape import _varargs

Bound = dict[str, Any]


def matmul(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """``input @ other`` with batch dims broadcast and vectors allowed."""
    names = ("other", "input") if node.meta["op"] == "__rmatmul__" else ("input", "other")
    return _matmul(ax, node, *(ax.of(a[n]) for n in names))


def _matmul(ax: Axes, node: fx.Node, left: Dims, right: Dims) -> Dims:
    vector_left, vector_right = len(left) == 1, len(right) == 1
    left = [V(1), *left] if vector_left else left
    right = [*right, V(1)] if vector_right else right
    ax.unify(left[-1], right[-2], node)
    ax.contract(left[-1], node)
    rank = max(len(left), len(right)) - 2
    padded = [[V(1)] * (rank + 2 - len(d)) + d[:-2] for d in (left, right)]
    batch = ax.broadcast(node, padded, [max(x.n, y.n) for x, y in zip(*padded, strict=True)])
    return batch + ([] if vector_left else [left[-2]]) + ([] if vector_right else [right[-1]])


def addmm(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """``input + mat1 @ mat2``."""
    names = ax.names(node)
    out = _matmul(ax, node, ax.of(a[names[1]]), ax.of(a[names[2]]))
    return ax.broadcast(node, [out, ax.of(a["input"])], [t.n for t in out])


def einsum(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """The equation says it all."""
    operands = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
    equation = str(a["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms: dict[str, Any] = {}
    ellipses = []
    for letters, operand in zip(left.split(","), operands, strict=True):
        dims = ax.of(operand)
        if "..." in letters:
            before, after = letters.split("...")
            ellipses.append(dims[len(before) : len(dims) - len(after)])
            letters, dims = before + after, dims[: len(before)] + dims[len(dims) - len(after) :]
        for letter, term in zip(letters, dims, strict=True):
            if letter not in terms or terms[letter].n == 1:
                terms[letter] = term
            elif term.n == terms[letter].n:
                ax.unify(terms[letter], term, node)
    if not arrow:
        right = "..." * bool(ellipses) + "".join(sorted(c for c in terms if left.count(c) == 1))
    for letter, term in terms.items():
        if letter not in right:
            ax.contract(term, node)
    rank = max(map(len, ellipses), default=0)
    sizes = [max(d[-i].n for d in ellipses if len(d) >= i) for i in range(rank, 0, -1)]
    middle = ax.broadcast(node, ellipses, sizes)
    return [t for c in right.replace("...", "@") for t in (middle if c == "@" else [terms[c]])]


def attention(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Scaled dot-product attention: heads are carried, head_dim is summed before the softmax, keys are its width."""
    q, k, v = (ax.of(a[n]) for n in ("query", "key", "value"))
    batch = len(q) - 2
    if a.get("enable_gqa") and q[-3].n != k[-3].n:
        ax.unify(q[-3], P(k[-3], V(q[-3].n // k[-3].n)), node)
        ax.unify(v[-3], k[-3], node)
        batch -= 1
    for other in (k, v):
        for x, y in zip(q[:batch], other[:batch], strict=False):
            if x.n == y.n:
                ax.unify(x, y, node)
    ax.unify(q[-1], k[-1], node)
    ax.unify(k[-2], v[-2], node)
    ax.block(q[-1], node, "attention sums over head_dim before its softmax")
    ax.block(k[-2], node, "attention's softmax runs over the keys")
    if a.get("is_causal"):
        ax.block(q[-2], node, "causal attention depends on the place in this dim")
    mask = a.get("attn_mask")
    if isinstance(mask, fx.Node):
        scores = [*q[:-1], k[-2]]
        ax.broadcast(node, [scores, ax.of(mask)], [t.n for t in scores])
    return [*q[:-1], v[-1]]


def embedding(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Rows looked up: where the rows are cut, the others' rows are zero and the result is partial."""
    table = ax.of(a["input"])
    for option in ("sparse", "scale_grad_by_freq"):
        if a.get(option):
            ax.block(table[0], node, f"embedding: its gradient with {option}=True needs all words on one rank")
    if a.get("scale_grad_by_freq"):
        ax.block(ax.of(a["indices"]), node, "embedding: scale_grad_by_freq=True counts all uses of a word")
    ax.contract(table[0], node)
    ax.lookups.add(node)
    return ax.of(a["indices"]) + table[1:]


def embedding_bag(ax: Axes, node: fx.Node, a: Bound) -> list[Dims]:
    """Sums, means or maxima of rows looked up by data."""
    table = ax.of(a["weight"])
    others = [n for n in nodes_in((node.args, node.kwargs)) if n is not a["weight"]]
    ax.block([table[0], *(t for n in others for t in ax.of(n))], node, "embedding_bag: looked up by data")
    if any(n.meta["val"].is_floating_point() for n in others):
        ax.block(table[1], node, "embedding_bag: the gradient of its weights is a sum over this dim")
    return [[d[0], table[1]] if len(d) == 2 else d for d in fresh_dims(node)]


def grouped_mm(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """A matrix for each group of rows."""
    x, w = ax.of(a["input"]), ax.of(a["other"])
    ax.unify(x[-1], w[-2], node)
    ax.contract(w[-2], node)
    ax.block([x[0], *w[:-2]], node, "rows are dealt to experts by data")
    ax.grains += [(w[-1], 8, node), (w[-2], 8, node)]  # its rows must start at multiples of 16 bytes, in bf16 too
    return [*x[:-1], w[-1]]


def convolution(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Channels are contracted within each group; space is not cut."""
    x, w = ax.of(a["input"]), ax.of(a["weight"])
    transposed = "transpose" in node.meta["op"]
    space = len(w) - 2
    channel = len(x) - 1 - space
    groups = a.get("groups", 1)
    out = V(node.meta["shape"][channel])
    if groups == 1:
        ax.unify(x[channel], w[0 if transposed else 1], node)
        ax.contract(x[channel], node)
        ax.unify(out, w[1 if transposed else 0], node)
    else:
        group, inner, outer = V(groups), V(x[channel].n // groups), V(out.n // groups)
        ax.unify(x[channel], P(group, inner), node)
        ax.unify(out, P(group, outer), node)
        ax.unify(w[0], P(group, inner if transposed else outer), node)
        ax.unify(w[1], outer if transposed else inner, node)
        ax.contract(inner, node)
        ax.site(node, where(node, ax.names(node), "groups"), group)
    if isinstance(a.get("bias"), fx.Node):
        ax.unify(ax.of(a["bias"])[0], out, node)
    ax.block([*x[channel + 1 :], *w[2:]], node, "convolution over space")
    return [*x[:channel], out, *(V(n) for n in node.meta["shape"][channel + 1 :])]


def layer_norm(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Statistics over the last dims."""
    dims = ax.of(a["input"])
    tail = dims[len(dims) - len(a["normalized_shape"]) :]
    ax.block(tail, node, f"{node.meta['op']} takes its statistics over this dim")
    for name in ("weight", "bias"):
        if isinstance(a.get(name), fx.Node):
            for t, u in zip(tail, ax.of(a[name]), strict=True):
                ax.unify(t, u, node)
    return dims


def batch_norm(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Statistics of each channel over everything else, in training if not here."""
    dims = ax.of(a["input"])
    ax.block([t for i, t in enumerate(dims) if i != 1], node, "statistics over this dim")
    for operand in nodes_in((node.args[1:], node.kwargs)):
        if len(ax.of(operand)) == 1 and operand is not a["input"]:
            ax.unify(dims[1], ax.of(operand)[0], node)
    return dims


def group_norm(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Statistics within each group of channels."""
    dims = ax.of(a["input"])
    group, inner = V(a["num_groups"]), V(dims[1].n // a["num_groups"])
    ax.unify(dims[1], P(group, inner), node)
    ax.site(node, where(node, ax.names(node), "num_groups"), group)
    ax.block([inner, *dims[2:]], node, "group_norm takes its statistics over this dim")
    for name in ("weight", "bias"):
        if isinstance(a.get(name), fx.Node):
            ax.unify(dims[1], ax.of(a[name])[0], node)
    return dims


def sum_over(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """A sum is partial where its dim is cut."""
    dims, over, keep = _over(ax, node, a)
    for i in over:
        ax.contract(dims[i], node)
    return [V(1) if i in over else t for i, t in enumerate(dims) if keep or i not in over]


def mean_over(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """A mean is a sum that each rank divides by the whole count."""
    dims, over, _ = _over(ax, node, a)
    ax.means[node] = [dims[i] for i in over]
    return sum_over(ax, node, a)


def reduce_over(ax: Axes, node: fx.Node, a: Bound) -> Any:
    """mean, max, var, ...: needs all of its dim."""
    if node.meta["op"] in ("max", "min") and isinstance(a.get("dim"), fx.Node):
        return ax.broadcast(node, [ax.of(a["input"]), ax.of(a["dim"])], node.meta["shape"])
    dims, over, keep = _over(ax, node, a)
    ax.block([dims[i] for i in over], node, f"{node.meta['op']} over this dim needs the other ranks' values")
    out = [V(1) if i in over else t for i, t in enumerate(dims) if keep or i not in over]
    fresh = fresh_dims(node)
    return [out for _ in fresh] if fresh and isinstance(fresh[0], list) else out


def _over(ax: Axes, node: fx.Node, a: Bound) -> tuple[Dims, list[int], bool]:
    dims = ax.of(a["input"])
    dim = a.get("dim")
    over = range(len(dims)) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return dims, [d % len(dims) for d in over] if dims else [], bool(a.get("keepdim", False))


def along(ax: Axes, node: fx.Node, a: Bound) -> Any:
    """softmax, cumsum, flip, roll, ...: the dim it runs along stays whole."""
    dims = list(ax.of(a["input"]))
    if node.meta["op"] == "flip":
        over = _varargs(node, 1, "dims")
    else:
        dim = a.get("dim", a.get("dims", -1 if node.meta["op"] == "argsort" else None))
        over = range(len(dims)) if dim is None else [dim] if isinstance(dim, int) else dim
    ax.block([dims[i] for i in over], node, f"{node.meta['op']} runs along this dim")
    return dims


def ordered(ax: Axes, node: fx.Node, a: Bound) -> Any:
    """sort and topk: values and indices."""
    dims = list(ax.of(a["input"]))
    op = node.meta["op"]
    dim = a.get("dim", 0 if op == "msort" else -1)
    ax.block(dims[dim], node, f"{op} runs along this dim")
    if op == "msort":
        return dims
    if op == "kthvalue":
        rest = dims[: dim % len(dims)] + [V(1)] * bool(a.get("keepdim")) + dims[dim % len(dims) + 1 :]
        return [rest, rest]
    size = fresh_dims(node)[0][dim].n
    if size != dims[dim].n:
        dims[dim] = V(size)
    return [dims, dims]


def triangle(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """tril, triu: the place in the matrix matters."""
    dims = ax.of(a["input"])
    ax.block(dims[-2:], node, f"{node.meta['op']} depends on the place in this dim")
    return dims


def gather(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Looked up along one dim; the others meet where they have one size."""
    dims, wanted = ax.of(a["input"]), ax.of(a["index"])
    if a.get("dim") is None:
        raise ValueError("no dim")
    dim = a["dim"] % len(dims)
    for i in range(len(dims)):
        if i != dim and dims[i].n == wanted[i].n:
            ax.unify(dims[i], wanted[i], node)
        else:
            ax.block([dims[i], wanted[i]], node, f"{node.meta['op']}: looked up by data")
    if node.meta["op"] == "take_along_dim":  # either may be broadcast
        return [d if i != dim and w.n == 1 else w for i, (d, w) in enumerate(zip(dims, wanted, strict=True))]
    return list(wanted)


def index_select(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Rows picked by data."""
    dims = list(ax.of(a["input"]))
    ax.block(dims[a["dim"]], node, "index_select: looked up by data")
    dims[a["dim"]] = ax.of(a["index"])[0] if ax.of(a["index"]) else V(1)
    return dims


def scatter(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """index_add, scatter and their like write along one dim by data."""
    dims = ax.of(a["input"])
    dim = a["dim"] % len(dims)
    ax.block(dims[dim], node, f"{node.meta['op']}: written by data")
    for name in ("index", "source"):
        operand = a.get(name)
        if not isinstance(operand, fx.Node):
            continue
        if len(ax.of(operand)) != len(dims):
            ax.block(ax.of(operand), node, f"{node.meta['op']}: places to write to")
            continue
        for i, (t, u) in enumerate(zip(dims, ax.of(operand), strict=True)):
            if i != dim and t.n == u.n:
                ax.unify(t, u, node)
            else:
                ax.block([t, u], node, f"{node.meta['op']}: written by data")
    return dims


def pooling(ax: Axes, node: fx.Node, a: Bound) -> Any:
    """Pooling and interpolation: channels are carried, space is not cut."""
    dims = ax.of(a["input"])
    space = next((int(c) for c in node.meta["op"] if c.isdigit()), len(dims) - 2)
    carried = len(dims) - space
    ax.block(dims[carried:], node, f"{node.meta['op']} over space")
    if isinstance(a.get("index"), fx.Node):  # places within each channel
        for mine, theirs in zip(dims, ax.of(a["index"]), strict=True):
            ax.unify(mine, theirs, node)
    out = fresh_dims(node)
    many = bool(out) and isinstance(out[0], list)
    new = [[*dims[:carried], *o[carried:]] for o in (out if many else [out])]
    return new if many else new[0]


def prelu(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """A slope for each channel, which is dim 1."""
    dims, slopes = ax.of(a["input"]), ax.of(a["weight"])
    if slopes and slopes[0].n > 1:
        ax.unify(dims[1], slopes[0], node)
    return dims


def weight_norm(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """A direction and a length for each index of one dim."""
    dims, lengths, dim = ax.of(a["v"]), ax.of(a["g"]), a.get("dim", 0)
    ax.unify(dims[dim], lengths[dim], node)
    ax.block([t for i, t in enumerate(dims) if i != dim], node, "_weight_norm takes the norm over this dim")
    return dims


def among(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """isin, bucketize, searchsorted: each value is held against all of the others."""
    values, others = ax.of(a["input"]), ax.of(a["other"])
    if node.meta["op"] == "searchsorted" and len(others) > 1:
        for t, u in zip(values[:-1], others[:-1], strict=True):
            ax.unify(t, u, node)
        others = others[-1:]
    ax.block(others, node, f"{node.meta['op']} looks at all of this dim")
    return values


def one_hot(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """A new last dim, one place of it by data."""
    new = V(node.meta["shape"][-1])
    ax.block(new, node, "one_hot writes by data")
    return [*ax.of(a["input"]), new]


def outer(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """All pairs."""
    return ax.of(a["input"]) + ax.of(a["other"])


def unfold(ax: Axes, node: fx.Node, a: Bound) -> Dims:
    """Sliding windows over one dim."""
    dims = list(ax.of(a["input"]))
    dim = a["dim"] % len(dims)
    ax.block(dims[dim], node, "unfold slides along this dim")
    return [*dims[:dim], V(node.meta["shape"][dim]), *dims[dim + 1 :], V(node.meta["shape"][-1])]


def factory(ax: Axes, node: fx.Node, a: Bound) -> Any:
    """zeros, arange, ...: new dims, whose integer sizes are sites."""
    out = fresh_dims(node)
    ax.factories.add(node)
    first = 1 if node.meta["op"].startswith("new_") else 0
    if node.meta["op"] in SIZED:
        values = _varargs(node, first, "size")
        nested = len(node.args) > first and isinstance(node.args[first], tuple | list)
        for i, (size, term) in enumerate(zip(values, out, strict=False)):
            if isinstance(size, int):
                ax.site(
                    node, (1, "size", i) if "size" in node.kwargs else (0, first, i) if nested else (0, first + i), term
                )
    return out


SIZED = frozenset(["zeros", "ones", "empty", "full", "rand", "randn", "new_zeros", "new_ones", "new_empty", "new_full"])
UNIFORM = frozenset(
    [
        "zeros",
        "ones",
        "empty",
        "full",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
    ]
)
"""Factories whose values do not depend on the place."""
EXPANDING = frozenset(["expand", "broadcast_to", "repeat", "tile", "repeat_interleave"])
"""Ops that repeat values along a new dim or factor."""
