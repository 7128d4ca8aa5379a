"""The lockstep run takes what was recorded where another run of the same forward need not be the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpconvert.analyze.emulate.ties import settled
from tpconvert.planning import make_plan
from tpconvert.verify import emulate_module

ROWS = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Mlp(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Drawing(nn.Module):
    """Adds noise, and picks rows at random, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        picked = torch.multinomial(torch.ones(3), 2)
        return self.mlp(x[picked] + torch.empty_like(x[picked]).normal_()) * torch.rand(())


class Filling(nn.Module):
    """Memory that is written to piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(2, 3, 8, dtype=torch.long)
        out[0] = 1
        out[1] = 2
        return self.mlp(x + out.sum(0))


class Sampling(nn.Module):
    """Noise that a custom function draws."""

    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.empty_like(x).normal_()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.zeros_like(grad)

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.Noise.apply(x.detach()))


@pytest.mark.parametrize("kind", [Drawing, Filling, Sampling])
def test_what_a_run_makes_of_nothing_is_what_was_recorded(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind()
    torch.empty(2, 3, 8, dtype=torch.long).fill_(-77)  # what freed memory may hold
    plan = make_plan(module, {"x": ROWS}, tp=2)
    assert plan["mlp.up.weight"].layout.cut
    result = emulate_module(module, {"x": ROWS}, plan)
    assert result.equal, result.verdict()


class Node:
    def __init__(self, op: str) -> None:
        self.meta = {"op": op}


def decided(op: str, x: Tensor, out: Any, want: Any, **bound: Any) -> Any:
    wanted = {None: want} if isinstance(want, Tensor) else dict(enumerate(want))
    return settled(Node(op), bound, (x, *bound.values()), out, wanted)  # type: ignore[arg-type]


def test_equal_values_are_taken_in_the_recorded_order_and_others_are_not() -> None:
    x = torch.tensor([[1.0, 2.0, 2.0 - 1e-15, 0.0]], dtype=torch.float64)
    mine = x.topk(2)
    values, places = decided("topk", x, mine, [mine.values, torch.tensor([[2, 1]])], k=2)
    assert places.tolist() == [[2, 1]] and torch.equal(values, x[:, [2, 1]])
    kept = decided("topk", x, mine, [mine.values, torch.tensor([[1, 0]])], k=2)
    assert kept[1].tolist() == [[1, 2]]
    flat = decided("argmax", x, x.argmax(), torch.tensor(2))
    assert flat.item() == 2


def test_a_comparison_of_equal_values_is_taken_as_recorded_and_another_is_not() -> None:
    x = torch.tensor([0.5, 0.5 + 1e-15], dtype=torch.float64)
    assert decided("__gt__", x, x > 0.5, torch.tensor([True, True]), other=0.5).tolist() == [True, True]
    assert decided("__gt__", x, x > 0.4, torch.tensor([False, True]), other=0.4).tolist() == [True, True]


class Casting(nn.Module):
    """A cast to the dtype a value has is the value itself: what is written into it is written into both."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            normed = x.float() * x.float().square().mean(-1, keepdim=True).rsqrt()
            return (normed * self.weight.float()).type_as(x)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), self.Norm()
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.down(self.up(x).relu()))
        h *= self.scale
        h += x
        return h


def test_what_is_written_into_a_cast_that_changes_nothing_is_written_into_both() -> None:
    torch.manual_seed(0)
    module, inputs = Casting(), {"x": torch.randn(2, 5, 8)}
    assert emulate_module(module, inputs, make_plan(module, inputs, tp=2)).equal


class Cancelling(nn.Module):
    """Adds a difference of equal numbers: nothing but the rounding of two sums."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h, bias = torch.relu(self.mlp.up(x)), self.mlp.down.bias
        out = self.mlp.down(h)
        return out + (out - ((self.mlp.down(h * 3) - bias) / 3 + bias))


def test_what_is_rounding_alone_is_held_to_what_rounding_does() -> None:
    torch.manual_seed(0)
    plan = make_plan(Cancelling(), {"x": ROWS}, tp=2)
    assert plan["mlp.up.weight"].layout.cut
    result = emulate_module(Cancelling(), {"x": ROWS}, plan)
    assert result.equal, result.verdict()
    usual = result.tolerance.bound
    assert any(usual < c.error <= c.bound and c.kind == "op" for c in result.checks)
    assert all(c.bound == usual for c in result.checks if c.kind in ("output", "gradient"))
