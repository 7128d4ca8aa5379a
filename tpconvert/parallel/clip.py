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
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    for grad in grads:
        grad.mul_(scale.to(grad.device))
    return norm


def grad_norm(module: nn.Module, mesh: Mesh, plan: Plan) -> Tensor:
    """The norm of the whole model's gradient, in float32 at least."""
    layouts = plan.layouts()
    squares: list[Tensor] = []
    for name, parameter in module.named_parameters():
        name = name.replace("_orig_mod.", "")  # where a part was compiled by torch.compile(part)
        if name not in layouts:
            raise PlanError(f"{name}: the plan has no verdict for it, so its gradient cannot be counted.")
        if parameter.grad is not None:
            squares += _squares(parameter.grad, layouts[name], mesh)
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=mesh.device)
    return summed(total, mesh).sqrt()


def _squares(grad: Tensor, layout: Layout, mesh: Mesh) -> Iterator[Tensor]:
    """What this rank adds to the sum of squares for one parameter."""
    if not layout.cut:
        yield _square(grad) if mesh.rank == 0 else torch.zeros_like(_square(grad[:0] if grad.dim() else grad))
        return
    yield _square(grad)
    for (start, stop), ranks in layout.shared(mesh.rank, mesh.degree):
        yield (1 / len(ranks) - 1) * _square(grad.narrow(layout.dim, start, stop - start))


def _square(grad: Tensor) -> Tensor:
    if grad.is_sparse:
        grad = grad.coalesce().values()
    wide = grad if grad.dtype in (torch.float32, torch.float64) else grad.float()
    return torch.linalg.vector_norm(wide).square()
