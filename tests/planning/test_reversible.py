"""Layers that keep no activations: a function of its own runs them without gradients, and again in its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.planning import make_plan

MODEL, HIDDEN = 12, 20


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(MODEL), nn.Linear(MODEL, HIDDEN), nn.Linear(HIDDEN, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh())


class Block(nn.Module):
    """Two halves, each changed by what the other gives, so that both can be had back from the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Branch(), Branch()

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        left = left + self.first(right)
        return torch.cat([left, right + self.second(left)], dim=-1)

    def back(self, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """What was given, and its gradient, from the result's."""
        left, right = y.chunk(2, dim=-1)
        left_grad, right_grad = grad.chunk(2, dim=-1)
        right, left_grad = undone(self.second, left, right, left_grad, right_grad)
        left, right_grad = undone(self.first, right, left, right_grad, left_grad)
        return torch.cat([left, right], dim=-1), torch.cat([left_grad, right_grad], dim=-1)


def undone(branch: nn.Module, given: Tensor, made: Tensor, grad: Tensor, made_grad: Tensor) -> tuple[Tensor, Tensor]:
    """What a branch's result was added to, and the gradient of what the branch was given."""
    with torch.enable_grad():
        leaf = given.detach().requires_grad_()
        again = branch(leaf)
        again.backward(made_grad)
    assert leaf.grad is not None
    return made - again.detach(), grad + leaf.grad


class Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        for block in blocks:
            x = block(x)
        ctx.blocks, ctx.y = blocks, x.detach()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y = ctx.y
        for block in reversed(ctx.blocks):
            y, grad = block.back(y, grad)
        return grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(7, 2 * MODEL), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return Run.apply(self.embed(x), self.blocks)


def built() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Reversible(), (torch.randn(3, 5, 7),)


def test_layers_that_run_again_in_the_backward_have_their_gradients_summed(pool: Pool) -> None:
    plan = make_plan(*built(), tp=2)
    branches = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("first", "second")]
    assert all(plan[f"{branch}.up.weight"].layout.cut for branch in branches)
    assert {b.module for b in plan.boundaries if b.kind == "copy"} >= {f"{branch}.up" for branch in branches}
    assert pool.run(difference, 2, __name__, plan.dumps())[0] is None
