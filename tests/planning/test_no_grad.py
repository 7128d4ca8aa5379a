"""What a forward computes under no_grad stays out of differentiation, also where its forward is written anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tpconvert.parallel import Mesh
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank, emulate_module


class Biased(nn.Module):
    """Attention with literal sizes, whose bias is looked up without gradients from a table that also has some."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.table, self.scale = nn.Parameter(torch.randn(4, 15)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, 6).permute(2, 0, 3, 1, 4)
        place = torch.arange(t, device=x.device)
        with torch.no_grad():
            bias = self.table[:, (place[:, None] - place) + 7] * self.scale[:, None, None]
        scores = q @ k.transpose(-1, -2) + bias
        mixed = (scores.softmax(-1) @ v) * self.scale[:, None, None]
        return x + self.out(mixed.transpose(1, 2).reshape(b, t, 24))


def built() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Biased(), (torch.randn(2, 7, 24),)


def equal(mesh: Mesh, planned: str) -> Any:
    """Whether the ranks' model is equal to the whole one."""
    result = compare_on_rank(*built(), Plan.loads(planned), mesh)
    return result and (result.equal, result.verdict())


@pytest.mark.parametrize("tp", [2, 4])
def test_what_ran_under_no_grad_gets_no_gradient(tp: int, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(), tp=tp)
    assert plan.rewrites and plan["table"].layout.cut
    assert emulate_module(*built(), plan).equal
    same, verdict = run_ranks(equal, tp, plan.dumps())[0]
    assert same, verdict


class Around(nn.Module):
    """A forward with literal sizes, which calls a child and counts on a buffer without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(24, 48), nn.Linear(24, 48), nn.Linear(48, 24)
        self.register_buffer("mean", torch.zeros(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).view(*x.shape[:-1], 6, 8).tanh().flatten(-2)
        with torch.no_grad():
            gate = self.gate(x)
            self.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        return self.down(h * gate + self.mean)


def around(mesh: Mesh, planned: str) -> Any:
    torch.manual_seed(0)
    result = compare_on_rank(Around(), (torch.randn(2, 7, 24),), Plan.loads(planned), mesh)
    return result and (result.equal, result.verdict())


def test_a_child_and_a_buffer_that_are_used_without_gradients_get_none(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Around(), (torch.randn(2, 7, 24),), tp=2)
    (rewrite,) = plan.rewrites
    off = [node["target"] for node in rewrite.nodes if node.get("grad") is False]
    assert "gate" in off, off
    same, verdict = run_ranks(around, 2, plan.dumps())[0]
    assert same, verdict


class Cast(nn.Module):
    """A forward with literal sizes, of which a part is kept out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(24, 48), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).view(*x.shape[:-1], 6, 8).tanh().flatten(-2)
        with torch.autocast("cpu", enabled=False):
            gate = self.gate(x)
        return self.down(h * gate)


def test_a_forward_that_turns_autocast_off_is_not_written_anew() -> None:
    plan = make_plan(Cast(), (torch.randn(2, 7, 24),), tp=2)
    assert not plan.rewrites
    assert "it turns autocast on or off, or asks whether it is on" in plan["up.weight"].reason
