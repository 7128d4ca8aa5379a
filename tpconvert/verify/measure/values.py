"""How two values are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpconvert.analyze.trace.trees import children

UNEQUAL = float("inf")


def relative(value: Tensor, want: Tensor, floor: float = 1e-30) -> float:
    """The largest difference over the largest finite entry of ``want``.

    Infinite where shapes differ, where infinities differ, and where either has an entry that is not a number:
    nothing is proved there.
    """
    value, want = value.detach(), want.detach()
    if value.shape != want.shape:
        return UNEQUAL
    if not want.numel():
        return 0.0
    if not want.is_floating_point() and not want.is_complex():
        return 0.0 if torch.equal(value, want) else UNEQUAL
    if value.isnan().any() or want.isnan().any():
        return UNEQUAL
    finite = torch.isfinite(want)
    if not torch.equal(torch.isfinite(value), finite) or not torch.equal(value[~finite], want[~finite]):
        return UNEQUAL
    if not finite.any():
        return 0.0
    difference = (value - want)[finite].abs().max().item()
    return float(difference / max(largest(want), floor, 1e-30))


def largest(tensor: Tensor | None) -> float:
    """The largest finite entry, without its sign."""
    if tensor is None:
        return 0.0
    tensor = tensor.detach()
    tensor = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    finite = tensor[torch.isfinite(tensor)].abs()
    return float(finite.max()) if finite.numel() else 0.0


def form(tree: Any) -> Any:
    """What an output is made of: types, names and dtypes, but no numbers."""
    if isinstance(tree, Tensor):
        return tree.dtype
    return type(tree), {key: form(item) for key, item in children(tree)}


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient; zeros where there is none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
