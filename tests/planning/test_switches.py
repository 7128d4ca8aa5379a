"""One dropout module that drops entries of cut values here and of whole ones there: each draws as it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tpconvert.parallel import Mesh
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan, Switch
from tpconvert.verify import compare_on_rank


class FeedForward(nn.Module):
    """The same dropout after the activation, which is cut, and after the output, which is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down, self.drop = nn.Linear(24, 44), nn.GELU(), nn.Linear(44, 24), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(self.drop(self.act(self.up(x)))))


class Stack(nn.Module):
    """Two of them with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([FeedForward(), FeedForward()]), nn.LayerNorm(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(x + layer(x))
        return x


def built() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Stack(), (torch.randn(3, 7, 24),)


def equal(mesh: Mesh, planned: str) -> Any:
    """Whether the ranks' model is equal to the whole one, and its whole values alike in training."""
    result = compare_on_rank(*built(), Plan.loads(planned), mesh)
    return result and (result.equal, result.verdict())


@pytest.mark.parametrize("tp", [2, 3])
def test_a_dropout_used_for_both_kinds_is_switched_between_its_calls(
    tp: int, run_ranks: Callable[..., list[Any]]
) -> None:
    plan = make_plan(*built(), tp=tp)
    assert plan["layers.0.up.weight"].layout.cut
    assert {s.module for s in plan.switches}.isdisjoint({"layers.0.drop", "layers.1.drop"})
    assert Switch("layers.0.down", "output", False) in plan.switches
    same, verdict = run_ranks(equal, tp, plan.dumps())[0]
    assert same, verdict


class Attended(nn.Module):
    """Attention by hand, whose rate is nought in evaluation, over heads that ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(*x.shape[:2], 3, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(2, 3) / 8**0.5, -1)
        weights = nn.functional.dropout(weights, p=0.4 if self.training else 0.0, training=self.training)
        return x + self.drop(self.o((weights @ v).transpose(1, 2).flatten(2)))


def equal_attended(mesh: Mesh, planned: str) -> Any:
    torch.manual_seed(0)
    result = compare_on_rank(Attended(), (torch.randn(3, 7, 24),), Plan.loads(planned), mesh)
    return result and (result.equal, result.verdict())


def test_a_rate_that_is_nought_in_evaluation_is_a_draw_in_training(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Attended(), (torch.randn(3, 7, 24),), tp=2)
    assert plan["o.weight"].layout.cut and plan.switches
    same, verdict = run_ranks(equal_attended, 2, plan.dumps())[0]
    assert same, verdict
