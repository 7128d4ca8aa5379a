"""The model's inputs as a forward is given them: copies, of which the floating ones take part in differentiation."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tpconvert.analyze.trace.trees import map_tensors, tensors_in


class Entered:
    """``tree`` are the copies, ``given`` the leaf behind each: id of a copy -> where its gradient arrives.

    A forward may write into what it is given, so no copy is a leaf or a view of one.  What shares memory still does.
    """

    def __init__(self, tree: Any, differentiable: bool = True) -> None:
        self.differentiable = differentiable
        self.given: dict[int, torch.Tensor] = {}
        self.memo: dict[int, Any] = {}
        self.copies: dict[int, torch.Tensor] = {}
        with torch.enable_grad():
            self.tree = map_tensors(self.enter, tree)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of one tensor, always the same one."""
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = self.copied(tensor)
        return self.copies[id(tensor)]

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor of the same values; subclasses that are no plain tensors stay what they are."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        leaf = copy.deepcopy(tensor.detach(), self.memo)
        if not (self.differentiable and is_float(leaf)):
            return leaf
        entered: torch.Tensor = Alias.apply(leaf.requires_grad_())  # type: ignore[no-untyped-call]
        self.given[id(entered)] = leaf
        return entered


class Alias(torch.autograd.Function):
    """The same tensor, which autograd takes for no view and no leaf."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The same memory."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """The same gradient."""
        return grad


def is_float(tensor: torch.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def has_floats(tree: Any) -> bool:
    """Whether any tensor of a tree can have a gradient."""
    return any(map(is_float, tensors_in(tree)))
