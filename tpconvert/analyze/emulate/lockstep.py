"""The collectives as functions of the list of all ranks' values, differentiable, each with its own backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from tpconvert.analyze.axes.run import inplace_target


class _Ranks(torch.autograd.Function):
    """A function of all ranks' values with its own backward over all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.rule, ctx.like = backward, values
        return tuple(forward(values))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.rule(grads)


def reduce(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """reduce: sum forward, identity backward."""
    return list(_Ranks.apply(lambda v: [sum(v[1:], v[0]).clone() for _ in v], lambda g: g, *values))  # type: ignore[no-untyped-call]


def copy(values: list[torch.Tensor], span: tuple[int, int, int] | None = None) -> list[torch.Tensor]:
    """copy: identity forward, sum backward (of one range of a dim)."""

    def backward(grads: Any) -> list[torch.Tensor]:
        total = sum(grads[1:], grads[0])
        if span is None:
            return [total for _ in grads]
        out = [g.clone() for g in grads]
        for g in out:
            g.narrow(span[0], span[1], span[2] - span[1]).copy_(total.narrow(span[0], span[1], span[2] - span[1]))
        return out

    return list(_Ranks.apply(lambda v: [x.clone() for x in v], backward, *values))  # type: ignore[no-untyped-call]


def copy_shared(values: list[torch.Tensor], rows: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """copy of a parameter: the gradient of each entry is summed over the ranks that hold it."""

    def backward(grads: Any) -> list[torch.Tensor]:
        total = grads[0].new_zeros(size)
        for g, r in zip(grads, rows, strict=True):
            total.index_add_(0, r.reshape(-1), g.reshape(-1))
        return [total[r] for r in rows]

    return list(_Ranks.apply(lambda v: [x.clone() for x in v], backward, *values))  # type: ignore[no-untyped-call]


def gather(
    values: list[torch.Tensor], indices: list[tuple[int, torch.Tensor, int]], *, summed: bool = False
) -> list[torch.Tensor]:
    """gather: parts joined forward, each rank's own part backward, of its own gradient or of the sum of all."""

    def forward(parts: Any) -> Iterator[torch.Tensor]:
        dim, _, size = indices[0]
        shape = list(parts[0].shape)
        shape[dim] = size
        whole = parts[0].new_zeros(shape)
        for part, (_, index, _) in zip(parts, indices, strict=True):
            whole.index_copy_(dim, index, part)
        return (whole.clone() for _ in parts)

    def backward(grads: Any) -> list[torch.Tensor]:
        grads = [sum(grads[1:], grads[0])] * len(grads) if summed else grads
        return [g.index_select(dim, index) for g, (dim, index, _) in zip(grads, indices, strict=True)]

    return list(_Ranks.apply(forward, backward, *values))  # type: ignore[no-untyped-call]


def scatter(values: list[torch.Tensor], indices: list[tuple[int, torch.Tensor, int]]) -> list[torch.Tensor]:
    """scatter: each rank's own part forward, parts joined backward."""

    def forward(wholes: Any) -> Iterator[torch.Tensor]:
        return (v.index_select(dim, index) for v, (dim, index, _) in zip(wholes, indices, strict=True))

    def backward(grads: Any) -> list[torch.Tensor]:
        dim, _, size = indices[0]
        shape = list(grads[0].shape)
        shape[dim] = size
        whole = grads[0].new_zeros(shape)
        for grad, (_, index, _) in zip(grads, indices, strict=True):
            whole.index_copy_(dim, index, grad)
        return [whole.clone() for _ in grads]

    return list(_Ranks.apply(forward, backward, *values))  # type: ignore[no-untyped-call]


def single(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """single: identity forward; backward the first rank's gradient is its own, the others' are zero."""

    def backward(grads: Any) -> list[torch.Tensor]:
        return [g if r == 0 else torch.zeros_like(g) for r, g in enumerate(grads)]

    return list(_Ranks.apply(lambda v: [x.clone() for x in v], backward, *values))  # type: ignore[no-untyped-call]


def zero_forward(value: torch.Tensor) -> torch.Tensor:
    """once, on the other ranks: zeros forward, identity backward."""
    return value - value.detach()


def all_gather(values: list[torch.Tensor], indices: list[tuple[int, torch.Tensor, int]]) -> list[torch.Tensor]:
    """all_gather: slices joined forward; backward the sum of the gradients, of which each rank takes its slice."""
    return gather(values, indices, summed=True)


def reduce_scatter(values: list[torch.Tensor], indices: list[tuple[int, torch.Tensor, int]]) -> list[torch.Tensor]:
    """reduce_scatter: of the sum each rank takes its slice forward; slices joined backward."""
    return scatter(reduce(values), indices)


def masked_lookup(table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """Rows this rank has, zeros for the others'."""
    place = torch.full((int(rows.max()) + 2,), -1, dtype=torch.long)
    place[rows] = torch.arange(len(rows))
    local = place[ids.clamp(max=len(place) - 1)]
    padding = node.kwargs.get("padding_idx", node.args[2] if len(node.args) > 2 else -1)
    held = local >= 0
    out = torch.nn.functional.embedding(local.clamp(min=0), table)
    if isinstance(padding, int) and padding >= 0:
        out = torch.where((ids == padding)[..., None], out.detach(), out)
    return out * held[..., None]


def whole_gradients(leaves: list[fx.Node], weights: list[tuple[fx.Node, torch.Tensor]]) -> dict[fx.Node, torch.Tensor]:
    """The gradients of the whole model for the same sum of outputs: those the capture's own autograd graph gives."""
    tensors = [node.meta["val"] for node in leaves]
    total: Any = sum((node.meta["val"] * w).sum() for node, w in weights)
    grads = torch.autograd.grad(total, tensors, allow_unused=True, retain_graph=True)
    pairs = zip(zip(leaves, tensors, strict=True), grads, strict=True)
    return {n: g.to_dense() if g is not None else torch.zeros_like(p) for (n, p), g in pairs}


def writable(value: torch.Tensor) -> torch.Tensor:
    """The value in memory of its own, since its op may need what it returned for its gradient; views share theirs."""
    return value if value._base is not None or not value.requires_grad else value.clone()


def writes_leaf(node: fx.Node, value: Callable[[fx.Node], torch.Tensor]) -> bool:
    """Whether an op writes into a parameter, which the forward did without grad."""
    target = inplace_target(node)
    if target is None:
        return False
    written = value(target)
    written = written if written._base is None else written._base
    return written.is_leaf and written.requires_grad
