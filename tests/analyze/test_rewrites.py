"""Forwards as data: what can be written, what is refused, and what differs in training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.analyze.test_edits import Literal
from tests.analyze.test_flow import core, cut, planned
from tests.models import MODELS
from tests.zoo.frame import Framed, floats, seeded
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan


def nodes(plan: Plan, op: str) -> list[dict]:
    """The nodes of one kind in the only rewrite."""
    (rewrite,) = plan.rewrites
    return [n for n in rewrite.nodes if n["op"] == op]


class Asks(Literal):
    """A forward that branches on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if (x > 100).any() else x)


class Loops(Literal):
    """A forward shaped by values."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[0, :, 0] > -100).nonzero()[:, 0]
        return super().forward(x[:, rows])


class TrainsElsewhere(Literal):
    """A forward that does something more in training."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0.1 * y.tanh() if self.training else y


class Object(Literal):
    """A forward that is called with an object."""

    def forward(self, x: Tensor, how: object = None) -> Tensor:
        return super().forward(x)


class Passes(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Object(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, object())


@pytest.mark.parametrize(
    ("make", "parameter", "why"),
    [
        (Asks, "core.qkv.weight", "it branches on values (__bool__)"),
        (Loops, "core.qkv.weight", "its shapes hang on values"),
        (TrainsElsewhere, "core.qkv.weight", "it takes another path in training"),
        (Passes, "core.inner.qkv.weight", "its forward is given a object"),
    ],
)
def test_a_forward_that_is_not_one_and_the_same_is_refused_with_the_reason(make, parameter: str, why: str) -> None:
    plan = core(make)
    assert parameter not in cut(plan)
    assert plan.rewrites == ()
    reason = plan[parameter].reason
    assert "and its forward cannot be written anew" in reason or "takes another path in training, which" in reason
    assert why in plan[parameter].reason
    assert "head.weight" in cut(plan)


class Drops(Literal):
    """Dropout inside the forward that has to be rewritten."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 12, 5).transpose(1, 2) for t in self.qkv(x).split(60, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25 if self.training else 0.0)
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.125, self.training)


def test_what_differs_in_training_is_a_choice_in_the_written_forward() -> None:
    module = seeded(lambda: Framed(Drops(22), 22))
    plan = make_plan(module, {"x": floats(3, 7, 22)}, tp=2)
    assert [n["args"] for n in nodes(plan, "training_else")] == [[0.25, 0.0], [True, False]]


def test_sizes_that_count_something_cut_are_local_and_others_are_read_from_shapes() -> None:
    plan = core(Literal)
    local = nodes(plan, "local")
    assert {n["value"] for n in local} == {60, 12}
    assert all(n["blocks"] == [[12, 5]] or n["blocks"] == [[12, 1]] for n in local)
    assert {(n["args"][0]["$"], n["args"][1]) for n in nodes(plan, "size")} == {("args.0", 0), ("args.0", 1)}


def test_children_stay_calls_so_that_their_hooks_run() -> None:
    plan = core(Literal)
    assert [n["target"] for n in nodes(plan, "module")] == ["qkv", "out"]
    assert ("reduce", "core.out") in {(b.kind, b.module) for b in plan.boundaries}


class Follows(Literal):
    """A dtype that is asked of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().to(x.dtype)


def test_a_dtype_that_follows_the_models_is_read_again() -> None:
    plan = core(Follows)
    reads = [n for n in nodes(plan, "call") if n["target"] == "torch.Tensor.dtype"]
    assert len(reads) == 1
    assert reads[0]["args"] == [{"$": "args.0"}]


@pytest.mark.parametrize("name", ["nanogpt_literal", "gqa_few", "mha_cross_batch_first"])
def test_a_plan_with_written_forwards_survives_its_own_text(name: str) -> None:
    plan = planned(MODELS[name](), 4)
    assert plan.rewrites
    assert Plan.loads(plan.dumps()) == plan


def test_calls_of_one_module_that_differ_are_refused() -> None:
    class Twice(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = Scaled(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, 1.0) + self.inner(x, 2.0)

    plan = core(Twice)
    assert "core.inner.qkv.weight" not in cut(plan)
    assert "its calls differ" in plan["core.inner.qkv.weight"].reason


class Scaled(Literal):
    def forward(self, x: Tensor, by: float) -> Tensor:
        return super().forward(x * by)


def test_two_like_calls_of_one_module_share_a_forward() -> None:
    class Twice(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = Literal(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x)) + torch.zeros(())

    plan = core(Twice)
    assert [r.module for r in plan.rewrites] == ["core.inner"]
    assert "core.inner.qkv.weight" in cut(plan)
