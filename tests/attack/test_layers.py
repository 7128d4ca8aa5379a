"""Layers of research code, planned on one input and held to equality on others, gradients of the input too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equal import difference
from tpconvert.planning import make_plan
from tpconvert.verify import emulate_module

WIDTH, FFN, LENGTH = 24, 48, 16
SOME = 8  # divides the widths


def noise(*shape: int) -> Tensor:
    """Seeded noise."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class SpatialGate(nn.Module):
    """One half of a projection is normed and mixed over the sequence whole, the other half it gates may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * FFN), nn.LayerNorm(FFN)
        self.mix, self.down = nn.Conv1d(LENGTH, LENGTH, 1), nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.up(x)).chunk(2, -1)
        return self.down(u * self.mix(self.norm(v)))


class Squares(nn.Module):
    """Powers by Python's operator in a forward that has sizes written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], 6, 4)
        q = F.gelu(q / (1 + (q**2).sum(-1, keepdim=True)) ** 0.5)
        return self.o(q.reshape(*x.shape[:2], 24))


class Involution(nn.Module):
    """Kernels made of the image, one for a few channels, over windows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kernel, self.last = nn.Conv2d(3, 24, 1), nn.Conv2d(24, 54, 1), nn.Conv2d(24, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        b, c, h, w = x.shape
        kernels = self.kernel(x).view(b, 6, 1, 9, h, w)
        windows = F.unfold(x, 3, padding=1).view(b, 6, 4, 9, h, w)
        return self.last((kernels * windows).sum(3).view(b, c, h, w))


class Graph(nn.Module):
    """Sums over the neighbours in a sparse matrix, which is asked for the dtype that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        ones = torch.ones(edges.shape[1], dtype=x.dtype)
        near = torch.sparse_coo_tensor(edges, ones, (len(x), len(x)), check_invariants=False).to(x.dtype)
        return torch.sparse.mm(near, self.down(F.relu(torch.sparse.mm(near, self.up(x)))))


class Mlp(nn.Module):
    """Two linears, with a buffer for what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(F.gelu(self.up(x))))

    def between(self, h: Tensor) -> Tensor:
        return h


class Rescaled(Mlp):
    """A buffer that is written to twice in a row."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).mul_(h.mean())
            self.calls += 1
        return h / self.calls


class RescaledView(Mlp):
    """Part of a buffer is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.ones(4)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen[1:3].mul_(h.mean())
        return h * 1.5


class Remembers(Mlp):
    """A sum over the width is kept by an attribute, and read by the next call."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        y = self.down(h) * (1 + getattr(self, "last", 0))
        self.last = h.detach().sum()
        return y


class Constrained(Mlp):
    """Weights are brought within bounds before they are used."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1).mul_(1.01)
        return super().forward(x)


class AsksWidth(Mlp):
    """Does one thing more where what it was given is narrow, or no layer of torch's."""

    def between(self, h: Tensor) -> Tensor:
        h = h if h.shape[-1] >= FFN else h * 2
        return h if self.up.weight.shape[0] >= FFN and type(self.up) is nn.Linear else h.sin()


class Reordered(Mlp):
    """Features of tokens are taken for tokens of features: by chance as many as one is of the other."""

    def between(self, h: Tensor) -> Tensor:
        return h.transpose(1, 2).reshape(h.shape)


class ReorderedSum(Mlp):
    """The same, and only tokens are summed."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return h.transpose(1, 2).reshape(h.shape).sum(1)


class Windows(Mlp):
    """One of the sizes that it is seen in is a tensor of one number."""

    def between(self, h: Tensor) -> Tensor:
        number = torch.div(h.size(1), 3, rounding_mode="trunc")
        return h.view(h.size(0), number, 3, h.size(2)).softmax(2).flatten(1, 2)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, list[dict[str, Any]]]] = {
    "spatial gate": (SpatialGate, "down.weight", [{"x": noise(2, LENGTH, WIDTH)}, {"x": noise(3, LENGTH, WIDTH)}]),
    "squares": (Squares, "q.weight", [{"x": noise(2, 5, WIDTH)}, {"x": noise(3, 7, WIDTH)}]),
    "involution": (Involution, "kernel.weight", [{"x": noise(2, 3, 8, 8)}, {"x": noise(3, 3, 6, 6)}]),
    "graph": (Graph, "up.weight", [{"x": noise(5, WIDTH), "edges": torch.tensor([[0, 1, 2, 4], [1, 2, 3, 0]])}]),
    "windows": (Windows, "up.weight", [{"x": noise(2, 6, WIDTH)}, {"x": noise(3, 9, WIDTH)}]),
    "rescaled": (Rescaled, "up.weight", [{"x": noise(2, 5, WIDTH)}, {"x": noise(3, 7, WIDTH)}]),
    "rescaled view": (RescaledView, "up.weight", [{"x": noise(2, 5, WIDTH)}]),
    "remembers": (Remembers, "", [{"x": noise(2, 5, WIDTH)}, {"x": noise(3, 7, WIDTH)}]),
    "asks width": (AsksWidth, "up.weight", [{"x": noise(2, 5, WIDTH)}, {"x": noise(3, 7, WIDTH)}]),
    "reordered": (Reordered, "down.weight", [{"x": noise(2, SOME, WIDTH)}, {"x": noise(3, SOME + 2, WIDTH)}]),
    "reordered sum": (ReorderedSum, "", [{"x": noise(2, SOME, WIDTH)}, {"x": noise(3, SOME + 2, WIDTH)}]),
    "constrained": (Constrained, "down.weight", [{"x": noise(2, 5, WIDTH)}]),
}
"""``(its class, a parameter that must be cut if any, inputs)``."""


def built(name: str, case: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    build, _, inputs = NETWORKS[name]
    return build(), inputs[case]


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_equal_on_the_inputs_it_was_planned_with_and_on_others(
    name: str, tp: int, run_ranks: Callable[..., list[Any]]
) -> None:
    plan = make_plan(*built(name), tp=tp)
    assert all(plan[must].layout.cut for must in [NETWORKS[name][1]] if must)
    assert emulate_module(*built(name), plan).equal
    for case in range(len(NETWORKS[name][-1])):
        assert run_ranks(difference, tp, __name__, plan.dumps(), name, case)[0] is None
