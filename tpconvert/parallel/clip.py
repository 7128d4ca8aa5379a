"""The gradient norm of a whole model whose gradients lie in parts on several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tpconvert.errors import PlanError
from tpconvert.parallel.collectives import summed
from tpconvert.parallel.mesh import Mesh
from tpconvert.spec.layout import Layout
from tpconvert.spec.plan import Plan


def clip_grad_norm_(
    module: nn.Module, max_norm: float, mesh: Mesh, plan: Plan, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients so that the whole model's norm is at most ``max_norm``; return what it was.

    It is the same on every rank: cut parameters are summed over ranks, whole ones and rows that several ranks hold
    are counted once.  Gradients must have been averaged over dp before.
    """
    norm = grad_norm(module, mesh, plan)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"The gradient norm is {norm.item()}, so gradients cannot be clipped.")
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm


def grad_norm(module: nn.Module, mesh: Mesh, plan: Plan) -> Tensor:
    """The norm of the whole model's gradient, in float32 at least."""
    layouts = plan.layouts()
    counted: list[Tensor] = []
    again: list[Tensor] = []
    widest = torch.float32  # the same on every rank, also on those that count nothing
    for name, parameter in module.named_parameters():
        name = name.replace("_orig_mod.", "")  # where a part was compiled by torch.compile(part)
        if name not in layouts:
            raise PlanError(f"{name}: the plan has no verdict for it, so its gradient cannot be counted.")
        layout = layouts[name]
        if parameter.grad is not None and parameter.grad.dtype.to_real() == torch.float64:
            widest = torch.float64
        if parameter.grad is not None and (layout.cut or mesh.rank == 0):
            counted.append(parameter.grad)
            again += _counted_again(parameter.grad, layout, mesh)
    return summed((_square(counted, mesh) - sum(again)).to(widest), mesh).sqrt()


def _counted_again(grad: Tensor, layout: Layout, mesh: Mesh) -> Iterator[Tensor]:
    """The squares of rows that other ranks hold too, as far as those count them."""
    for (start, stop), ranks in layout.shared(mesh.rank, mesh.degree):
        yield (1 - 1 / len(ranks)) * _square([grad.narrow(layout.dim, start, stop - start)], mesh)


def _square(grads: list[Tensor], mesh: Mesh) -> Tensor:
    """The sum of all squares."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    dense = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in dense]
    wide = [g for g in dense if g.dtype in (torch.float32, torch.float64)]
    halves = [g for g in dense if g.dtype not in (torch.float32, torch.float64)]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in halves]  # a norm in bfloat16 has 8 bits
    if wide:
        norms.append(nn.utils.get_total_norm(wide))
    return torch.stack(norms).square().sum() if norms else torch.zeros((), device=mesh.device)
