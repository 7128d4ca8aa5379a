"""Bags of rows that are summed with a weight for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.planning import make_plan


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.bag = nn.Linear(6, 4), nn.EmbeddingBag(30, 16, mode="sum")

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.bag(ids, per_sample_weights=self.gate(x).softmax(-1))


def built() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Weighted(), (torch.randn(3, 6), torch.randint(30, (3, 4)))


def test_weights_of_a_bag_have_their_whole_gradient(pool: Pool) -> None:
    plan = make_plan(*built(), tp=2, overrides=["*=gathered"])
    assert not plan["bag.weight"].layout.cut
    assert pool.run(difference, 2, __name__, plan.dumps())[0] is None
