"""The gradient norm of a whole model whose gradients lie in parts on several ranks."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpconvert.errors import PlanError
from tpconvert.parallel.comm.collectives import largest, summed
from tpconvert.parallel.comm.mesh import Mesh
from tpconvert.parallel.convert import is_parameter, planned_tensors
from tpconvert.spec.layout import Layout
from tpconvert.spec.plan import Plan


def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    mesh: Mesh,
    plan: Plan,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that the whole model's norm is at most ``max_norm``; return what it was.

    It is the same on every rank: cut parameters are summed over ranks, whole ones and rows that several ranks hold
    are counted once.  Gradients must have been averaged over dp before, as DDP and ``fully_shard`` do.
    """
    norm = grad_norm(module, mesh, plan, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"The gradient norm is {norm.item()}, so gradients cannot be clipped.")
    sharded = [p.grad.to_local() for p in module.parameters() if isinstance(p.grad, DTensor)]
    plain = [p for p in module.parameters() if p.grad is not None and not isinstance(p.grad, DTensor)]
    nn.utils.clip_grads_with_norm_(plain, max_norm, norm)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for shard in sharded:
        shard.mul_(scale.to(shard.device))
    return norm


def grad_norm(module: nn.Module, mesh: Mesh, plan: Plan, norm_type: float = 2.0) -> Tensor:
    """The norm of the whole model's gradient, in float32 at least."""
    if not norm_type > 0:
        raise PlanError(f"norm_type is {norm_type}; it can be any number above 0, or inf.")
    layouts = plan.layouts()
    counted: list[Tensor] = []
    again: list[Tensor] = []
    widest = torch.float32  # the same on every rank, also on those that count nothing
    for name, parameter in _parameters(module, layouts):
        if name not in layouts:
            raise PlanError(f"{name}: the plan has no verdict for it, so its gradient cannot be counted.")
        layout, grad = layouts[name], parameter.grad
        if grad is not None and grad.dtype.to_real() == torch.float64:
            widest = torch.float64
        if grad is not None and (layout.cut or mesh.rank == 0):
            counted.append(grad)
            if norm_type != math.inf:
                again += _counted_again(grad, layout, mesh, norm_type)
    power = _power(counted, mesh, norm_type) - sum(again)
    if norm_type == math.inf:
        return largest(power.to(widest), mesh)
    return summed(power.to(widest), mesh) ** (1 / norm_type)


def _parameters(module: nn.Module, known: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """Each once, by the first of its names."""
    seen: set[int] = set()
    for name, tensor in planned_tensors(module, known):
        if is_parameter(tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _counted_again(grad: Tensor, layout: Layout, mesh: Mesh, norm_type: float) -> Iterator[Tensor]:
    """The powers of rows that other ranks hold too, as far as those count them."""
    shared = layout.shared(mesh.rank, mesh.degree)
    if shared and isinstance(grad, DTensor):
        grad = grad.full_tensor()
    for (start, stop), ranks in shared:
        yield (1 - 1 / len(ranks)) * _power([grad.narrow(layout.dim, start, stop - start)], mesh, norm_type)


def _power(grads: list[Tensor], mesh: Mesh, norm_type: float) -> Tensor:
    """The sum of all sizes, each to the power of ``norm_type``; the largest size where that is inf."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    dense = [g.resolve_conj().abs() if g.is_complex() else g for g in dense]
    wide = [g for g in dense if g.dtype in (torch.float32, torch.float64)]
    norms = [  # a norm in bfloat16 has 8 bits
        _whole(torch.linalg.vector_norm(g, norm_type, dtype=torch.float32))
        for g in dense
        if g.dtype not in (torch.float32, torch.float64)
    ]
    for sharded in (True, False):  # torch takes gradients of one kind at once
        if same := [g for g in wide if isinstance(g, DTensor) is sharded]:
            norms.append(_whole(nn.utils.get_total_norm(same, norm_type)))
    if not norms:
        return torch.zeros((), device=mesh.device)
    each = torch.stack([n.to(mesh.device) for n in norms])
    return each.amax() if norm_type == math.inf else each.pow(norm_type).sum()


def _whole(norm: Tensor) -> Tensor:
    """A norm over all of what FSDP shards."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
