"""Forwards as data: what can be written, what is refused, and what differs in training."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.analyze.test_edits import Literal
from tests.analyze.test_flow import core, cut, planned
from tests.models import MODELS
from tests.zoo.frame import Framed, floats, seeded
from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.ops.rules import load_rules
from tpconvert.errors import PlanError
from tpconvert.parallel import dry_mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.planning.calls.sizes import OtherSizes, resized
from tpconvert.planning.make import captured
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


class TrainsWithAnother(Literal):
    """A forward that does the same in training, to another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.tanh(y if self.training else x)


class TrainsAnotherSize(Literal):
    """A forward with another window in training, where the size of a cut dim stands."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 12, 5).transpose(1, 2) for t in self.qkv(x).split(60, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(
            y[:, : 6 if self.training else 12].repeat(1, 2 if self.training else 1, 1, 1).transpose(1, 2).flatten(2)
        )


class TrainsItsChild(nn.Module):
    """A forward that gives its child another number in training, and one that returns another in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 180), nn.Linear(60, width)
        self.scale = Times()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 12, 5).transpose(1, 2) for t in self.qkv(x).split(60, dim=-1))
        y = self.scale(F.scaled_dot_product_attention(q, k, v), 0.5 if self.training else 1.0)
        return self.out(y.transpose(1, 2).flatten(2))


class Times(nn.Module):
    def forward(self, x: Tensor, by: float) -> Tensor:
        return x * by


class Branches(Literal):
    """A forward that takes another path for long inputs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if x.shape[1] > 8 else y


class Bounds(Literal):
    """A forward that is given the size or a bound, whichever is more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * max(x.shape[1], 8)


class Counts(Literal):
    """A forward that does something for each position."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for _ in range(x.shape[1]):
            y = y * 1.1
        return y


class Unbinds(Literal):
    """A forward that takes its positions apart."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(super().forward(x).unbind(1))[::-1], 1)


class Truncates(Literal):
    """A forward with a number that no longer remembers the size it was made of."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, -int(x.shape[1]) :]


class Halves(Literal):
    """A forward with a number that may be the same at two sizes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + (x.shape[1] >> 4))


class Keeps(Literal):
    """A forward that leaves something behind for others."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


class Logs(Literal):
    """A forward that adds to a list of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x)
        return super().forward(x)


class Tallies(Literal):
    """A forward that counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 5

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


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
        (TrainsWithAnother, "core.qkv.weight", "it takes another path in training"),
        (TrainsAnotherSize, "core.qkv.weight", "a number that may count something cut is another one in training"),
        (TrainsItsChild, "core.qkv.weight", "it takes another path in training"),
        (Branches, "core.qkv.weight", "it does something else at another size"),
        (Bounds, "core.qkv.weight", "it does something else at another size"),
        (Counts, "core.qkv.weight", "it does something else at another size"),
        (Unbinds, "core.qkv.weight", "it does something else at another size"),
        (Truncates, "core.qkv.weight", "it does something else at another size"),
        (Halves, "core.qkv.weight", "it makes a number of a size of its inputs"),
        (Keeps, "core.qkv.weight", "it sets seen, which others may read"),
        (Logs, "core.qkv.weight", "it sets log, which others may read"),
        (Tallies, "core.qkv.weight", "it sets calls, which others may read"),
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


class Rare(Literal):
    """A forward that takes another path at sizes that are seldom seen, and one that takes one length only."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.flip(1) if x.shape[1] > 100 and self.training is not None else y


class OneLength(Literal):
    """A forward that runs at the lengths it knows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * {7: 2.0, 11: 3.0}[x.shape[1]]


@pytest.mark.parametrize(
    ("make", "length", "says"),
    [(Rare, 101, "size(1) > 100 is False; here it is True"), (OneLength, 11, "size(1) == 7 is True; here it is False")],
)
def test_a_call_for_which_a_written_forward_may_be_wrong_is_refused(make, length: int, says: str) -> None:
    module = seeded(lambda: Framed(make(22), 22))
    plan = make_plan(module, {"x": floats(3, 7, 22)}, tp=2)
    assert [r.module for r in plan.rewrites] == ["core"]
    local = parallelize(module, plan, dry_mesh(0, 2))
    local(floats(5, 7, 22))
    with pytest.raises(PlanError, match=re.escape(f"core: its forward was regenerated for calls where {says}")):
        local(floats(3, length, 22))


class Pair(Literal):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) if x is y else super().forward(x) + y


class OfPair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.apart = Pair(width), False

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x * 1 if self.apart else x)


def test_one_tensor_in_two_arguments_must_be_one_again() -> None:
    module = seeded(lambda: Framed(OfPair(22), 22))
    plan = make_plan(module, {"x": floats(3, 7, 22)}, tp=2)
    assert [r.module for r in plan.rewrites] == ["core.inner"]
    local = parallelize(module, plan, dry_mesh(0, 2))
    local(floats(3, 7, 22))
    local.core.apart = True
    with pytest.raises(PlanError, match=re.escape("args.0 is args.1 is True; here it is False")):
        local(floats(3, 7, 22))


def test_inputs_of_other_sizes_are_tried_all_at_once_then_each_by_itself() -> None:
    module = seeded(lambda: Framed(Literal(22), 22))
    found = OtherSizes(Axes(captured(module, {"x": floats(3, 7, 22)}), load_rules()), {"x": floats(3, 7, 22)})
    assert [tuple(inputs["x"].shape) for inputs, _ in found] == [
        *((6, 10, 22), (6, 14, 22), (1, 3, 22)),
        *((6, 7, 22), (6, 7, 22), (1, 7, 22)),
        *((3, 10, 22), (3, 14, 22), (3, 3, 22)),
    ]
    assert len({t for _, changed in found for t in changed}) == 2


def test_a_longer_input_has_its_entries_over_again() -> None:
    made = resized({"ids": torch.arange(6).view(2, 3), "n": 4}, [(3, 5)])
    assert made["ids"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4], [0, 1, 2, 0, 1]]
    assert made["n"] == 4


def test_a_checked_forward_compiles_into_one_graph() -> None:
    module = seeded(lambda: Framed(Rare(22), 22))
    local = parallelize(module, make_plan(module, {"x": floats(3, 7, 22)}, tp=2), dry_mesh(0, 2))
    compiled = torch.compile(local.core, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in ((3, 7, 22), (4, 9, 22)):
        torch.testing.assert_close(compiled(floats(*shape)), local.core(floats(*shape)))
