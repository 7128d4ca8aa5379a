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
