"""A plan is held to what a forward does without gradients, where it asks for them: while it is captured there are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.analyze.test_flow import cut
from tests.zoo.frame import floats, seeded
from tpconvert.analyze.trace.call import Call
from tpconvert.parallel import Mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.planning.make import captured
from tpconvert.spec.plan import Plan

WIDTH = 12
ASKED: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "input": lambda x, h: x.requires_grad,
    "value": lambda x, h: h.requires_grad,
    "leaf": lambda x, h: not h.is_leaf,
    "grad mode": lambda x, h: torch.is_grad_enabled(),
    "inference": lambda x, h: not torch.is_inference_mode_enabled(),
}
"""What is true wherever a forward is captured."""


class Asking(nn.Module):
    """A cut width, of which the side without gradients takes the mean, or with ``harmless`` twice each entry."""

    def __init__(self, kind: str, harmless: bool) -> None:
        super().__init__()
        self.kind, self.harmless = kind, harmless
        self.up, self.down = nn.Linear(WIDTH, 28), nn.Linear(28, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if ASKED[self.kind](x, h):
            return self.down(h.tanh())
        return self.down(2 * h if self.harmless else h - h.mean(-1, keepdim=True))


def built(kind: str, harmless: bool) -> nn.Module:
    return seeded(lambda: Asking(kind, harmless)).double()


def difference(mesh: Mesh, plan: str, kind: str, harmless: bool) -> float:
    """How far a converted model is from the whole one, with gradients and without, in both modes."""
    whole = built(kind, harmless)
    local = parallelize(copy.deepcopy(whole), Plan.loads(plan), mesh)
    found = 0.0
    for without in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for training in (False, True):
            with without():
                x = floats(2, 6, WIDTH).double()
                for given in (x, x.clone().requires_grad_()):
                    found = max(found, (whole.train(training)(given) - local.train(training)(given)).abs().max().item())
    return found


@pytest.mark.parametrize("harmless", [False, True])
@pytest.mark.parametrize("kind", ASKED)
def test_a_model_is_equal_with_gradients_and_without(
    kind: str, harmless: bool, run_ranks: Callable[..., list[Any]]
) -> None:
    plan = make_plan(built(kind, harmless), {"x": floats(2, 6, WIDTH).double()}, tp=2)
    assert ("up.weight" in cut(plan)) is harmless
    assert harmless or "takes another path with False at test_graded.py:" in plan["up.weight"].reason or kind in (
        "leaf", "inference"
    )  # fmt: skip
    assert max(run_ranks(difference, 2, plan.dumps(), kind, harmless)) < 1e-12


def calls(forward: Callable[[Tensor], Tensor]) -> list[Call]:
    module = nn.Identity()
    module.forward = forward
    return captured(module, (floats(2, WIDTH),)).calls


def test_a_forward_that_fills_a_tensor_itself_is_captured() -> None:
    """Those functions are called by keywords alone."""
    (call,) = calls(lambda x: x * torch.nn.init.constant_(torch.empty(3, WIDTH), 2.0).sum(0))
    assert call.answers == []


def test_what_torch_asks_for_is_no_question_of_the_forwards() -> None:
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    trace = captured(attention, (floats(2, 3, WIDTH),) * 3)
    assert [call.answers for call in trace.calls] == [[]] * len(trace.calls)
    assert captured(nn.Dropout(0.1), (floats(2, WIDTH),)).calls[0].answers == []
