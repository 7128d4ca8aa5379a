"""All communication: each collective with its forward and its backward.

None writes into a tensor that autograd owns.  At degree 1 each returns its argument, on a dry mesh each only changes
the shape.  Eager code calls c10d; code being compiled uses functional collectives, which can be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from tpconvert.errors import PlanError
from tpconvert.parallel.comm.mesh import Mesh, Ranks, dense, joined_shape, one_run, shaped, slice_shape
from tpconvert.parallel.comm.peers import gather_into, scatter_into
from tpconvert.spec.layout import Block, Layout, Piece

Rows = tuple[tuple[Ranks, tuple[Piece, ...]], ...]
"""The ranks that hold the same rows -> which local rows."""
Way = Callable[..., Tensor]
"""One direction of a collective, on values."""


@dataclass(frozen=True)
class Parts:
    """How one dim is dealt to the ranks of a mesh, worked out once."""

    dim: int
    size: int
    pieces: tuple[Piece, ...]
    """Of the whole dim, what this rank holds."""
    sizes: tuple[int, ...]
    """What each rank holds."""
    runs: tuple[tuple[int, int, int], ...]
    """The whole dim in order: ``(rank, start, stop)`` in that rank's part."""
    shared: Rows
    """The ranks that hold some of this rank's rows too -> which local rows."""


def parts_of(dim: int, blocks: Sequence[Block], mesh: Mesh) -> Parts:
    """The parts of a dim that is dealt as ``blocks``."""
    made = _parts if torch.compiler.is_compiling() else _known_parts
    return made(Layout(dim, tuple(blocks)), mesh.rank, mesh.degree)


def _parts(layout: Layout, rank: int, degree: int) -> Parts:
    shared: dict[Ranks, list[Piece]] = {}
    for piece, ranks in layout.shared(rank, degree):
        shared.setdefault(ranks, []).append(piece)
    assert layout.dim is not None
    return Parts(
        dim=layout.dim,
        size=sum(b.size for b in layout.blocks),
        pieces=tuple(layout.pieces(rank, degree)),
        sizes=tuple(layout.local_size(r, degree) for r in range(degree)),
        runs=tuple(_runs(layout, degree)),
        shared=tuple((ranks, tuple(pieces)) for ranks, pieces in shared.items()),
    )


_known_parts = lru_cache(64)(_parts)  # a loss asks for the same ones in each step


def _runs(layout: Layout, degree: int) -> list[tuple[int, int, int]]:
    """Who to ask for each part of the whole dim; of several holders, the first."""
    held = []
    for rank in range(degree):
        at = 0
        for start, stop in layout.pieces(rank, degree):
            held.append((start, stop, rank, at))
            at += stop - start
    runs: list[tuple[int, int, int]] = []
    done = 0
    for start, stop, rank, at in sorted(held):
        if stop > done:
            runs.append((rank, at + done - start, at + stop - start))
            done = stop
    return runs


# -- with gradients -------------------------------------------------------------------------------------------


def copy(x: Tensor, mesh: Mesh) -> Tensor:
    """copy: identity forward, sum backward.

    The result is a view of ``x``, so autograd refuses to write into it: whoever else holds ``x`` would be changed too.
    """
    return _collective(x, _view, summed, (mesh,)) if _differentiates(x, mesh) else x


def copy_own(x: Tensor, mesh: Mesh) -> Tensor:
    """copy of a value that nobody else holds, so it may be written into: identity forward, sum backward."""
    return _collective(x, _own, summed, (mesh,)) if _differentiates(x, mesh) else x


def copy_span(x: Tensor, dim: int, span: Piece, mesh: Mesh) -> Tensor:
    """copy of a range of ``dim``: identity forward; backward sums that range and leaves the rest alone."""
    rows = ((tuple(range(mesh.degree)), (span,)),)
    return _collective(x, _view, _sum_rows, (dim, rows, mesh)) if _differentiates(x, mesh) else x


def copy_shared(x: Tensor, parts: Parts, mesh: Mesh) -> Tensor:
    """copy of a cut tensor: identity forward; backward sums each run of rows over the ranks that hold it."""
    if not parts.shared or not _differentiates(x, mesh):
        return x
    return _collective(x, _view, _sum_rows, (parts.dim, parts.shared, mesh))


def reduce(x: Tensor, mesh: Mesh) -> Tensor:
    """reduce: sum forward, identity backward."""
    return x if mesh.degree == 1 or mesh.dry else _collective(x, returned_sum, _same, (mesh,))


def gather(x: Tensor, parts: Parts, mesh: Mesh) -> Tensor:
    """gather: parts joined along ``parts.dim`` forward, this rank's part backward."""
    if mesh.degree == 1:
        return x
    if x.shape[parts.dim] == parts.sizes[mesh.rank]:
        return _collective(x, joined, _dealt, (parts, mesh))
    dim, folded, inner = _folded(x, parts, parts.sizes[mesh.rank])
    return _collective(folded, joined, _dealt, (inner, mesh)).flatten(dim, dim + 1)


def scatter(x: Tensor, parts: Parts, mesh: Mesh) -> Tensor:
    """scatter: this rank's part along ``parts.dim`` forward, parts joined backward."""
    if mesh.degree == 1:
        return x
    if x.shape[parts.dim] == parts.size:
        return _collective(x, _dealt, joined, (parts, mesh))
    dim, folded, inner = _folded(x, parts, parts.size)
    return _collective(folded, _dealt, joined, (inner, mesh)).flatten(dim, dim + 1)


def single(x: Tensor, mesh: Mesh) -> Tensor:
    """single: identity forward; backward the gradient counts on rank 0 alone, being the same on all."""
    return _collective(x, _view, _first, (mesh,)) if _differentiates(x, mesh) else x


def all_gather(x: Tensor, dim: int, mesh: Mesh, rows: bool = False) -> Tensor:
    """all_gather: slices joined along ``dim`` forward; sum backward, of which this rank takes its slice."""
    return x if mesh.degree == 1 else _collective(x, joined_slices, summed_slice, (dim, mesh, rows))


def reduce_scatter(x: Tensor, dim: int, mesh: Mesh, rows: bool = False) -> Tensor:
    """reduce_scatter: sum forward, of which this rank takes its slice; slices joined backward."""
    return x if mesh.degree == 1 else _collective(x, summed_slice, joined_slices, (dim, mesh, rows))


def gather_slices(x: Tensor, dim: int, mesh: Mesh, rows: bool = False) -> Tensor:
    """gather of slices: joined along ``dim`` forward, this rank's slice backward."""
    return x if mesh.degree == 1 else _collective(x, joined_slices, own_slice, (dim, mesh, rows))


def scatter_slices(x: Tensor, dim: int, mesh: Mesh, rows: bool = False) -> Tensor:
    """scatter into slices: this rank's slice along ``dim`` forward, slices joined backward."""
    return x if mesh.degree == 1 else _collective(x, own_slice, joined_slices, (dim, mesh, rows))


def _folded(x: Tensor, parts: Parts, period: int) -> tuple[int, Tensor, Parts]:
    """A dim that repeats the one dealt (heads, again for each row of a batch), with the repetitions a dim before it."""
    dim = parts.dim % x.dim()
    if not period or x.shape[dim] % period:
        raise PlanError(
            f"A dim of {x.shape[dim]} is no multiple of the {period} that the plan deals.", hint="Plan again."
        )
    return dim, x.unflatten(dim, (-1, period)), replace(parts, dim=dim + 1)


def once(x: Tensor, mesh: Mesh) -> Tensor:
    """once: the value on rank 0 and zeros on the others forward, identity backward."""
    return x if mesh.rank == 0 or mesh.dry else _collective(x, torch.zeros_like, _same, ())


def _collective(x: Tensor, there: Way, back: Way, given: tuple[Any, ...]) -> Tensor:
    """``there(x, *given)``, whose backward is ``back(grad, *given)`` and can be differentiated in turn."""
    if transformed():
        return _Transformed.apply(x, there, back, given)
    return _Collective.apply(x, (there, back, given)) if torch.is_grad_enabled() else there(x, *given)


def transformed() -> bool:
    """Whether torch.compile or torch.func looks at what is being computed, rather than autograd alone."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


class _Collective(torch.autograd.Function):
    """What autograd alone needs; all but the tensor in one argument, since torch looks at each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ways: tuple[Way, Way, tuple[Any, ...]]) -> Tensor:
        ctx.ways = ways
        there, _, given = ways
        return there(x, *given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        there, back, given = ctx.ways
        if torch.is_grad_enabled():
            return _collective(grad, back, there, given), None
        return back(grad, *given), None


class _Transformed(torch.autograd.Function):
    """The same for torch.func and torch.compile; torch looks at the signature of such a one at every call."""

    @staticmethod
    def forward(x: Tensor, there: Way, back: Way, given: tuple[Any, ...]) -> Tensor:  # no *given: it does not compile
        return there(x, *given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.there, ctx.back, ctx.given = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _collective(grad, ctx.back, ctx.there, ctx.given), None, None, None
        return ctx.back(grad, *ctx.given), None, None, None


def _same(x: Tensor, *_: Any) -> Tensor:
    return x


def _view(x: Tensor, *_: Any) -> Tensor:
    return x.view_as(x)


def _own(x: Tensor, *_: Any) -> Tensor:
    return x.detach()


def _first(x: Tensor, mesh: Mesh) -> Tensor:
    return x if mesh.rank == 0 else torch.zeros_like(x)


def _sum_rows(x: Tensor, dim: int, rows: Rows, mesh: Mesh) -> Tensor:
    out = x.clone()
    for ranks, pieces in rows:
        total = _all_reduce(take(x, dim, pieces), "sum", mesh.subgroup(ranks))
        at = 0
        for start, stop in pieces:
            out.narrow(dim, start, stop - start).copy_(total.narrow(dim, at, stop - start))
            at += stop - start
    return out


def _dealt(x: Tensor, parts: Parts, mesh: Mesh) -> Tensor:
    return take(x, parts.dim, parts.pieces)


def _differentiates(x: Tensor, mesh: Mesh) -> bool:
    return mesh.degree > 1 and not mesh.dry and torch.is_grad_enabled() and x.requires_grad


# -- without gradients ----------------------------------------------------------------------------------------


def take(x: Tensor, dim: int, pieces: Sequence[Piece]) -> Tensor:
    """A new tensor of the given ranges of ``dim``, one after the other."""
    slices = [x.narrow(dim, start, stop - start) for start, stop in pieces]
    if len(slices) == 1:
        return slices[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(slices, dim) if slices else x.narrow(dim, 0, 0).clone()


def summed(x: Tensor, mesh: Mesh) -> Tensor:
    """A new tensor: the sum over tp ranks."""
    if mesh.group is None:
        return x
    return mesh.peers.exchange(x, "sum") if copies(x, mesh) else _all_reduce(x, "sum", mesh.group)


def returned_sum(x: Tensor, mesh: Mesh) -> Tensor:
    """The same for a function of autograd to return: torch 2.11's backend ``eager`` loses a collective's gradient."""
    return shaped(summed(x, mesh), x.shape) if torch.compiler.is_compiling() else summed(x, mesh)


def summed_own(x: Tensor, mesh: Mesh) -> Tensor:
    """The sum over tp ranks of a value that nobody else holds: in eager code where it is, unless GPUs copy."""
    if mesh.group is None or torch.compiler.is_compiling() or _len_torch_dispatch_stack() or copies(x, mesh):
        return returned_sum(x, mesh)  # a dispatch mode holds it: selective checkpointing keeps products
    x = x.contiguous()
    dist.all_reduce(x, dist.ReduceOp.SUM, mesh.group)
    return x


def largest(x: Tensor, mesh: Mesh) -> Tensor:
    """A new tensor: the elementwise maximum over tp ranks."""
    return x if mesh.group is None else _all_reduce(x, "max", mesh.group)


def every(x: Tensor, mesh: Mesh) -> Tensor:
    """A new tensor: what each rank has, along a new first dim."""
    return x.unsqueeze(0) if mesh.group is None else _all_gather(x.contiguous().unsqueeze(0), mesh)


def averaged_over_dp(x: Tensor, mesh: Mesh) -> Tensor:
    """A new tensor: the mean over dp ranks."""
    return x if mesh.dp_group is None else _all_reduce(x, "sum", mesh.dp_group) / mesh.dp_degree


def joined(x: Tensor, parts: Parts, mesh: Mesh) -> Tensor:
    """A new tensor: the ranks' parts put together along ``parts.dim``."""
    dim = parts.dim % x.dim()
    if mesh.group is None:
        return _over_again(x, dim, parts.size)
    most = max(parts.sizes)
    rows = x.movedim(dim, 0).contiguous()
    if len(rows) < most:  # all-gather takes equal parts only
        rows = torch.cat([rows, rows.new_zeros([most - len(rows), *rows.shape[1:]])])
    every = _all_gather(rows, mesh)
    if parts.runs != tuple((r, 0, most) for r in range(mesh.degree)):
        every = torch.cat([every[r * most + start : r * most + stop] for r, start, stop in parts.runs])
    return dense(every.movedim(0, dim))


def _over_again(x: Tensor, dim: int, size: int) -> Tensor:
    """What a rank has, over again, as a dry mesh joins it: of equal zeros, code that picks by values may pick all."""
    x = x if x.shape[dim] else x.new_zeros([n + (i == dim) for i, n in enumerate(x.shape)])
    return take(x, dim, [(0, min(x.shape[dim], size - at)) for at in range(0, size, x.shape[dim])])


def joined_slices(x: Tensor, dim: int, mesh: Mesh, rows: bool = False) -> Tensor:
    """A new tensor: the ranks' slices one after the other along ``dim``, or along all dims up to it (``rows``)."""
    if mesh.group is None:
        return _over_again(x, dim, x.shape[dim] + 1)
    shape = joined_shape(x, dim, mesh)
    if one_run(x, dim, rows):
        return _all_gather(x.contiguous(), mesh, shape)
    return dense(_all_gather(x.contiguous().unsqueeze(0), mesh).movedim(0, dim).reshape(shape))


def summed_slice(x: Tensor, dim: int, mesh: Mesh, rows: bool = False) -> Tensor:
    """A new tensor: this rank's slice of the sum over ranks, along ``dim`` or along all dims up to it (``rows``)."""
    if mesh.group is None:
        return own_slice(x, dim, mesh)
    shape = slice_shape(x, dim, mesh)
    if not one_run(x, dim, rows):
        x = x.unflatten(dim, (mesh.degree, shape[dim])).movedim(dim, 0)
    return _reduce_scatter(x.contiguous(), mesh, shape)


def own_slice(x: Tensor, dim: int, mesh: Mesh, rows: bool = False) -> Tensor:
    """A new tensor: this rank's slice; on a dry mesh all but the last index along ``dim``, whatever the degree."""
    if mesh.dry:
        return take(x, dim, [(0, x.shape[dim] - 1)])
    shape = slice_shape(x, dim, mesh)
    if rows:
        return x.contiguous().view(mesh.degree, *shape)[mesh.rank].clone()
    return take(x, dim, [(mesh.rank * shape[dim], (mesh.rank + 1) * shape[dim])])


def _all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.all_reduce(x.contiguous(), op, group)
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group)
    return out


def _all_gather(x: Tensor, mesh: Mesh, shape: Sequence[int] | None = None) -> Tensor:
    """The ranks' tensors one after the other in memory, in a tensor of that shape, which is no view of another."""
    if torch.compiler.is_compiling():
        traced = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        return traced(x, 0, mesh.group) if shape is None else shaped(traced(x.unsqueeze(0), 0, mesh.group), shape)
    out = x.new_empty([len(x) * mesh.degree, *x.shape[1:]] if shape is None else shape)
    if copies(x, mesh):
        mesh.peers.receive(mesh.peers.send(x.unsqueeze(0), "gather"), out.view(mesh.degree, *x.shape))
    else:
        gather_into(out.view(-1), x.view(-1), mesh.group)
    return out


def _reduce_scatter(x: Tensor, mesh: Mesh, shape: Sequence[int]) -> Tensor:
    """This rank's share of the memory of the sum, in a tensor of that shape, which is no view of another."""
    if torch.compiler.is_compiling():
        traced = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
        return shaped(traced(x.view(mesh.degree, *shape), "sum", 0, mesh.group), shape)
    out = x.new_empty(shape)
    if copies(x, mesh):
        mesh.peers.receive(mesh.peers.send(x.view(mesh.degree, *shape), "scatter"), out.unsqueeze(0))
    else:
        scatter_into(out.view(-1), x.view(-1), mesh.group)
    return out


def copies(x: Tensor, mesh: Mesh) -> bool:
    """Whether eager code lets two GPUs exchange it themselves; compiled layers have a pass that does."""
    return not torch.compiler.is_compiling() and mesh.peers is not None and mesh.peers.takes(x)
