"""Experts in modules of their own that are told how many tokens each gets, counted by values somewhere else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.planning import make_plan

MODEL, HIDDEN, EXPERTS = 12, 22, 3


class Router(nn.Module):
    """Counts the tokens of each expert, and sorts them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(MODEL, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, list[int], Tensor]:
        weight, chosen = self.layer(x).softmax(-1).max(-1)
        counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
        return chosen.argsort(), counts, weight


class Parallel(nn.Module):
    """A matrix for each run of rows."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, fan_out, fan_in) / 3)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        rows = x.split(counts)
        return torch.cat([nn.functional.linear(r, w) for r, w in zip(rows, self.weight, strict=True)])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(MODEL), Router()
        self.up, self.down = Parallel(MODEL, HIDDEN), Parallel(HIDDEN, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        order, counts, weight = self.router(flat)
        y = self.down(self.up(flat[order], counts).tanh(), counts) * weight[order, None]
        return x + torch.zeros_like(flat).index_add(0, order, y).view(x.shape)


def built() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Experts().double(), {"x": torch.randn(2, 9, MODEL, dtype=torch.float64)}


def test_numbers_counted_by_values_may_be_others_in_a_dry_run(pool: Pool) -> None:
    plan = make_plan(*built(), tp=2)
    assert plan["up.weight"].layout.dim == 1 and plan["down.weight"].layout.dim == 2
    assert pool.run(difference, 2, __name__, plan.dumps())[0] is None
