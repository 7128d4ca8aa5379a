"""Plans are made in evaluation and held to what training does: another path, other readers, other statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.analyze.test_flow import cut, places
from tests.zoo.frame import floats, seeded
from tpconvert.parallel import Mesh
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank


class Mlp(nn.Module):
    """Two matrices, and between them what each test says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(22, 84), nn.Linear(84, 22)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(F.gelu(self.up(x))))


class Normalised(Mlp):
    """In training each row is divided by its length."""

    def between(self, h: Tensor) -> Tensor:
        return F.normalize(h, dim=-1) if self.training else h


class Centred(Mlp):
    """In training the mean is taken over the features instead of the words."""

    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(-1 if self.training else 1, keepdim=True)


class Scaled(Mlp):
    """In training the largest entry so far is kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.largest.mul_(0.9).add_(0.1 * h.abs().max())
        return h / self.largest


class Words(nn.Module):
    """Statistics over the features of each word: a batch norm whose channels are the words."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(22, 84), nn.BatchNorm1d(7), nn.Linear(84, 22)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))


class Auxiliary(nn.Module):
    """A head that only training has reads the value that the two matrices read."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.mlp, self.aux = first, Mlp(), nn.Linear(22, 22)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.mlp(h)
        return y + self.aux(h) if self.training else y


class Inner(Auxiliary):
    """The auxiliary head has two matrices of its own, which evaluation does not see."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(22))
        self.aux = Mlp()


class Groups(nn.Module):
    """Heads of one kind, of which evaluation runs the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Sequential(nn.LayerNorm(22), Mlp()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return sum(head(x) for head in (self.heads if self.training else self.heads[:1]))


class Drops(Mlp):
    """Dropout is called in training alone."""

    def between(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.25) if self.training else h


class Other(Mlp):
    """Another path in training, with the same axes."""

    def between(self, h: Tensor) -> Tensor:
        return h.square().sqrt() + h if self.training else h.abs() + h


class Rows(Mlp):
    """A mode that cannot run on one row."""

    def between(self, h: Tensor) -> Tensor:
        if self.training and len(h) < 4:
            raise ValueError("training needs four rows")
        return h


def proved(mesh: Mesh, build: Any, arguments: tuple[Any, ...], plan: str, rows: int = 5) -> str:
    """What differs; nothing when the converted model is equal."""
    result = compare_on_rank(seeded(lambda: build(*arguments)), {"x": floats(rows, 7, 22)}, Plan.loads(plan), mesh)
    return "" if result is None or result.equal else result.verdict()


def planned(build: Any, *arguments: Any) -> Plan:
    return make_plan(seeded(lambda: build(*arguments)), {"x": floats(3, 7, 22)}, tp=2)


@pytest.mark.parametrize("build", [Normalised, Centred, Scaled, Words])
def test_what_training_must_see_whole_stays_whole_with_the_reason(run_ranks, build) -> None:
    plan = planned(build)
    assert "up.weight" not in cut(plan)
    assert "training" in plan["up.weight"].reason or "statistics" in plan["up.weight"].reason
    assert run_ranks(proved, 2, build, (), plan.dumps())[0] == ""


def test_a_value_that_training_hands_to_more_modules_stays_whole(run_ranks) -> None:
    plan = planned(Auxiliary, nn.Linear(22, 22))
    assert "first.weight" not in cut(plan)
    assert run_ranks(proved, 2, Auxiliary, (nn.Linear(22, 22),), plan.dumps())[0] == ""


@pytest.mark.parametrize("build", [Inner, Drops, Other])
def test_another_path_that_the_plan_holds_on_is_cut(run_ranks, build) -> None:
    plan = planned(build)
    assert cut(plan) >= ({"mlp.up.weight", "mlp.down.weight"} if build is Inner else {"up.weight", "down.weight"})
    assert run_ranks(proved, 2, build, (), plan.dumps())[0] == ""


def test_what_training_alone_runs_has_each_collective_once(run_ranks) -> None:
    plan = planned(Groups)
    assert cut(plan) >= {"heads.1.1.up.weight", "heads.1.1.down.weight"}
    found = sorted((b.kind, b.module) for b in plan.boundaries)
    assert found == [("copy", "heads.0.1.up"), ("copy", "heads.1.1.up"), ("reduce", "")]
    assert run_ranks(proved, 2, Groups, (), plan.dumps())[0] == ""


def test_a_reader_that_only_training_has_does_not_share_the_copy() -> None:
    plan = planned(Inner)
    assert ("mlp.up", "input") in places(plan, "copy")
    assert ("first", "output") not in places(plan, "copy")


def test_ranks_drop_apart_where_dropout_is_called_in_training_alone() -> None:
    assert [(s.module, s.side, s.cut) for s in planned(Drops).switches] == [("", "input", True), ("", "output", False)]


def test_a_forward_that_cannot_run_in_training_is_noted() -> None:
    notes = " ".join(planned(Rows).notes)
    assert "planned in evaluation alone" in notes
    assert "training needs four rows" in notes


class Rescales(Mlp):
    """Weights that are scaled in place by the first call in each mode, and a flag that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.scaled == self.training:
            with torch.no_grad():
                self.down.weight.mul_(4.0 if self.training else 0.25)
            self.scaled = not self.training
        return super().forward(x)


def test_a_forward_that_changes_its_weights_is_planned_from_the_same_state_each_time() -> None:
    module = seeded(Rescales)
    weight = module.down.weight.clone()
    plan = make_plan(module, {"x": floats(3, 7, 22)}, tp=2)
    assert cut(plan) >= {"up.weight", "down.weight"}
    assert not module.scaled
    assert torch.equal(module.down.weight, weight)
