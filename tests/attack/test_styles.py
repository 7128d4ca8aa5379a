"""Ten styles in which people write networks: each is cut and equal, or whole with a reason that says what to change."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from tests.equal import difference
from tests.zoo.frame import floats, seeded
from tpconvert.planning import make_plan

WIDTH, FFN, HEADS = 24, 48, 4


class Functional(nn.Module):
    """A function over a dict of parameters; the module only holds them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"up": (WIDTH, FFN), "gate": (WIDTH, FFN), "down": (FFN, WIDTH)}
        self.weights = nn.ParameterDict({k: nn.Parameter(torch.randn(s) / math.sqrt(s[0])) for k, s in sizes.items()})

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(dict(self.weights), x)


def swiglu(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return (F.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]


class Einops(nn.Module):
    """Attention in einops: rearranged by layers and functions, contracted by its einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.split, self.join = Rearrange("b t (three h d) -> three b h t d", three=3, h=HEADS), "b h t d -> b t (h d)"

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(x))
        seen = repeat(torch.ones(x.shape[1], x.shape[1]).tril().bool(), "q k -> b h q k", b=x.shape[0], h=1)
        scores = einsum(q, k, "b h q d, b h k d -> b h q k") / q.shape[-1] ** 0.5
        y = einsum(scores.masked_fill(~seen, -1e9).softmax(-1), v, "b h q k, b h k d -> b h q d")
        return self.out(rearrange(y, self.join))


class Block(nn.Module):
    """A norm and two matrices, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Universal(nn.Module):
    """One block for every layer, each with a scale of its own; the third layer has its down matrix alone in common."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Block(), Block()
        self.other.down.weight = self.block.down.weight
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate([self.block, self.block, self.other]):
            x = block(x * self.scales[i])
        return x


class Clipped(torch.autograd.Function):
    """Forward the identity; backward the gradient, no longer than one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm().clamp(min=1.0)


class Custom(nn.Module):
    """A custom function between two matrices: its gradient needs every feature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = Block(), nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Clipped.apply(F.gelu(self.up(self.first(x)))))  # type: ignore[no-untyped-call]


class Inner(nn.Module):
    """What is scripted below."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Scripted(nn.Module):
    """A scripted part between parts that are not."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.inner = torch.jit.script(Inner())
        self.before, self.after = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


class Products(nn.Module):
    """No layers: parameters, matmul, bmm and baddbmm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, HEADS, WIDTH, 6) * 0.2)
        self.out = nn.Parameter(torch.randn(HEADS, 6, WIDTH) * 0.2)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.matmul(x[:, None], w) for w in self.qkv)
        y = torch.softmax(q @ k.mT / 6**0.5, -1) @ v
        return torch.matmul(y, self.out).sum(1) + self.bias


class HeadList(nn.Module):
    """A module for each head, joined by cat, as in a first course on attention."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, 6, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.q(x) @ self.k(x).transpose(-2, -1) * 6**-0.5).softmax(-1) @ self.v(x)

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(self.Head() for _ in range(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.out(torch.cat([h(x) for h in self.heads], dim=-1)))


class Gated(nn.Module):
    """Gated units of four kinds: GLU by chunk, by F.glu, a sigmoid gate on the result, and a highway."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * FFN), nn.Linear(FFN, WIDTH)
        self.c, self.d = nn.Linear(WIDTH, 2 * FFN), nn.Linear(FFN, WIDTH)
        self.gate, self.value, self.e = nn.Linear(WIDTH, FFN), nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.a(x).chunk(2, -1)
        x = x + self.b(value * F.gelu(gate))
        x = x + self.d(F.glu(self.c(x), -1))
        carry = self.gate(x).sigmoid()
        return self.e(carry * self.value(x).tanh() + (1 - carry) * self.value(x))


class ConvAttention(nn.Module):
    """A convolution stem, depthwise mixing and attention over positions, as in a small speech encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(5, FFN, 3, padding=1), nn.GELU(), nn.Conv1d(FFN, WIDTH, 3, padding=1))
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.wide, self.depth = nn.Conv1d(WIDTH, FFN, 1), nn.Conv1d(FFN, FFN, 3, padding=1, groups=FFN)
        self.narrow = nn.Conv1d(FFN, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.transpose(1, 2)).transpose(1, 2)
        n = self.norm(h)
        h = h + self.attention(n, n, n, need_weights=False)[0]
        return h + self.narrow(F.silu(self.depth(self.wide(h.transpose(1, 2))))).transpose(1, 2)


class Recurrent(nn.Module):
    """An LSTM, a cell unrolled by hand, and a head of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = Block()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        state, states = torch.zeros_like(y[:, 0]), []
        for t in range(y.shape[1]):
            state = self.cell(y[:, t], state)
            states.append(state)
        return self.head(torch.stack(states, 1))


STYLES: dict[str, tuple[type[nn.Module], int, set[str], dict[str, str]]] = {
    "functional": (Functional, WIDTH, {"weights.up", "weights.gate", "weights.down"}, {}),
    "einops": (Einops, WIDTH, {"qkv.weight", "out.weight"}, {}),
    "universal": (Universal, WIDTH, {"block.up.weight", "block.down.weight", "other.up.weight"}, {}),
    "custom": (Custom, WIDTH, {"first.up.weight", "first.down.weight"}, {"up.weight": "Clipped"}),
    "scripted": (
        Scripted,
        WIDTH,
        {"before.up.weight", "after.down.weight"},
        {"inner.up.weight": "functions do not show"},
    ),
    "products": (Products, WIDTH, {"qkv", "out"}, {}),
    "head list": (
        HeadList,
        WIDTH,
        {"mlp.up.weight", "mlp.down.weight"},
        {"heads.0.v.weight": "it would send more than it saves"},
    ),
    "gated": (Gated, WIDTH, {f"{n}.weight" for n in ("a", "b", "c", "d", "gate", "value", "e")}, {}),
    "conv attention": (
        ConvAttention,
        5,
        {"stem.0.weight", "attention.in_proj_weight", "wide.weight", "depth.weight"},
        {},
    ),
    "recurrent": (Recurrent, WIDTH, {"head.up.weight", "head.down.weight"}, {"lstm.weight_ih_l0": "lstm"}),
}
"""Class, width of its input, what is cut, and what stays whole with a word of the reason."""


def built(name: str, batch: int = 3, length: int = 7) -> tuple[nn.Module, dict[str, Any]]:
    return seeded(STYLES[name][0]), {"x": floats(batch, length, STYLES[name][1])}


@pytest.mark.parametrize("name", STYLES)
def test_a_style_is_cut_and_equal_and_what_stays_whole_says_why(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    _, _, cut, whole = STYLES[name]
    plan = make_plan(*built(name), tp=2)
    assert {v.name for v in plan.verdicts if v.layout.cut} >= cut
    for parameter, word in whole.items():
        assert not plan[parameter].layout.cut
        assert word in plan[parameter].reason
    for batch, length in ((3, 7), (2, 4)):
        assert run_ranks(difference, 2, __name__, plan.dumps(), name, batch, length)[0] is None
