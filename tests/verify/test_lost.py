"""Gradients that the whole model itself has no numbers for, in a call that hides padding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank


class Hiding(nn.Module):
    """A root whose gradient is not a number where it is of nothing, which is then left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(33, 8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out = self.down(torch.relu(self.up(self.embed(input_ids))))
        if attention_mask is None:
            return out
        seen = attention_mask.bool()[..., None]
        return torch.where(seen, (out.square() * seen).sqrt(), 0)


IDS = {"input_ids": torch.randint(33, (2, 9), generator=torch.Generator().manual_seed(0))}


def compared(mesh: Any, plan: str) -> Any:
    result = compare_on_rank(Hiding(), IDS, Plan.loads(plan), mesh)
    return None if result is None else (result.equal, result.verdict(), result.notes)


def test_gradients_that_are_no_numbers_with_padding_are_noted(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Hiding(), IDS, tp=2)
    assert plan["up.weight"].layout.cut
    equal, verdict, notes = run_ranks(compared, 2, plan.dumps())[0]
    assert equal, verdict
    assert any("were not compared: the whole model itself has none for" in note for note in notes), notes
    assert all(notes), notes


class OnTheLeft(Hiding):
    """No gradient where no word is seen up to a place, which none is that padding at the end hides."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out = super().forward(input_ids)
        if attention_mask is None:
            return out
        seen = attention_mask.cumsum(1)[..., None] > 0
        return torch.where(seen, (out.square() * seen).sqrt(), 0)


def compared_on_the_left(mesh: Any, plan: str) -> Any:
    result = compare_on_rank(OnTheLeft(), IDS, Plan.loads(plan), mesh)
    return None if result is None else (result.equal, [(c.kind, c.mode) for c in result.checks], result.notes)


def test_gradients_of_padding_at_the_end_are_compared_where_padding_on_the_left_has_none(
    run_ranks: Callable[..., list[Any]],
) -> None:
    equal, checks, notes = run_ranks(compared_on_the_left, 2, make_plan(OnTheLeft(), IDS, tp=2).dumps())[0]
    with_mask = [kind for kind, mode in checks if mode == "with attention_mask"]
    assert equal and with_mask.count("gradient") >= 4, checks
    assert sum("were not compared" in note for note in notes) == 1 and all(notes), notes
