"""Gradients of whole parameters that are terms of a sum over ranks, as those of norms between slices of tokens are.

Each is small and there are many, so a collective for each would cost a backward more than what it carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpconvert.parallel.comm.collectives import reduce, summed
from tpconvert.parallel.comm.mesh import Mesh

SMALL = 2**20
"""Elements up to which a gradient waits for the others; a larger one is worth a collective of its own."""


@dataclass(eq=False)
class Together:
    """Hooks of a root: in its forward, what is read of these parameters is from one place, where their gradients meet.

    Outside it, in a part that is called by itself or is computed again, each gradient is summed by itself.
    """

    mesh: Mesh
    reads: tuple[tuple[nn.Module, str], ...]

    def begin(self, module: nn.Module, args: Any) -> None:
        """Hook: the root's forward begins."""
        if torch.compiler.is_compiling():
            return
        self._clear()
        if not torch.is_grad_enabled():
            return
        found: dict[int, Tensor] = {}
        for owner, name in self.reads:
            tensor = owner._parameters.get(name)
            if tensor is not None and _waits(tensor):
                found[id(tensor)] = tensor
        values = dict(zip(found, copies(list(found.values()), self.mesh), strict=True)) if found else {}
        for owner, name in self.reads:
            tensor = owner._parameters.get(name)
            if id(tensor) in values:
                owner._tp_summed[name] = tensor, values[id(tensor)]

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook: the root's forward is over, or has failed."""
        if not torch.compiler.is_compiling():
            self._clear()

    def _clear(self) -> None:
        for owner, _ in self.reads:
            owner._tp_summed.clear()


def sum_together(root: nn.Module, mesh: Mesh) -> None:
    """Hook it to a root whose parts have their reads."""
    reads = [
        (part, name)
        for part in root.modules()
        for name, read in vars(part).get("_tp_reads", {}).items()
        if read.sum_grad and read.parts is None and name in part._parameters
    ]
    if len(reads) > 1 and not mesh.dry:
        together = Together(mesh, tuple(reads))
        root.register_forward_pre_hook(together.begin)
        root.register_forward_hook(together.end, always_call=True)


def copies(xs: Sequence[Tensor], mesh: Mesh) -> tuple[Tensor, ...]:
    """copy of several values that nobody writes into: identity forward; backward sums all of a dtype in one collective.

    It does so when the last of their gradients has come, so at the end of a backward if all are from its beginning.
    """
    return _Copies.apply(mesh, *xs)


class _Copies(torch.autograd.Function):
    """copies: see there.  A value without a gradient is left out, as it is on all ranks."""

    @staticmethod
    def forward(ctx: Any, mesh: Mesh, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh = mesh
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return None, *(None if g is None else reduce(g, ctx.mesh) for g in grads)
        out = list(grads)
        of_dtype: dict[torch.dtype, list[int]] = {}
        for i, grad in enumerate(grads):
            if grad is not None:
                of_dtype.setdefault(grad.dtype, []).append(i)
        for places in of_dtype.values():
            total = summed(torch.cat([out[i].reshape(-1) for i in places]), ctx.mesh)
            for i, part in zip(places, total.split([out[i].numel() for i in places]), strict=True):
                out[i] = part.view(out[i].shape)
        return None, *out


def _waits(tensor: Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, DTensor) and tensor.numel() <= SMALL
