"""Ops that are recorded as the ops they are made of, since ranks that hold parts can compute those."""

from __future__ import annotations

from typing import Any

import torch

SPREADS = frozenset(["std", "var"])
"""Statistics that are means of what an elementwise op gives, so that ranks can sum their parts of them."""


def spread(name: str, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor | None:
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
