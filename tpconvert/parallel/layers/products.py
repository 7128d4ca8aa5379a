"""Products of parallel layers that own a collective: one that hides it, one that keeps less because of it.

Shapes: B any leading dims, N tokens, I in, O out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpconvert.parallel.comm.begun import begin_join, begin_sum
from tpconvert.parallel.comm.collectives import all_gather, copy, reduce, summed, summed_own, transformed
from tpconvert.parallel.comm.mesh import Mesh

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``x @ weight^T + bias`` in one way or another."""
ROW, WIDE, MANY = 16, 4096, 256
"""Bytes at whose multiples rows should begin, features and tokens from which on it matters."""


def summed_product(x_BI: Tensor, weight_OI: Tensor, mesh: Mesh) -> Tensor:
    """reduce of ``x @ weight^T`` in eager code: nobody else holds the product, so it is summed where it is."""
    return _SummedProduct.apply(x_BI, weight_OI, mesh)


class _SummedProduct(torch.autograd.Function):
    """summed_product: see there; its backward is that of the product alone."""

    takes_whole = True  # as a gradient

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, weight_OI: Tensor, mesh: Mesh) -> Tensor:
        x_needed, weight_needed, _ = ctx.needs_input_grad
        ctx.save_for_backward(x_BI if weight_needed else None, weight_OI if x_needed else None)
        ctx.mesh = mesh
        return summed_own(F.linear(x_BI, weight_OI), mesh)

    @staticmethod
    def backward(ctx: Any, grad_BO: Tensor) -> Any:
        x_BI, weight_OI = ctx.saved_tensors
        grad_BO = copy(grad_BO, ctx.mesh)  # whose gradient is a term of a sum, if it is asked for
        x_grad = None if weight_OI is None else grad_BO @ weight_OI
        weight_grad = None if x_BI is None else grad_BO.flatten(0, -2).t() @ x_BI.flatten(0, -2)
        return x_grad, weight_grad, None


def dtype_of(x_BI: Tensor, weight_OI: Tensor) -> torch.dtype:
    """What a product is computed in."""
    device = x_BI.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_OI.dtype


def lacking(x_BI: Tensor, weight_OI: Tensor) -> int:
    """By how many features a wide output falls short of rows that begin where a GPU reads them quickly.

    A part of a vocabulary is often of odd size (30522 or 50257 words), and tensor cores take rows at multiples of 16
    bytes: three times as fast.  Inductor fills products up by itself; of few tokens, the weight costs more than they.
    """
    features, tokens = len(weight_OI), math.prod(x_BI.shape[:-1])
    if torch.compiler.is_compiling() or not x_BI.is_cuda or features < WIDE or tokens < MANY:
        return 0
    return -features % max(1, ROW // dtype_of(x_BI, weight_OI).itemsize)


def filled_up(product: Product, x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, more: int) -> Tensor:
    """``product`` with ``more`` features of zeros, which are dropped from what it returns.

    That is contiguous as it would be without them: whoever views it must not need to know.
    """
    bias_O = None if bias_O is None else F.pad(bias_O, (0, more))
    return product(x_BI, F.pad(weight_OI, (0, 0, 0, more)), bias_O)[..., :-more].contiguous()


def reduced_product(x_NI: Tensor, weight_OI: Tensor, waves: int, mesh: Mesh) -> Tensor:
    """reduce of ``x @ weight^T``, one share of the rows after the other: each is summed while the next is computed."""
    if transformed() and not torch.compiler.is_compiling():
        return reduce(x_NI @ weight_OI.t(), mesh)
    return _ReducedProduct.apply(x_NI, weight_OI, waves, mesh)


class _ReducedProduct(torch.autograd.Function):
    """reduced_product: see there; its backward is that of the product alone."""

    takes_whole = True

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, waves: int, mesh: Mesh) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.mesh = mesh
        shares = x_NI.chunk(waves)
        if torch.compiler.is_compiling():
            return torch.cat([summed(x @ weight_OI.t(), mesh) for x in shares])
        out = x_NI.new_empty(len(x_NI), len(weight_OI))
        sums = []
        for x, y in zip(shares, out.chunk(waves), strict=True):
            torch.mm(x, weight_OI.t(), out=y)
            sums.append(begin_sum(y, mesh))
        for each in sums:
            each()
        return out

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> Any:
        x_NI, weight_OI = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            grad_NO = copy(grad_NO, ctx.mesh)  # whose gradient is a term of a sum, if it is asked for
        x_grad = grad_NO @ weight_OI if ctx.needs_input_grad[0] else None
        weight_grad = grad_NO.t() @ x_NI if ctx.needs_input_grad[1] else None
        return x_grad, weight_grad, None, None


class Gathered:
    """Where a tensor was gathered from, for layers whose backward keeps the slice instead of it."""

    def __init__(self, dim: int, mesh: Mesh) -> None:
        self.dim, self.mesh = dim, mesh
        self.users, self.left = 0, 0
        self.again: Tensor | None = None
        self.coming: Callable[[], Tensor] | None = None

    def begin(self, slice_BI: Tensor) -> None:
        """Let it be on its way while something else is computed, if it is not there."""
        if self.coming is None and (self.again is None or self.again.dtype != slice_BI.dtype):
            self.coming = begin_join(slice_BI, self.dim, self.mesh)

    def take(self, slice_BI: Tensor) -> Tensor:
        """The gathered value; it is gathered for the first of its users and dropped after the last."""
        self.begin(slice_BI)
        if self.coming is not None:
            self.again, self.left, self.coming = self.coming(), self.users, None
        assert self.again is not None
        again, self.left = self.again, self.left - 1
        if self.left <= 0:
            self.again = None
        return again


def gathered_from(slice_BI: Tensor, dim: int, mesh: Mesh) -> Tensor:
    """all_gather, of a value that :func:`gathered_product` may meet."""
    x_BI = all_gather(slice_BI, dim, mesh)
    if torch.is_grad_enabled() and not mesh.dry and not transformed():
        x_BI._tp_gathered = Gathered(dim, mesh), slice_BI, x_BI._version  # type: ignore[attr-defined]
    return x_BI


def was_gathered(x_BI: Tensor) -> bool:
    """Whether it is such a value, itself rather than something made of it, and nothing was written into it since."""
    held = getattr(x_BI, "_tp_gathered", None)
    return held is not None and held[2] == x_BI._version and torch.is_grad_enabled() and not transformed()


def gathered_product(x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``x @ weight^T + bias`` in the weight's dtype; of ``x`` the slice that it was gathered from is kept."""
    gathered, slice_BI, _ = x_BI._tp_gathered  # type: ignore[attr-defined]
    gathered.users += 1
    return _GatheredProduct.apply(x_BI, weight_OI, bias_O, slice_BI, gathered)


class _GatheredProduct(torch.autograd.Function):
    """gathered_product: see there; backward gathers the slices once more, once for all products of one gather."""

    @staticmethod
    def forward(
        ctx: Any, x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, slice_BI: Tensor, gathered: Gathered
    ) -> Tensor:
        ctx.gathered, ctx.dtype = gathered, x_BI.dtype
        ctx.save_for_backward(slice_BI, weight_OI)
        return F.linear(x_BI.to(weight_OI.dtype), weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_BO: Tensor) -> Any:
        slice_BI, weight_OI = ctx.saved_tensors
        gathered, again = ctx.gathered, torch.is_grad_enabled()
        x_needed, weight_needed, bias_needed, *_ = ctx.needs_input_grad
        x_grad = weight_grad = bias_grad = None
        slice_BI = slice_BI.to(weight_OI.dtype)
        if weight_needed and not again:
            gathered.begin(slice_BI)
        if x_needed:
            x_grad = (grad_BO @ weight_OI).to(ctx.dtype)
        grad_NO = grad_BO.flatten(0, -2) if weight_needed or bias_needed else grad_BO
        if weight_needed:
            x_BI = all_gather(slice_BI, gathered.dim, gathered.mesh) if again else gathered.take(slice_BI)
            weight_grad = grad_NO.t() @ x_BI.flatten(0, -2)
        if bias_needed:
            bias_grad = grad_NO.sum(0)
        return x_grad, weight_grad, bias_grad, None, None
