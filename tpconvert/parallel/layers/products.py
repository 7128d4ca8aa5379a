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

    def __init__(self, dim: int, mesh: Mesh, rows: bool) -> None:
        self.where = dim, mesh, rows
        self.users, self.left = 0, 0
        self.again: Tensor | None = None
        self.coming: Callable[[], Tensor] | None = None

    def begin(self, slice_BI: Tensor) -> None:
        """Let it be on its way while something else is computed, if it is not there."""
        if self.coming is None and (self.again is None or self.again.dtype != slice_BI.dtype):
            self.coming = begin_join(slice_BI, *self.where)

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


def gathered_from(slice_BI: Tensor, dim: int, mesh: Mesh, rows: bool = False) -> Tensor:
    """all_gather, of a value that :func:`kept_product` may meet."""
    x_BI = all_gather(slice_BI, dim, mesh, rows)
    if torch.is_grad_enabled() and not mesh.dry and not transformed():
        x_BI._tp_gathered = Gathered(dim, mesh, rows), slice_BI, x_BI._version  # type: ignore[attr-defined]
    return x_BI


def was_gathered(x_BI: Tensor) -> bool:
    """Whether it is such a value, itself rather than something made of it, and nothing was written into it since."""
    held = getattr(x_BI, "_tp_gathered", None)
    return held is not None and held[2] == x_BI._version and torch.is_grad_enabled() and not transformed()


def kept_product(x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, more: int = 0) -> Tensor:
    """``x @ weight^T + bias`` in the weight's dtype; of an ``x`` that was gathered, only its slice is kept.

    ``more`` is what :func:`lacking` says: rows of what is returned begin so many features after the end of another.
    """
    gathered, kept_BI = x_BI._tp_gathered[:2] if was_gathered(x_BI) else (None, x_BI)  # type: ignore[attr-defined]
    if gathered is not None:
        gathered.users += 1
    return _KeptProduct.apply(x_BI, weight_OI, bias_O, kept_BI, (gathered, more))


class _KeptProduct(torch.autograd.Function):
    """kept_product: see there; backward gathers the slices once more, once for all products of one gather."""

    @staticmethod
    def forward(
        ctx: Any, x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, kept_BI: Tensor, given: Any
    ) -> Tensor:
        ctx.given, ctx.dtype = given, x_BI.dtype
        ctx.save_for_backward(kept_BI if ctx.needs_input_grad[1] else None, weight_OI)
        x_BI, more = x_BI.to(weight_OI.dtype), given[1]
        if not more:
            return F.linear(x_BI, weight_OI, bias_O)
        bias_O = None if bias_O is None else F.pad(bias_O, (0, more))
        return F.linear(x_BI, F.pad(weight_OI, (0, 0, 0, more)), bias_O)[..., :-more]

    @staticmethod
    def backward(ctx: Any, grad_BO: Tensor) -> Any:
        kept_BI, weight_OI = ctx.saved_tensors
        again = torch.is_grad_enabled()
        gathered, more = ctx.given
        x_needed, weight_needed, bias_needed, *_ = ctx.needs_input_grad
        x_grad = weight_grad = bias_grad = None
        kept_BI = None if kept_BI is None else kept_BI.to(weight_OI.dtype)
        if gathered is not None and weight_needed and not again:
            gathered.begin(kept_BI)
        grad_NO, odd = grad_BO.flatten(0, -2), more > 0 and not again
        if odd:
            grad_NO = _apart(grad_NO, more)
        if x_needed:
            x_grad = _odd_to_input(grad_NO, weight_OI) if odd else grad_NO @ weight_OI
            x_grad = x_grad.view(*grad_BO.shape[:-1], -1).to(ctx.dtype)
        if weight_needed:
            x_BI = kept_BI
            if gathered is not None:
                x_BI = all_gather(kept_BI, *gathered.where) if again else gathered.take(kept_BI)
            x_NI = x_BI.flatten(0, -2)
            weight_grad = _odd_to_weight(grad_NO, x_NI) if odd else grad_NO.t() @ x_NI
        if bias_needed:
            bias_grad = grad_NO.sum(0)
        return x_grad, weight_grad, bias_grad, None, None


def _apart(grad_NO: Tensor, more: int) -> Tensor:
    """A gradient whose rows begin at multiples of 16 bytes, as the loss of cut logits makes it."""
    if grad_NO.stride(1) == 1 and grad_NO.stride(0) * grad_NO.element_size() % ROW == 0:
        return grad_NO
    return grad_NO.new_empty(len(grad_NO), grad_NO.shape[1] + more)[:, :-more].copy_(grad_NO)


def _odd_to_input(grad_NO: Tensor, weight_OI: Tensor) -> Tensor:
    """``grad @ weight``: first the features up to the last multiple of 16 bytes, then the few that are left.

    Libraries are as slow with an odd number of terms as with rows that begin anywhere, and to fill a gradient up is to
    copy it.
    """
    even, more = _even(grad_NO)
    found_NI = grad_NO[:, :even] @ weight_OI[:even]
    return found_NI.addmm_(F.pad(grad_NO[:, even:], (0, more)), F.pad(weight_OI[even:], (0, 0, 0, more)))


def _odd_to_weight(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """``grad^T @ x`` in the same way."""
    even, more = _even(grad_NO)
    found_OI = x_NI.new_empty(grad_NO.shape[1], x_NI.shape[1])
    torch.mm(grad_NO[:, :even].t(), x_NI, out=found_OI[:even])
    found_OI[even:] = (F.pad(grad_NO[:, even:], (0, more)).t() @ x_NI)[: len(found_OI) - even]
    return found_OI


def _even(grad_NO: Tensor) -> tuple[int, int]:
    """The features up to the last multiple of 16 bytes, and how many are lacking for another."""
    unit = max(1, ROW // grad_NO.element_size())
    return grad_NO.shape[1] // unit * unit, -grad_NO.shape[1] % unit
