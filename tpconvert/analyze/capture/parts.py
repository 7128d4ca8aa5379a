"""Ops that are recorded as the ops they are made of, since ranks that hold parts can compute those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def in_parts(name: str, args: Sequence[Any], kwargs: dict[str, Any], norms: bool) -> Tensor | None:
    """What an op gives, by the ops it is made of, with ``norms`` those of norms; None where it is recorded as it is."""
    if name in SPREADS:
        return spread(name, *args, **kwargs)
    return NORMS[name](*args, **kwargs) if norms and name in NORMS else None


SPREADS = frozenset(["std", "var"])
"""Statistics that are means of what an elementwise op gives, so that ranks can sum their parts of them."""


def spread(name: str, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Tensor | None:
    """A spread about the mean, over all entries of dims that are named, by the ops it is made of; None for another."""
    keepdim = kwargs.pop("keepdim", False)
    correction = kwargs.pop("correction", None)
    unbiased = kwargs.pop("unbiased", args[0] if args else correction != 0)
    dims = isinstance(dim, int | tuple | list) and not isinstance(dim, bool) and dim not in ((), [])
    if len(args) > 1 or kwargs or unbiased or not dims or not x.is_floating_point():
        return None
    mean = x.mean(dim, keepdim=True)
    variance = (x - mean).square().mean(dim, keepdim=keepdim)
    if name == "var":
        return variance
    flat = variance == 0  # where torch gives no gradient, rather than one without bound
    return variance.masked_fill(flat, 1).sqrt().masked_fill(flat, 0)


def layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """A norm about the mean, in the precision in which torch takes its statistics."""
    wide, dims = widened(x), list(range(-len(shape), 0))
    centred = wide - wide.mean(dims, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return affine(out, weight, bias).type_as(x)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor | None:
    """A norm about zero; None where its least size is the dtype's."""
    if eps is None:
        return None
    wide, dims = widened(x), list(range(-len(shape), 0))
    out = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    return affine(out, weight, None).type_as(x)


NORMS = {"layer_norm": layer_norm, "rms_norm": rms_norm}
"""Norms that are taken apart where that is asked for, since as one op they are faster."""


APART = SPREADS | NORMS.keys()


def widened(x: Tensor) -> Tensor:
    """A value in float32 at least; which of both is not written down, so that it may be another at another call."""
    return x * torch.ones(1, dtype=torch.float32, device=x.device)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scaled and shifted."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
