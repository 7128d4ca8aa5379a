"""Random numbers outside dropout in training: drawn alike where values are whole, apart where they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpconvert.parallel import Mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

GENERATOR = torch.Generator().manual_seed(0)


def gumbel(h: Tensor) -> Tensor:
    """The noise of a softmax that draws."""
    return h - torch.empty_like(h).exponential_().log()


class Net(nn.Module):
    """Draws for hidden features as ``draw`` does, between two layers, and drops entries of the whole output."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.draw = nn.Linear(24, 43), nn.Linear(43, 24), nn.Dropout(0.5), draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        seen = {
            "none": lambda: h,
            "dropout": lambda: F.dropout(h, 0.5, True),
            "module": lambda: self.drop(h),
            "in place": lambda: F.dropout(h * 1.0, 0.5, True, inplace=True),
            "alpha": lambda: F.alpha_dropout(h, 0.5, True),
            "randn_like": lambda: h + torch.randn_like(h),
            "bernoulli": lambda: h * torch.bernoulli(h.sigmoid()),
            "gumbel": lambda: gumbel(h),
            "rand and dropout": lambda: F.dropout(h, 0.5, True) * torch.rand(()),
            "shape": lambda: h + torch.randn(h.shape),
            "channels": lambda: F.dropout1d(h, 0.5, True),
            "generator": lambda: h + torch.rand_like(h, generator=GENERATOR),
        }[self.draw]()
        self.seen = seen.detach()
        return F.dropout(self.down(F.gelu(seen)), 0.5, True)


X = torch.randn(4, 64, 24, generator=torch.Generator().manual_seed(0))


def planned(draw: str) -> Plan:
    torch.manual_seed(0)
    return make_plan(Net(draw), {"x": X}, tp=2)


def replicas(mesh: Mesh, draw: str, plan: str, mode: str) -> tuple[bool, float]:
    """Whether a rank's output is that of the first, and what part of the hidden features it shares with the other."""
    torch.manual_seed(0)
    model = parallelize(Net(draw), Plan.loads(plan), mesh).train(mode == "training")
    model.drop.train(mode != "evaluation")
    with torch.no_grad():  # what is drawn for a rank's part shows where the parts are alike
        model.up.weight.zero_()
        model.up.bias.fill_(1.0)
    torch.manual_seed(1)
    out = model(X).detach()
    dist.broadcast(first := out.clone(), 0, group=mesh.group)
    after = torch.rand(3)
    dist.broadcast(other := after.clone(), 0, group=mesh.group)
    mine = getattr(model, "seen", X)[..., :21].contiguous()
    dist.broadcast(theirs := mine.clone(), 0, group=mesh.group)
    same = torch.equal(out, first) and torch.equal(after, other)
    return same, float((mine == theirs).float().mean())


CUT = ["dropout", "in place", "alpha", "randn_like", "bernoulli", "gumbel"]


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("draw", CUT)
def test_parts_draw_apart_and_whole_values_alike(draw: str, mode: str, run_ranks: Callable[..., list[Any]]) -> None:
    plan = planned(draw)
    assert plan["up.weight"].layout.cut
    (_, _), (same, shared) = run_ranks(replicas, 2, draw, plan.dumps(), mode)
    assert same and shared < 0.7


def test_dropout_modules_alone_in_training_draw_as_in_training(run_ranks: Callable[..., list[Any]]) -> None:
    plan = planned("module")
    assert not any(s.always for s in plan.switches)
    (_, _), (same, shared) = run_ranks(replicas, 2, "module", plan.dumps(), "dropout in training")
    assert same and shared < 0.7
    (_, _), (same, shared) = run_ranks(replicas, 2, "module", plan.dumps(), "evaluation")
    assert same and shared == 1.0


def test_evaluation_without_draws_leaves_the_generator_as_the_whole_model_does() -> None:
    assert not any(s.always for s in planned("module").switches)
    assert all(s.always for s in planned("dropout").switches)


@pytest.mark.parametrize("draw", ["rand and dropout", "generator"])
def test_draws_that_cannot_be_told_apart_leave_their_axis_whole(draw: str) -> None:
    verdict = planned(draw)["up.weight"]
    assert not verdict.layout.cut and "draws numbers" in verdict.reason


def test_a_mask_for_all_of_a_channel_is_one_mask_on_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    plan = planned("channels")
    assert plan["up.weight"].layout.cut
    (_, _), (same, shared) = run_ranks(replicas, 2, "channels", plan.dumps(), "evaluation")
    assert same and shared == 1.0


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_numbers_of_a_given_shape_are_drawn_whole(mode: str, run_ranks: Callable[..., list[Any]]) -> None:
    (_, _), (same, _) = run_ranks(replicas, 2, "shape", planned("shape").dumps(), mode)
    assert same
