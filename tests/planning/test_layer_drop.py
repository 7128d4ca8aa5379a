"""Layers that training leaves out at random."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.planning import make_plan


class Dropping(nn.Module):
    """A stack of residual networks, each left out at a rate."""

    def __init__(self, rate: float = 0.5, keeps: bool = False, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 8)) for _ in range(layers)
        )
        self.rate, self.keeps = rate, keeps

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                drawn = torch.rand([])
                if (drawn > self.rate) if self.keeps else (drawn < self.rate):
                    continue
            x = x + layer(x)
        return x


NETS = {"below": lambda: Dropping(), "above": lambda: Dropping(keeps=True)}


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return NETS[name]().double(), {"x": torch.randn(2, 6, 8, dtype=torch.float64)}


def test_a_plan_is_the_same_whatever_the_random_state_is_and_leaves_it_so() -> None:
    module, inputs = built("below")
    plans = set()
    for seed in range(4):
        torch.manual_seed(seed)
        plans.add(make_plan(module, inputs, tp=2).dumps())
        after = torch.rand(3)
        torch.manual_seed(seed)
        assert torch.equal(after, torch.rand(3))
    assert len(plans) == 1


@pytest.mark.parametrize("name", NETS)
def test_layers_left_out_at_random_are_cut(pool: Pool, name: str) -> None:
    module, inputs = built(name)
    plan = make_plan(module, inputs, tp=2)
    assert all(v.layout.cut for v in plan.verdicts if len(v.shape) == 2)
    assert pool.run(difference, 2, __name__, plan.dumps(), name)[0] is None
