"""How two values are compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.analyze.trace.trees import children
from tpconvert.verify.measure.modes import tensors_of

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


def loss_of(output: Any) -> Tensor | None:
    """A sum of all differentiable outputs with fixed random weights: every entry counts, and none like another.

    Entries that were masked out do not: beside the least number that there is no other would.  None where no output
    can be differentiated.
    """
    total: Tensor | None = None
    for part in _weighted(output):
        total = part.sum() if total is None else total + part.sum()
    return total


def spread_of(output: Any) -> float:
    """How large the loss is with other weights, as a rule: its terms may cancel by chance, and its error does not."""
    return float(sum(part.detach().double().square().sum().item() for part in _weighted(output)) ** 0.5)


def _weighted(output: Any) -> Iterator[Tensor]:
    """The terms of the loss, in float32 at least: the sum of many in bfloat16 has two digits."""
    for i, (_, tensor) in enumerate(tensors_of(output)):
        if not tensor.is_floating_point() or not tensor.requires_grad:
            continue
        generator = torch.Generator().manual_seed(7919 + i)
        weight = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        plain = tensor.abs() < torch.finfo(tensor.dtype).max ** 0.5  # a mask is infinite, or sums of it are
        finite = torch.where(plain, tensor, torch.zeros_like(tensor))
        finite = finite.to(torch.promote_types(tensor.dtype, torch.float32))
        yield finite * weight.to(finite) / max(tensor.numel(), 1) ** 0.5


def densify(module: nn.Module) -> None:
    """Make sparse gradients dense."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to_dense()
