"""Faults of a converted module, each planted on every rank, and of the runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpconvert.parallel import Mesh
from tpconvert.parallel.comm.collectives import joined, parts_of, summed, take
from tpconvert.spec.layout import Block
from tpconvert.spec.plan import Plan


def scaled_gradient(name: str | None = None) -> Callable[[nn.Module, Mesh], None]:
    """The gradient of one parameter, or of all, divided by the degree."""

    def disturb(module: nn.Module, mesh: Mesh) -> None:
        for n, p in module.named_parameters():
            if name in (None, n):
                p.register_hook(lambda grad: grad / mesh.degree)

    return disturb


def on_last_rank(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Mesh], None]:
    """A tensor changed on the last rank only."""

    def disturb(module: nn.Module, mesh: Mesh) -> None:
        if mesh.rank == mesh.degree - 1:
            tensor = (dict(module.named_parameters()) | dict(module.named_buffers()))[name]
            tensor.data = change(tensor.data.clone())

    return disturb


def nudged(tensor: Tensor) -> Tensor:
    """A tensor whose first entry is a little larger."""
    tensor.view(-1)[0] += 1e-4
    return tensor


def forward_of(path: str, forward: Callable[..., Any]) -> Callable[[nn.Module, Mesh], None]:
    """A module's forward replaced by ``forward(old, module, *args)``."""

    def disturb(module: nn.Module, mesh: Mesh) -> None:
        part = module.get_submodule(path)
        old = part.forward
        part.forward = lambda *args, **kwargs: forward(old, part, *args, **kwargs)

    return disturb


def attribute(path: str, **values: Any) -> Callable[[nn.Module, Mesh], None]:
    """Attributes of a module set."""

    def disturb(module: nn.Module, mesh: Mesh) -> None:
        for name, value in values.items():
            assert getattr(module.get_submodule(path), name) != value
            setattr(module.get_submodule(path), name, value)

    return disturb


def halves_swapped(module: nn.Module, mesh: Mesh) -> None:
    """The two segments of a fused layer in the wrong order."""
    for p in module.core.gate_up.parameters():
        p.data = torch.cat(p.data.chunk(2)[::-1])


def words_shifted(module: nn.Module, mesh: Mesh) -> None:
    """The last rank looks words up one row too far down."""
    if mesh.rank:
        parts = module.embed.tp_parts
        module.embed.tp_parts = replace(parts, pieces=tuple((start - 1, stop - 1) for start, stop in parts.pieces))


def last_word_lost(module: nn.Module, mesh: Mesh) -> None:
    """The last rank does not know the last word."""
    if mesh.rank:
        parts = module.embed.tp_parts
        module.embed.tp_parts = replace(parts, pieces=tuple((start, stop - 1) for start, stop in parts.pieces))


def last_logits_lost(old: Callable[..., Tensor], module: nn.Module, x: Tensor) -> Tensor:
    """The logits without the last word's."""
    return old(x)[..., :-1]


def untied(module: nn.Module, mesh: Mesh) -> None:
    """A tied weight split in two."""
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())


def slopes_of_rank_0(module: nn.Module, mesh: Mesh) -> None:
    """Every rank has the slopes of the first heads."""
    whole = joined(module.core.slopes, parts_of(0, (Block(12),), mesh), mesh)
    module.core.slopes = whole[:6].clone()


def buffer_whole(module: nn.Module, mesh: Mesh) -> None:
    """A buffer that is read from its start is left whole."""
    module.core.gain = joined(module.core.gain, parts_of(0, (Block(84),), mesh), mesh)


def parts_exchanged(module: nn.Module, mesh: Mesh) -> None:
    """Each rank holds another's part, in all layers alike: the outputs are right, the stored parts are not."""
    for layer, dim in ((module.core.gate, 0), (module.core.up, 0), (module.core.down, 1)):
        parts = parts_of(dim, (Block(layer.weight.shape[dim] * mesh.degree),), mesh)
        other = mesh.degree - 1 - mesh.rank
        size = layer.weight.shape[dim]
        layer.weight.data = joined(layer.weight.data, parts, mesh).narrow(dim, other * size, size).clone()


def stale_weight(old: Callable[..., Tensor], module: nn.Module, x: Tensor) -> Tensor:
    """A layer that computes for ever with the value its weight had at first, and yet has the right gradient."""
    weight = module._parameters["weight"]
    first = module.__dict__.setdefault("first", weight.detach().clone())
    return F.linear(x, weight + (first - weight.detach()), module.bias)


def scores_by_local_size(old: Callable[..., Tensor], module: nn.Module, x: Tensor) -> Tensor:
    """Attention whose scale counts the heads of this rank."""
    head_dim = module.head_dim
    module.scores = lambda q, k: q @ k.mT * (q.shape[1] * head_dim / 12) ** -0.5
    return old(x)


def dropping_always(old: Callable[..., Tensor], module: nn.Dropout, x: Tensor) -> Tensor:
    """Dropout that does not look at the mode."""
    return F.dropout(x, module.p, True)


def clip_counting_copies(module: nn.Module, max_norm: float, mesh: Mesh, plan: Plan) -> Tensor:
    """Clipping by a norm in which a whole parameter counts once a rank."""
    squares = torch.stack([p.grad.square().sum() for p in module.parameters() if p.grad is not None]).sum()
    norm = summed(squares, mesh).sqrt()
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm


def clip_locally(module: nn.Module, max_norm: float, mesh: Mesh, plan: Plan) -> Tensor:
    """Clipping by the norm of what this rank holds."""
    return nn.utils.clip_grad_norm_(module.parameters(), max_norm)


class Unjoined(torch.autograd.Function):
    """scatter whose backward fills what other ranks hold with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Any, mesh: Mesh) -> Tensor:
        ctx.parts, ctx.shape = parts, x.shape
        return take(x, parts.dim, parts.pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out, ((start, stop),) = grad.new_zeros(ctx.shape), ctx.parts.pieces
        out.narrow(ctx.parts.dim, start, stop - start).copy_(grad)
        return out, None, None


class Summing(torch.autograd.Function):
    """reduce whose backward sums too, as torch's own all_reduce does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return summed(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad, ctx.mesh), None


def summing_product(x: Tensor, weight: Tensor, mesh: Mesh) -> Tensor:
    """A row-parallel product that is summed so."""
    return Summing.apply(nn.functional.linear(x, weight), mesh)
