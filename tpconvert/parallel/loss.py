"""Cross entropy over logits that are cut along the vocabulary, without putting them together.

Shapes: N tokens (any leading dims), V words, V_r this rank's words.  Two small all-reduces of N numbers forward,
none backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tpconvert.errors import PlanError
from tpconvert.parallel.collectives import Parts, largest, parts_of, summed
from tpconvert.parallel.layers import local_rows
from tpconvert.parallel.mesh import Mesh
from tpconvert.spec.layout import Block, Layout


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
) -> Tensor:
    """The same number on every rank as ``F.cross_entropy`` of the whole logits.

    ``logits`` ends in this rank's words, dealt as ``blocks`` say; ``targets`` has its other dims.  ``z_loss`` adds
    that many times the squared logarithm of the partition function.  Computed in float32 at least.
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
    losses_N = _CrossEntropy.apply(logits, targets, parts, mesh, ignore_index, label_smoothing, z_loss)
    if reduction == "none":
        return losses_N
    total = losses_N.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """cross_entropy: maximum and sums over ranks forward; backward needs nobody.

    Backward computes the softmax again from the logits, so nothing of their size is kept besides them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV_r: Tensor,
        targets_N: Tensor,
        parts: Parts,
        mesh: Mesh,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
    ) -> Tensor:
        x_NV_r = _at_least_float(logits_NV_r)
        valid_N = targets_N != ignore_index
        rows_N, held_N = local_rows(torch.where(valid_N, targets_N, 0), parts)
        if x_NV_r.shape[-1]:
            top_N = x_NV_r.detach().amax(-1)
            target_N = x_NV_r.gather(-1, rows_N.unsqueeze(-1)).squeeze(-1)
        else:
            top_N = x_NV_r.new_full(targets_N.shape, -torch.inf)
            target_N = x_NV_r.new_zeros(targets_N.shape)
        top_N = largest(top_N, mesh)
        sums = [(x_NV_r - top_N.unsqueeze(-1)).exp().sum(-1), torch.where(held_N, target_N, 0)]
        if label_smoothing:
            sums.append(x_NV_r.sum(-1))
        exp_N, target_N, *total_N = summed(torch.stack(sums), mesh).unbind(0)
        lse_N = top_N + exp_N.log()
        loss_N = lse_N - (1 - label_smoothing) * target_N
        if label_smoothing:
            loss_N = loss_N - label_smoothing / parts.size * total_N[0]
        if z_loss:
            loss_N = loss_N + z_loss * lse_N.square()
        ctx.save_for_backward(logits_NV_r, lse_N, rows_N, held_N & valid_N, valid_N)
        ctx.numbers = parts.size, label_smoothing, z_loss
        return torch.where(valid_N, loss_N, 0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> Any:
        logits_NV_r, lse_N, rows_N, held_N, valid_N = ctx.saved_tensors
        size, label_smoothing, z_loss = ctx.numbers
        grad_N = torch.where(valid_N, grad_N, 0)
        g_NV_r = (_at_least_float(logits_NV_r) - lse_N.unsqueeze(-1)).exp()
        g_NV_r = g_NV_r * (grad_N * (1 + 2 * z_loss * lse_N)).unsqueeze(-1)
        if label_smoothing:
            g_NV_r = g_NV_r - (label_smoothing / size * grad_N).unsqueeze(-1)
        if g_NV_r.shape[-1]:
            at_target_N = torch.where(held_N, -(1 - label_smoothing) * grad_N, 0)
            g_NV_r = g_NV_r.scatter_add(-1, rows_N.unsqueeze(-1), at_target_N.unsqueeze(-1))
        return g_NV_r.to(logits_NV_r.dtype), None, None, None, None, None, None


def _at_least_float(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
