"""Cross entropy over logits that are cut along the vocabulary, without putting them together.

Shapes: N tokens (any leading dims), V words, V_r this rank's words.  One small all-gather of two numbers a token
forward, none backward.  Wide copies of the logits are made and dropped piece by piece, so none ever exists whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tpconvert.errors import PlanError
from tpconvert.parallel.comm.collectives import Parts, every, parts_of
from tpconvert.parallel.comm.mesh import Mesh
from tpconvert.parallel.layers.linear import local_rows
from tpconvert.parallel.layers.products import ROW
from tpconvert.spec.layout import Block, Layout

PIECE = 2**24
"""Logits that are widened at once: 64 MiB in float32; of less, launches would cost more than arithmetic."""


@dataclass(frozen=True)
class Terms:
    """What is added to the loss, and what the logits go through before it."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float

    def capped(self, x: Tensor) -> Tensor:
        """The logits that the loss is of."""
        return (x.to(_wide(x)) / self.softcap).tanh_().mul_(self.softcap) if self.softcap else x


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    mesh: Mesh,
    blocks: Sequence[Block] | Layout,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """The same number on every rank as ``F.cross_entropy`` of the whole logits.

    ``logits`` ends in this rank's words, dealt as ``blocks`` say; ``targets`` has its other dims.  ``z_loss`` adds
    that many times the squared logarithm of the partition function; ``softcap`` is for logits that the model has not
    capped itself: ``softcap * tanh(logits / softcap)``.  Computed in float32 at least, and differentiable once.
    """
    parts = parts_of(-1, blocks.blocks if isinstance(blocks, Layout) else blocks, mesh)
    if parts.shared:
        raise PlanError(f"{parts.size} words cannot be dealt to {mesh.degree} ranks: some would be held twice.")
    if logits.shape[-1] != parts.sizes[mesh.rank] or logits.shape[:-1] != targets.shape:
        raise PlanError(
            f"Logits of shape {list(logits.shape)} do not fit targets of shape {list(targets.shape)} "
            f"and {parts.sizes[mesh.rank]} of {parts.size} words on rank {mesh.rank}."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it can be 'mean', 'sum' or 'none'.")
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap)
    losses_N = _CrossEntropy.apply(logits, targets, parts, mesh, terms)
    if reduction == "none":
        return losses_N
    total = losses_N.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """cross_entropy: each rank's sums joined forward; backward needs nobody.

    Backward computes the softmax again from the logits, so nothing of their size is kept besides them.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV_r: Tensor, targets_N: Tensor, parts: Parts, mesh: Mesh, terms: Terms) -> Tensor:
        valid_N = targets_N != terms.ignore_index
        rows_N, held_N = local_rows(torch.where(valid_N, targets_N, 0), parts)
        lse_N, target_N, *total_N = _sums(logits_NV_r, rows_N, terms)
        every_RKN = every(torch.stack([lse_N, torch.where(held_N, target_N, 0), *total_N]), mesh)
        lse_N = every_RKN[:, 0].logsumexp(0)
        loss_N = lse_N - (1 - terms.label_smoothing) * every_RKN[:, 1].sum(0)
        if terms.label_smoothing:
            loss_N = loss_N - terms.label_smoothing / parts.size * every_RKN[:, 2].sum(0)
        if terms.z_loss:
            loss_N = loss_N + terms.z_loss * lse_N.square()
        ctx.save_for_backward(logits_NV_r, lse_N, rows_N, held_N & valid_N, valid_N)
        ctx.given = parts.size, terms
        return torch.where(valid_N, loss_N, 0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            with torch.no_grad():
                narrow = _CrossEntropy.backward(ctx, grad_N)[0]
            return _Final.apply(narrow, ctx.saved_tensors[0], grad_N), None, None, None, None
        logits_NV_r, lse_N, rows_N, held_N, valid_N = ctx.saved_tensors
        size, terms = ctx.given
        grad_N = torch.where(valid_N, grad_N, 0)
        scale_N = grad_N * (1 + 2 * terms.z_loss * lse_N) if terms.z_loss else grad_N
        at_target_N = torch.where(held_N, (terms.label_smoothing - 1) * grad_N, 0)
        smooth = [terms.label_smoothing / size * grad_N] if terms.label_smoothing else []
        g_NV_r = _empty_alike(logits_NV_r)
        rowwise = [t.unsqueeze(-1) for t in (lse_N, rows_N, scale_N, at_target_N, *smooth)]
        for out, x, lse, rows, scale, at_target, *evenly in _pieces(g_NV_r, logits_NV_r, *rowwise):
            x = terms.capped(x)
            g = (x - lse).exp_().mul_(scale)
            for each in evenly:
                g.sub_(each)
            if torch.compiler.is_compiling():  # which makes one kernel of this, and three with a scatter
                g.add_(torch.where(torch.arange(g.shape[-1], device=g.device) == rows, at_target, 0))
            elif g.shape[-1]:
                g.scatter_add_(-1, rows, at_target)
            out.copy_(g.mul_(1 - (x / terms.softcap).square_()) if terms.softcap else g)
        return g_NV_r, None, None, None, None


class _Final(torch.autograd.Function):
    """A gradient that depends on others in ways autograd was not told: taking it further is an error, not zero."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *depends: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("Cross entropy of cut logits can be differentiated once.")


def _sums(logits_NV_r: Tensor, rows_N: Tensor, terms: Terms) -> list[Tensor]:
    """The logarithm of the sum of exponentials, the target's logit, and with smoothing the plain sum.

    What makes nothing wide of the logits' size is done for all tokens at once: launches cost, too.
    """
    wide, capped = _wide(logits_NV_r), terms.capped
    if not logits_NV_r.shape[-1]:
        none_N = logits_NV_r.new_zeros(rows_N.shape, dtype=wide)
        return [none_N - torch.inf, none_N, none_N][: 3 if terms.label_smoothing else 2]
    target_N = capped(logits_NV_r.gather(-1, rows_N.unsqueeze(-1)).squeeze(-1)).to(wide)
    top_N = capped(logits_NV_r.amax(-1)).to(wide)  # a cap leaves the largest the largest
    top_N = torch.where(top_N == -torch.inf, 0, top_N)  # words that are all masked have no part in the sum
    sums: list[list[Tensor]] = []
    for x, top in _pieces(logits_NV_r, top_N.unsqueeze(-1)):
        x = capped(x)
        total = [x.sum(-1, dtype=wide)] if terms.label_smoothing else []
        sums.append([(x - top).exp_().sum(-1), *total])
    exp_N, *total_N = (torch.cat(s).view(rows_N.shape) for s in zip(*sums, strict=True))
    return [top_N + exp_N.log(), target_N, *total_N]


def _pieces(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of ``x``, a piece at a time, with the same rows of the others; all are views."""
    given = (x, *others)
    if x.dim() == 1:
        yield tuple(t.unsqueeze(0) for t in given)
    elif all(_in_rows(t) for t in given):
        flat = [t.flatten(0, x.dim() - 2) for t in given]
        rows = len(flat[0]) if torch.compiler.is_compiling() else max(1, PIECE // max(1, x.shape[-1]))
        yield from zip(*(t.split(max(1, rows)) for t in flat), strict=True)
    else:
        for each in zip(*given, strict=True):
            yield from _pieces(*each)


def _in_rows(x: Tensor) -> bool:
    """Whether its rows lie equally far apart, so that they can be counted through all leading dims."""
    return all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))


def _empty_alike(x: Tensor) -> Tensor:
    """An empty tensor whose rows begin as far apart as those of ``x``, if that is hardly further than they are long.

    Of odd vocabularies a parallel layer makes such logits, since it is faster with such a gradient.
    """
    apart = x.stride(-2) if x.dim() > 1 and x.stride(-1) == 1 and _in_rows(x) else 0
    if x.shape[-1] < apart < x.shape[-1] + ROW:
        return x.new_empty(*x.shape[:-1], apart)[..., : x.shape[-1]]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
