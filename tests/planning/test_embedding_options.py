"""Options of an embedding whose effect needs all words on one rank: its words stay together, its width may be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpconvert.parallel import Mesh
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank, emulate_module


class Gated(nn.Module):
    """A table for the input, and one that scales the hidden features."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.gates = nn.Embedding(97, 24, **options), nn.Embedding(89, 44, **options)
        self.up, self.down = nn.Linear(24, 44), nn.Linear(44, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.words(ids))) * self.gates(ids))


def built(**options: Any) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Gated(**options), (torch.randint(0, 89, (2, 65)),)


def equal(mesh: Mesh, planned: str, options: dict[str, Any]) -> Any:
    result = compare_on_rank(*built(**options), Plan.loads(planned), mesh)
    return result and (result.equal, result.verdict())


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_an_option_of_the_gradient_keeps_the_words_together(option: str, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(**{option: True}), tp=2, overrides=["words=whole"])
    assert plan["gates.weight"].layout.dim == 1
    plan = make_plan(*built(**{option: True}), tp=2)
    assert plan["words.weight"].layout.dim != 0
    assert emulate_module(*built(**{option: True}), plan).equal
    same, verdict = run_ranks(equal, 2, plan.dumps(), {option: True})[0]
    assert same, verdict
    assert make_plan(*built(), tp=2)["words.weight"].layout.dim == 0, "without the option words are dealt"


def test_rows_that_are_scaled_to_a_norm_stay_whole(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(max_norm=0.5), tp=2)
    for name in ("words.weight", "gates.weight"):
        assert not plan[name].layout.cut and "rows of the table are scaled in place" in plan[name].reason
    same, verdict = run_ranks(equal, 2, plan.dumps(), {"max_norm": 0.5})[0]
    assert same, verdict
