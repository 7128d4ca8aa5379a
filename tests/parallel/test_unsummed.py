"""A column-parallel layer that is given a value by another way than when the model was planned."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.parallel.same import train_alike
from tpconvert.errors import PlanError
from tpconvert.parallel import parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan


class Turns(nn.Module):
    """A module hands the first turn what its layers share; in others the forward itself does."""

    def __init__(self, turns=1):
        super().__init__()
        self.into, self.out = nn.LayerNorm(8), nn.Linear(8, 4)
        self.gate, self.up, self.down = nn.Linear(8, 64), nn.Linear(8, 64), nn.Linear(64, 8)
        self.turns = turns

    def forward(self, x):
        x = self.into(x)
        for _ in range(self.turns):
            x = torch.tanh(self.down(F.silu(self.gate(x)) * self.up(x)))
        return self.out(x)


def planned(turns=1):
    return make_plan(Turns(turns).double(), floats(0), tp=2, overrides=["out.*=whole"]).dumps()


def floats(seed):
    return {"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


def more_turns(mesh, plan, turns):
    model = parallelize(Turns().double(), Plan.loads(plan), mesh)
    model.turns = turns
    with torch.no_grad():
        model(**floats(1))  # whose gradients are not asked for
    out = model(**floats(1))
    if turns == 1:
        out.sum().backward()
        return
    with pytest.raises(PlanError, match=r"^(gate|up): it was given a value whose gradient nobody sums over ranks"):
        out.sum().backward()


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_turn_that_was_not_planned_is_refused_where_gradients_would_be_wrong(run_ranks, turns):
    plan = planned()
    assert any(b.kind == "copy" and b.module == "into" for b in Plan.loads(plan).boundaries)
    run_ranks(more_turns, 2, plan, turns)


def alike(mesh, turns):
    train_alike(mesh, lambda: Turns(turns), lambda model, tp: Plan.loads(planned(turns)), floats)


@pytest.mark.parametrize("turns", [1, 2])
def test_turns_that_were_planned_train_like_the_whole_model(run_ranks, turns):
    run_ranks(alike, 2, turns)


class Unused(Turns):
    """Makes a turn of which nothing is returned, so no gradient comes back and none has to be summed."""

    def forward(self, x):
        x = super().forward(x)
        self.kept = self.down(F.silu(self.gate(y := self.into(torch.tanh(x).repeat(1, 2)))) * self.up(y))
        self.again = self.up(torch.tanh(self.kept))
        return x


def trains(mesh):
    train_alike(mesh, Unused, lambda model, tp: make_plan(Unused().double(), floats(0), tp=2), floats)


def test_what_no_gradient_comes_back_from_is_not_refused(run_ranks):
    run_ranks(trains, 2)
