"""A module that returns what it was given hands the copy on, if there is one at its input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank


class Fork(nn.Module):
    """Two projections of a value, and the value."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 24), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate(x), self.up(x), x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.fork, self.down = nn.Embedding(33, 8), Fork(), nn.Linear(24, 8)

    def forward(self, ids: Tensor) -> Tensor:
        gate, up, same = self.fork(self.embed(ids).tanh())
        return self.down(torch.relu(gate) * up) + same.softmax(-1)


IDS = {"ids": torch.randint(33, (3, 7), generator=torch.Generator().manual_seed(0))}


def compared(mesh: Any, plan: str) -> Any:
    result = compare_on_rank(Model(), IDS, Plan.loads(plan), mesh)
    return None if result is None else (result.equal, result.verdict())


def test_a_value_that_is_handed_on_is_copied_further_in(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Model(), IDS, tp=2)
    assert plan["fork.up.weight"].layout.cut
    copies = {b.module for b in plan.boundaries if b.kind == "copy" and b.side == "input"}
    assert copies == {"fork.gate", "fork.up"}
    equal, verdict = run_ranks(compared, 2, plan.dumps())[0]
    assert equal, verdict
