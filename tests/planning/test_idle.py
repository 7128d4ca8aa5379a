"""Ops whose results nothing uses bind no axis; what else they do still counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.analyze.test_flow import cut
from tests.equal import difference
from tests.zoo.frame import floats, seeded
from tpconvert.analyze.capture.run import capture
from tpconvert.planning import make_plan


class Twice(nn.Module):
    """Attention that makes scores beside the kernel that makes them again, and over the wrong dims at that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 3)) for f in (self.q, self.k, self.v))
        self.scores(q @ k.transpose(-2, -1))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.out(y.transpose(1, 2).flatten(2))

    def scores(self, found: Tensor) -> None:
        found.softmax(-1)


class Kept(Twice):
    """One that leaves them for whoever asks."""

    def scores(self, found: Tensor) -> None:
        self.last = found.softmax(-1)


class Asked(Twice):
    """One that looks at them."""

    def scores(self, found: Tensor) -> None:
        if found.softmax(-1).isnan().any():
            raise ValueError("no scores")


def built(core: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return seeded(lambda: globals()[core](12)), {"x": floats(2, 5, 12)}


def test_scores_that_nothing_uses_keep_no_heads_whole(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built("Twice"), tp=2)
    assert cut(plan) == {"q.weight", "k.weight", "v.weight", "out.weight"}
    assert run_ranks(difference, 2, __name__, plan.dumps(), "Twice")[0] is None


@pytest.mark.parametrize("core", ["Kept", "Asked"])
def test_scores_that_something_sees_do(core: str) -> None:
    assert not make_plan(*built(core), tp=2)["q.weight"].layout.cut


class Sizes(nn.Module):
    """A forward of which a draw, a write and a size have effects though nothing uses what they return."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        y = x + 0
        y[0] = 1
        flat = x.flatten()
        x.exp().sum(0)
        return y * torch.ones(flat.shape[0]).mean()


def test_what_has_an_effect_stays_recorded_and_calls_keep_their_places() -> None:
    module = nn.Sequential(Sizes(), Sizes())
    trace = capture(module, {"input": floats(2, 3)})
    ops = [n.meta["op"] for n in trace.nodes if n.meta["call"] is trace.calls[1]]
    assert ops == ["rand", "add", "__setitem__", "flatten", "ones", "mean", "mul"]
    at = {n: i for i, n in enumerate(trace.nodes)}
    for call in trace.calls[1:]:
        assert call.position <= min(at[n] for n in trace.nodes if n.meta["call"] is call)
        assert call.end == 1 + max(at[n] for n in trace.nodes if n.meta["call"] is call)
