"""Keys and values that several ranks share, fewer than there are ranks, on their ways to the attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.planning import make_plan

HEADS, KEYS, WIDTH, MODEL = 8, 2, 8, 16


class Grouped(nn.Module):
    """Attention with few keys; what is done to queries and keys before is each subclass's own."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(MODEL, HEADS * WIDTH)
        self.k = nn.Linear(MODEL, KEYS * WIDTH)
        self.v = nn.Linear(MODEL, KEYS * WIDTH)
        self.o = nn.Linear(HEADS * WIDTH, MODEL)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def prepared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, WIDTH).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.prepared(q, k)
        k, v = (
            t[:, :, None].expand(-1, -1, HEADS // KEYS, -1, -1).reshape(batch, HEADS, length, WIDTH) for t in (k, v)
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1))


def turned(x: Tensor) -> Tensor:
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], dim=-1)


class PartlyTurned(Grouped):
    """Rotary positions on half of each head, joined with the rest."""

    def prepared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        half = WIDTH // 2
        q, k = (torch.cat([turned(t[..., :half]), t[..., half:]], dim=-1) for t in (q, k))
        return q, k


class Written(Grouped):
    """The rotated half is written into a copy."""

    def prepared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        half, out = WIDTH // 2, []
        for t in (q, k):
            new = t.clone()
            new[..., :half] = turned(t[..., :half])
            out.append(new)
        return out[0], out[1]


class Chunked(Grouped):
    def prepared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        a, b = k.chunk(2, dim=-1)
        return q, torch.stack([b, a], dim=-2).flatten(-2)


class Together(Grouped):
    """Queries and keys are rotated as one tensor, and scaled by one parameter."""

    def prepared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([q, k], dim=1) * self.scale
        both = both + turned(both)
        return tuple(both.split([HEADS, KEYS], dim=1))  # type: ignore[return-value]


class Sunk(Grouped):
    """A learned key stands before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.randn(1, KEYS, 1, WIDTH))

    def prepared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        first = self.sink.expand(len(k), -1, -1, -1)
        return q, torch.cat([first, k[:, :, 1:]], dim=2)


NETS = {c.__name__: c for c in (PartlyTurned, Written, Chunked, Together, Sunk)}


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return NETS[name]().double(), {"x": torch.randn(2, 5, MODEL, dtype=torch.float64)}


SHARED = [n for n in NETS if n != "Sunk"]
"""Those whose keys are cut at tp=4: a sink beside keys is sized by a literal."""


@pytest.mark.parametrize(("name", "tp"), [*((n, 4) for n in NETS), ("PartlyTurned", 3)])
def test_ranks_that_share_keys_sum_their_gradients(pool: Pool, name: str, tp: int) -> None:
    module, inputs = built(name)
    plan = make_plan(module, inputs, tp=tp)
    if tp == 4:
        assert (plan["k.weight"].layout.cut and plan["k.weight"].sum_grad) == (name in SHARED)
    assert pool.run(difference, tp, __name__, plan.dumps(), name)[0] is None
