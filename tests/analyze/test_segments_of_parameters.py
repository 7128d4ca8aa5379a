"""A parameter in segments, of which only some meet cut values: its gradient is summed over all of it or not at all."""

from __future__ import annotations

import torch
from torch import nn

from tpconvert.planning import make_plan
from tpconvert.verify import emulate_module


class Gates(nn.Module):
    """Two gates from one bias: one scales cut values here, the other is returned and scales whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(2, 1))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.base.split([1, 1])
        return torch.sigmoid(first) * hidden, torch.sigmoid(second)


class Gated(nn.Module):
    """Linear, gate, linear; then the other gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gates, self.down = nn.LayerNorm(24), nn.Linear(24, 44), Gates(), nn.Linear(44, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, gate = self.gates(self.up(self.norm(x)).relu())
        return x + gate * self.down(hidden)


def test_segments_with_gradients_of_both_kinds_are_never_summed_alike() -> None:
    torch.manual_seed(0)
    module, inputs = Gated(), (torch.randn(3, 24),)
    plan = make_plan(module, inputs, tp=2)
    result = emulate_module(module, inputs, plan)
    assert result.equal, result.verdict()
    assert not (plan["up.weight"].layout.cut and plan["gates.base"].sum_grad)
