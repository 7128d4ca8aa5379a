"""Spreads over a cut width: standard deviations and variances are means that ranks sum their parts of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.analyze.test_flow import cut
from tests.equal import difference
from tests.zoo.frame import Framed, floats, seeded
from tpconvert.analyze.capture.parts import spread
from tpconvert.planning import make_plan


class Sparse(nn.Module):
    """An mlp that keeps what lies far enough above its mean, as a check of the rate says it may."""

    def __init__(self, width: int, rate: float = 0.4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        rate = torch.tensor(self.rate, dtype=x.dtype)
        if not (rate < 1).all():
            raise ValueError("no rate")
        h = self.gate(x)
        kept = h.mean(-1, keepdim=True) + rate * self.spread(h)
        return self.down(torch.relu(h - kept))

    def spread(self, h: Tensor) -> Tensor:
        return torch.std(h, dim=-1, keepdim=True, unbiased=False)


class Varying(Sparse):
    def spread(self, h: Tensor) -> Tensor:
        return torch.sqrt(h.var((-1,), keepdim=True, correction=0) + 1e-3)


class Unbiased(Sparse):
    """A spread that divides by another number than there are entries."""

    def spread(self, h: Tensor) -> Tensor:
        return h.std(-1, keepdim=True)


class Sized(Sparse):
    """A forward with a question that a longer input may answer otherwise."""

    def spread(self, h: Tensor) -> Tensor:
        found = super().spread(h)
        return 2 * found if (torch.arange(h.shape[1]) > 100).any() else found


class Drawn(Sparse):
    """One with a question that chance answers."""

    def spread(self, h: Tensor) -> Tensor:
        found = super().spread(h)
        return 2 * found if (torch.bernoulli(torch.full((1,), 0.5)) > 2).any() else found


def built(core: str) -> tuple[nn.Module, dict[str, Tensor]]:
    x = floats(2, 5, 12)
    x[1, 2] = 0  # where the spread is zero, and has no gradient
    return seeded(lambda: Framed(globals()[core](12), 12) if core != "Sparse" else Sparse(12)), {"x": x}


@pytest.mark.parametrize("core", ["Sparse", "Varying"])
def test_a_spread_over_a_cut_width_is_summed(core: str, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(core), tp=2)
    assert {n.removeprefix("core.") for n in cut(plan)} >= {"gate.weight", "down.weight"}
    assert run_ranks(difference, 2, __name__, plan.dumps(), core)[0] is None


def test_a_spread_that_divides_by_another_number_stays_whole() -> None:
    plan = make_plan(*built("Unbiased"), tp=2)
    assert "std over this dim needs the other ranks' values" in plan["core.gate.weight"].reason


@pytest.mark.parametrize("core", ["Sized", "Drawn"])
def test_a_question_about_more_than_numbers_of_the_forward_is_one_of_each_call(core: str) -> None:
    plan = make_plan(*built(core), tp=2)
    assert "it branches on values (__bool__)" in plan["core.gate.weight"].reason


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [1, (0, 2), [-1]])
@pytest.mark.parametrize("name", ["std", "var"])
def test_a_spread_is_what_torch_gives(name: str, dim: Any, keepdim: bool) -> None:
    x = floats(3, 4, 5).double().requires_grad_()
    whole = getattr(torch, name)(x, dim, unbiased=False, keepdim=keepdim)
    parts = spread(name, x, dim, correction=0, keepdim=keepdim)
    assert parts is not None
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    mine, theirs = (torch.autograd.grad(t.sum(), x)[0] for t in (parts, whole))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_spread_of_equal_entries_has_no_gradient() -> None:
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    parts = spread("std", x, -1, False)
    assert parts is not None
    assert torch.equal(torch.autograd.grad(parts.sum(), x)[0], torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(torch.autograd.grad(x.std(-1, False).sum(), x)[0], torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("args", [(), (1,), (1, True), (None, False), (False,)])
def test_other_spreads_are_left_as_they_are(args: tuple[Any, ...]) -> None:
    assert spread("std", floats(2, 3), *args) is None
