"""Numbers that a forward makes of several integers: an attribute among them may be divided where they stay the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.planning import make_plan

MODEL, HEADS = 24, 4


class Attention(nn.Module):
    """Heads are folded into rows whose number is asked by ``len``, so this forward cannot be written anew."""

    def __init__(self) -> None:
        super().__init__()
        self.count = HEADS
        self.q, self.k, self.v = (nn.Linear(MODEL, MODEL) for _ in range(3))
        self.out = nn.Linear(MODEL, MODEL)

    def folded(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = x.reshape(batch, length, self.count, width // self.count).transpose(1, 2)
        return heads.reshape(batch * self.count, length, width // self.count)

    def scale(self, x: Tensor, k: Tensor) -> float:
        return 1 / math.sqrt(k.shape[-1] // self.count)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        rows, size = len(q), v.shape[-1] // self.count
        weights = (self.folded(q) @ self.folded(k).transpose(1, 2) * self.scale(x, k)).softmax(-1)
        mixed = (weights @ self.folded(v)).reshape(rows, self.count, x.shape[1], size)
        return self.out(mixed.transpose(1, 2).reshape(rows, x.shape[1], self.count * size))


class OfWhole(Attention):
    """The formula has a size that stays whole, so the number of heads must too."""

    def scale(self, x: Tensor, k: Tensor) -> float:
        return 1 / math.sqrt(x.shape[-1] // self.count)


class OfSum(Attention):
    """No division by the number of heads keeps this sum."""

    def scale(self, x: Tensor, k: Tensor) -> float:
        return 1 / (k.shape[-1] + self.count)


KINDS = {"divided": Attention, "whole": OfWhole, "sum": OfSum}


def built(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return nn.Sequential(KINDS[kind](), nn.LayerNorm(MODEL)), (torch.randn(2, 7, MODEL),)


def test_a_formula_that_stays_the_same_keeps_no_head_whole(pool: Pool) -> None:
    plan = make_plan(*built("divided"), tp=2)
    assert [(e.module, e.attribute) for e in plan.edits] == [("0", "count")]
    assert plan["0.q.weight"].layout.cut and not plan.rewrites
    assert pool.run(difference, 2, __name__, plan.dumps(), "divided")[0] is None


@pytest.mark.parametrize("kind", ["whole", "sum"])
def test_a_formula_that_would_change_keeps_the_attribute(pool: Pool, kind: str) -> None:
    plan = make_plan(*built(kind), tp=2)
    assert not plan.edits
    assert pool.run(difference, 2, __name__, plan.dumps(), kind)[0] is None
