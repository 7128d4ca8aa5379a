"""Experts in modules of their own that are told how many tokens each gets, counted by values somewhere else."""

from __future__ import annotations

import pytest
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
        self.into, self.out = nn.Linear(MODEL, HIDDEN), nn.Linear(HIDDEN, MODEL)
        self.up, self.down = Parallel(MODEL, HIDDEN), Parallel(HIDDEN, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x + self.out(self.into(x).tanh())).flatten(0, 1)
        order, counts, weight = self.router(flat)
        y = self.down(self.up(flat[order], counts).tanh(), counts) * weight[order, None]
        return x + torch.zeros_like(flat).index_add(0, order, y).view(x.shape)


class Found(nn.Module):
    """As many rows as values above zero, which no parameter has to do with."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(MODEL, HIDDEN), nn.Linear(HIDDEN, 1)
        self.up, self.down = nn.Linear(MODEL, HIDDEN), nn.Linear(HIDDEN, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        found = [(s > 0).nonzero()[:, 0].tolist() for s in self.out(self.into(x).tanh())[..., 0]]
        rows = x.new_zeros(len(x), max(map(len, found)), MODEL)
        for i, places in enumerate(found):
            rows[i, : len(places)] = x[i, places]
        return self.down(self.up(rows).tanh()).sum(1)


class Lengthened(nn.Module):
    """Each row as often as its values say, in memory of a size that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(MODEL, HIDDEN), nn.Linear(HIDDEN, 1)
        self.up, self.down = nn.Linear(MODEL, HIDDEN), nn.Linear(HIDDEN, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.lengthened(x)).tanh()).sum(1)

    def lengthened(self, x: Tensor) -> Tensor:
        times = (self.out(self.into(x).tanh())[..., 0] * 4).abs().ceil().long()
        rows = torch.zeros((len(x), times.sum(1).max(), MODEL), dtype=x.dtype)
        for i, (row, n) in enumerate(zip(x, times, strict=True)):
            repeated = row.repeat_interleave(n, dim=0)
            rows[i, : len(repeated)] = repeated
        return rows


class Placed(Lengthened):
    """The same, with as many places of a long table, which no part of it is worth a product."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.drop = nn.Linear(MODEL, HIDDEN), nn.Dropout(0.0)
        self.register_buffer("table", torch.randn(5000, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.lengthened(x)
        middle = len(self.table) // 2  # type: ignore[arg-type]
        places = self.drop(self.table[middle : middle + rows.shape[1]])  # type: ignore[index]
        return self.down((self.up(rows) + self.place(places)).tanh()).sum(1)


def built(net: type[nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return net().double(), {"x": torch.randn(2, 9, MODEL, dtype=torch.float64)}


@pytest.mark.parametrize("net", [Experts, Found, Lengthened, Placed])
def test_numbers_counted_by_values_may_be_others_in_a_dry_run(net: type[nn.Module], pool: Pool) -> None:
    plan = make_plan(*built(net), tp=2)
    assert plan["up.weight"].layout.cut and plan["down.weight"].layout.cut
    assert net is not Placed or plan["place.weight"].layout.dim == 0  # with the rest, not along the table
    assert pool.run(difference, 2, __name__, plan.dumps(), net)[0] is None
