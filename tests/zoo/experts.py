"""Mixtures of experts.  Builders choose seeds whose routing is far from a tie."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.dense import GatedMlp
from tests.zoo.frame import Built, framed


class SoftMixture(nn.Module):
    """Every expert sees every token; a softmax weighs them."""

    def __init__(self, width: int, experts: int, ffn: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList([GatedMlp(width, ffn) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(expert(x) * weights[..., i : i + 1] for i, expert in enumerate(self.experts))


def soft_moe() -> Built:
    """Four dense experts, weighed."""
    return framed(SoftMixture, 4, 84)


class SlotMixture(nn.Module):
    """Soft MoE: tokens are mixed into slots, each expert works on its slots, slots are mixed back."""

    def __init__(self, width: int, experts: int, slots: int, ffn: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(width, experts, slots) * width**-0.5)
        self.up = nn.Parameter(torch.randn(experts, width, ffn) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, ffn, width) * ffn**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("btd,dep->btep", x, self.phi)
        slots = torch.einsum("btep,btd->bepd", scores.softmax(1), x)
        done = torch.einsum("bepf,efd->bepd", F.gelu(torch.einsum("bepd,edf->bepf", slots, self.up)), self.down)
        return torch.einsum("btep,bepd->btd", scores.flatten(2).softmax(-1).view_as(scores), done)


def slot_moe() -> Built:
    """Four experts with two slots each."""
    return framed(SlotMixture, 4, 2, 84)


class TopkMixture(nn.Module):
    """The chosen tokens of each expert are taken out, worked on, and added back, in a loop."""

    def __init__(self, width: int, experts: int, ffn: int, top: int = 2) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList([GatedMlp(width, ffn) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            if token.numel():
                out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x)


def topk_moe() -> Built:
    """Two of four experts for each token."""
    return framed(TopkMixture, 4, 84)


def topk_moe_idle() -> Built:
    """Two of 30 experts for each of 21 tokens: some experts get none and leave no trace."""
    return framed(TopkMixture, 30, 28)


class StackedMixture(nn.Module):
    """Experts in parameters of three dims, run with bmm, and a shared expert beside them."""

    def __init__(self, width: int, experts: int, ffn: int, top: int = 2) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Parameter(torch.randn(experts, width) * width**-0.5)
        self.gate_up = nn.Parameter(torch.randn(experts, width, 2 * ffn) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, ffn, width) * ffn**-0.5)
        self.shared = GatedMlp(width, 28)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        scores = F.linear(flat, self.router).softmax(-1)
        top, chosen = scores.topk(self.top, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, chosen, top)
        gate, up = torch.bmm(flat.expand(len(self.down), *flat.shape), self.gate_up).chunk(2, dim=-1)
        done = torch.bmm(F.silu(gate) * up, self.down)
        return (done * weights.t()[..., None]).sum(0).view_as(x) + self.shared(x)


def stacked_moe() -> Built:
    """Four experts in 3-D parameters, all computed, two counted."""
    return framed(StackedMixture, 4, 36)
