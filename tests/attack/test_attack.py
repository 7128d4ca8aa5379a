"""Networks that look easy to get wrong, planned on one input and held to equality on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equal import difference
from tpconvert.planning import make_plan

WIDTH = 24


def rows(batch: int = 2, length: int = 5, width: int = WIDTH) -> Tensor:
    """Seeded noise."""
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(100 * batch + length))


class Heads(nn.Module):
    """Projections for four heads; what is between is each test's own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> list[Tensor]:
        return [f(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)]

    def join(self, y: Tensor) -> Tensor:
        return self.o(y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1))


class Windows(Heads):
    """Each head looks further than the one before."""

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        seen = (at[:, None] - at).abs() <= torch.arange(1, self.heads + 1)[:, None, None]
        return self.join(F.scaled_dot_product_attention(*self.split(x), attn_mask=seen))


class PartRotary(Heads):
    """Rotary on four of the six entries of a head."""

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1]).to(x.dtype)

        def turned(z: Tensor) -> Tensor:
            a, b, rest = z.split([2, 2, 2], -1)
            return torch.cat([torch.cat([a, b], -1) * angle.cos() + torch.cat([-b, a], -1) * angle.sin(), rest], -1)

        q, k, v = self.split(x)
        return self.join(F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True))


class Differential(Heads):
    """The difference of two maps in each head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        maps = (q.unflatten(-1, (2, 3)).transpose(2, 3) @ k.unflatten(-1, (2, 3)).permute(0, 1, 3, 4, 2)).softmax(-1)
        return self.join((maps[:, :, 0] - 0.3 * maps[:, :, 1]) @ v)


class Cached(Heads):
    """The second part of the words attends to the first through what was kept of it."""

    def step(self, x: Tensor, kept: Any) -> tuple[Tensor, Any]:
        q, k, v = self.split(x)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        return self.join(F.scaled_dot_product_attention(q, k, v)), (k, v)

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        kept, out = None, []
        for part in x.chunk(parts, 1):
            y, kept = self.step(part, kept)
            out.append(y)
        return torch.cat(out, 1)


class Fused(nn.Module):
    """Queries, fewer keys and values, and a gated ffn from one projection, back through another."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 24 + 12 + 12 + 96), nn.Linear(24 + 48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, m = self.into(x).split([24, 12, 12, 96], -1)
        q = q.unflatten(-1, (4, 6)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 6)).transpose(1, 2).repeat_interleave(2, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        gate, up = m.chunk(2, -1)
        return self.out(torch.cat([y, F.silu(gate) * up], -1))


class Channels(nn.Module):
    """Depthwise, grouped, normalised in batches and in groups, and shuffled into pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.depth = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.group, self.batch = nn.Conv2d(32, 64, 3, groups=4, padding=1), nn.BatchNorm2d(64)
        self.norm, self.b = nn.GroupNorm(8, 64), nn.Conv2d(64, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(F.relu(self.batch(self.group(self.depth(self.a(x))))))
        return F.pixel_shuffle(self.b(h), 2)


class BothWays(nn.Module):
    """One weight there and back, as a layer and as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.bias = nn.Parameter(torch.randn(48, WIDTH) * 0.2), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.w)), self.w.t(), self.bias) + F.gelu(x @ self.w.T) @ self.w


class Straight(nn.Module):
    """Rounded with a gradient that goes straight through, by parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(()))])

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for scale in self.scales:
            h = h * scale
        return self.b(h + ((h * 4).round() / 4 - h).detach())


class Mlp(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)))


class Twins(nn.Module):
    """A head with a bias, on the sums of one module called for each side."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.w = Mlp(), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        one, two = (F.normalize(self.w(self.m(z)), dim=-1) for z in (x, other))
        return one @ two.transpose(-1, -2)


class Routed(nn.Module):
    """Experts in the model's own forward, which data leads, and a loss from the weights that scale their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, WIDTH)
        chances = self.gate(flat).softmax(-1)
        weights, chosen = chances.topk(2, -1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, column = (chosen == i).nonzero(as_tuple=True)
            y.index_add_(0, row, expert(flat[row]) * weights[row, column][:, None])
        return y.view_as(x), chances.mean(0).square().sum()


class Full(nn.Module):
    """A block that hands on what it was given, when asked."""

    class Block(Mlp):
        def forward(self, x: Tensor, full: bool = False) -> Any:
            y = super().forward(x)
            return (y, x) if full else y

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(WIDTH), self.Block()

    def forward(self, x: Tensor, full: bool = False) -> Tensor:
        y = self.block(self.norm(x), full)
        return y[0] + y[1] if full else y


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
NETWORKS: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]]]] = {
    "windows": (Windows, [{"x": rows()}, {"x": rows(3, 7)}]),
    "part rotary": (PartRotary, [{"x": rows()}, {"x": rows(3, 1)}]),
    "differential": (Differential, [{"x": rows()}]),
    "cached": (Cached, [{"x": rows()}, {"x": rows(), "parts": 2}]),
    "fused": (Fused, [{"x": rows()}, {"x": rows(1, 7)}]),
    "channels": (Channels, [{"x": IMAGE}, {"x": IMAGE[:1, :, :6]}]),
    "both ways": (BothWays, [{"x": rows()}]),
    "twins": (Twins, [{"x": rows(), "other": rows(2, 7)}, {"x": rows(1, 4), "other": rows(1, 4)}]),
    "routed": (Routed, [{"x": rows()}, {"x": rows(3, 7)}]),
    "full": (Full, [{"x": rows()}, {"x": rows(), "full": True}]),
    "straight": (Straight, [{"x": rows()}, {"x": rows(1, 1)}]),
}


def built(name: str, case: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    build, inputs = NETWORKS[name]
    return build(), inputs[case]


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_equal_on_the_inputs_it_was_planned_with_and_on_others(
    name: str, tp: int, run_ranks: Callable[..., list[Any]]
) -> None:
    plan = make_plan(*built(name), tp=tp)
    assert any(v.layout.cut for v in plan.verdicts)
    for case in range(len(NETWORKS[name][-1])):
        assert run_ranks(difference, tp, __name__, plan.dumps(), name, case)[0] is None
