"""Splits of cut values along dims that are not cut, in forwards that are written anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.parallel import Mesh
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank


class Streams(nn.Module):
    """Heads whose number stands in the code, over a sequence that is three streams one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h.view(h.shape[0], -1, 6, 8).transpose(1, 2).tanh()
        main, *others = h.chunk(3, 2)
        return self.down((main * others[0] + others[1]).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Makes the streams."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.core = nn.Embedding(40, 24), Streams()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.core(torch.cat([x, x * 2, x * 3], 1))


def built() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Model(), {"input_ids": torch.randint(40, (4, 7))}


def equal(mesh: Mesh, planned: str) -> Any:
    result = compare_on_rank(*built(), Plan.loads(planned), mesh)
    return result and (result.equal, result.verdict(), {c.mode for c in result.checks})


def test_a_split_of_the_sequence_follows_its_length(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(), tp=2)
    assert plan.rewrites and plan["core.up.weight"].layout.dim == 0
    same, verdict, modes = run_ranks(equal, 2, plan.dumps())[0]
    assert same, verdict
    assert "other size" in modes
