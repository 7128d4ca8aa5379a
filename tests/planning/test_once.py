"""Whole values that are added to terms of a sum over ranks: each is to count once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.planning import make_plan

MODEL, HIDDEN, EXPERTS = 12, 22, 3


class Experts(nn.Module):
    """A loop over the experts that got a token, so its forward cannot be written anew."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, MODEL, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, MODEL) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, MODEL))
        self.identity = nn.Identity()

    def one(self, expert: int, x: Tensor) -> Tensor:
        return (x @ self.up[expert]).tanh() @ self.down[expert]

    def forward(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            place = torch.where(chosen == expert)[0]
            out.index_add_(0, place, self.one(int(expert), x[place]) * weight[place, None])
        return out


class CastBiases(Experts):
    """Each expert adds a bias that is cast first."""

    def one(self, expert: int, x: Tensor) -> Tensor:
        return super().one(expert, x) + self.bias[expert].to(torch.float32).double()


class ZeroExperts(Experts):
    """The last expert gives its tokens back as they are."""

    def one(self, expert: int, x: Tensor) -> Tensor:
        return self.identity(x) if expert == EXPERTS - 1 else super().one(expert, x)


class FirstZero(Experts):
    """The same with the first, so that whole values are there before there are terms."""

    def one(self, expert: int, x: Tensor) -> Tensor:
        return self.identity(x) if expert == 0 else super().one(expert, x)


class Routed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(MODEL), nn.Linear(MODEL, EXPERTS), experts

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        return x + self.experts(flat, chosen, weight).view(x.shape)


class Fused(nn.Module):
    """A product with a sum in one op, of something that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale, self.up = nn.LayerNorm(MODEL), nn.Linear(MODEL, MODEL), nn.Linear(MODEL, HIDDEN)
        self.down = nn.Parameter(torch.randn(HIDDEN, MODEL) / 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        return torch.addmm(self.scale(flat) * 2, self.up(flat).tanh(), self.down).softmax(-1).view(x.shape)


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    experts = {c.__name__: c for c in (CastBiases, ZeroExperts, FirstZero)}
    net = Routed(experts[name]()) if name in experts else Fused()
    return net.double(), {"x": torch.randn(2, 9, MODEL, dtype=torch.float64)}


@pytest.mark.parametrize("name", ["CastBiases", "ZeroExperts", "FirstZero", "Fused"])
def test_what_is_added_to_terms_counts_once(pool: Pool, name: str) -> None:
    plan = make_plan(*built(name), tp=2)
    assert plan["down" if name == "Fused" else "experts.down"].layout.cut
    counted = [b.module for b in plan.boundaries if b.kind == "once"]
    assert counted == {"CastBiases": [], "Fused": ["scale"]}.get(name, ["experts.identity"])
    assert pool.run(difference, 2, __name__, plan.dumps(), name)[0] is None
