"""Tensors that a forward fills piece by piece, through views that it does not look at again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.planning import make_plan

HEADS, NOPE, ROPE, MODEL = 6, 5, 4, 24


class Filled(nn.Module):
    """Keys of which one part is each head's own, and the other one part for all heads, written into new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MODEL)
        self.q, self.v = nn.Linear(MODEL, HEADS * (NOPE + ROPE)), nn.Linear(MODEL, HEADS * NOPE)
        self.own, self.shared = nn.Linear(MODEL, HEADS * NOPE), nn.Linear(MODEL, ROPE)
        self.o = nn.Linear(HEADS * NOPE, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x = self.norm(x)
        layers = (self.q, self.v, self.own)
        q, v, own = (f(x).view(batch, length, -1, f.out_features // HEADS).transpose(1, 2) for f in layers)
        k = own.new_empty(*own.shape[:-1], NOPE + ROPE)
        k[..., :NOPE].copy_(own)
        k[..., NOPE:].copy_(self.shared(x)[:, None].expand(-1, own.shape[1], -1, -1))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


def built() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Filled().double(), {"x": torch.randn(2, 5, MODEL, dtype=torch.float64)}


@pytest.mark.parametrize("whole", [(), ("q.weight=whole",)])
def test_new_memory_that_is_filled_is_cut(pool: Pool, whole: tuple[str, ...]) -> None:
    """By heads; where those are kept whole, values are cut by the width of each and keys enter whole."""
    plan = make_plan(*built(), tp=2, overrides=whole)
    assert [plan[f"{n}.weight"].layout.cut for n in ("q", "own", "v", "o")] == [not whole, not whole, True, True]
    assert pool.run(difference, 2, __name__, plan.dumps())[0] is None
