"""A plan is held to the sides of branches that no example input takes, by other sizes and other answers of values."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from tests.analyze.test_flow import cut
from tests.zoo.experts import topk_moe_idle
from tests.zoo.frame import floats, seeded
from tpconvert.analyze.axes.run import Axes
from tpconvert.cli import main
from tpconvert.parallel import Mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.planning.calls.sides import LARGEST, SMALL, Sides
from tpconvert.planning.calls.ways import Way
from tpconvert.planning.make import captured
from tpconvert.verify import emulate_module

WIDTH, LIMIT = 12, 16

TAKEN: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "length": lambda m, x: x.shape[1] > LIMIT,
    "attribute": lambda m, x: x.size(1) >= m.limit,
    "multiple": lambda m, x: x.shape[1] % 4 == 0,
    "batch": lambda m, x: len(x) == 1,
    "tokens": lambda m, x: x.shape[0] * x.shape[1] > 100,
    "training": lambda m, x: m.training and x.shape[1] > LIMIT,
    "length in training": lambda m, x: x.shape[1] > LIMIT and m.training,
    "both sizes": lambda m, x: x.shape[0] > 4 and x.shape[1] > LIMIT,
    "number of a size": lambda m, x: math.log2(x.shape[1]) > 4,
    "negated": lambda m, x: -x.shape[1] % 4 == 0,
    "shape": lambda m, x: x.shape[:2] == (4, 4),
    "product": lambda m, x: x.shape[1] * 3 == 600,
    "value": lambda m, x: x.abs().max() > 100,
    "nan": lambda m, x: torch.isnan(x).any(),
    "number": lambda m, x: x.abs().max().item() > 100,
    "integer": lambda m, x: int(x.abs().max()) > 100,
    "list": lambda m, x: max(x.abs().amax((1, 2)).tolist()) > 100,
    "both values": lambda m, x: (x > 100).any() and (x < -100).any(),
    "last of several": lambda m, x: [bool(row.abs().max() > 100) for row in x][-1],
}
"""What a forward asks before it subtracts the mean of its width, of which no answer is yes for the example inputs."""

VALUES = ["value", "number", "integer", "list", "both values", "last of several"]
"""Those that hang on values."""

SHORT, LONG, LARGE = floats(2, 6, WIDTH), floats(2, 20, WIDTH), 500 * floats(2, 6, WIDTH)
REACHING = {
    "multiple": floats(2, 8, WIDTH),
    "batch": floats(1, 6, WIDTH),
    "tokens": floats(6, 20, WIDTH),
} | dict.fromkeys(VALUES, LARGE)


DEEP = {"tokens": floats(6, 20, WIDTH), "value": 500 * LONG}


class Branching(nn.Module):
    """A cut width, of which one side of a branch takes the mean."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.limit = kind, LIMIT
        self.up, self.down = nn.Linear(WIDTH, 28), nn.Linear(28, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if TAKEN[self.kind](self, x):
            h = torch.nan_to_num(h) - h.mean(-1, keepdim=True)
        return self.down(h)


class Harmless(Branching):
    """One whose other side does nothing that a part of the width cannot."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(2 * h if TAKEN[self.kind](self, x) else h.tanh())


class Calling(Branching):
    """The other side calls the same layers, with another function between them."""

    def forward(self, x: Tensor) -> Tensor:
        if TAKEN[self.kind](self, x):
            return self.down(self.up(x).softmax(-1))
        return self.down(self.up(x))


class Nested(Branching):
    """The side that takes the mean lies inside of another branch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        if x.shape[1] > LIMIT:
            h = 2 * h
            if TAKEN[self.kind](self, x):
                h = h - h.mean(-1, keepdim=True)
        return self.down(h)


class Turning(Branching):
    """As many turns of a loop as values say, which is none for the example inputs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        for _ in range(int((x.abs() > 100).sum().clamp(max=2))):
            h = h.softmax(-1)
        return self.down(h)


class Residual(nn.Module):
    """What comes in, and what a core makes of it, under a head: values come to the core as they are."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core, self.head = core, nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.core(x))


class Reading(Residual):
    """At one side it reads a parameter of a part."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.core(x)
        return self.head(y * self.core.up.weight.mean() if x.shape[1] > LIMIT else y)


class Refusing(Residual):
    """What is longest is refused, before the branch that is looked for."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 100:
            raise ValueError("too long")
        return super().forward(x)


FRAMES = {"read": Reading, "refused": Refusing}


def built(core: type[Branching], kind: str) -> nn.Module:
    return seeded(lambda: FRAMES.get(kind, Residual)(core("length" if kind in FRAMES else kind))).double()


CASES: list[tuple[type[Branching], str]] = [
    *((Branching, kind) for kind in TAKEN),
    *((core, kind) for core in (Calling, Nested) for kind in ("tokens", "value")),
    (Turning, "value"),
    (Branching, "refused"),
    (Harmless, "read"),
]


def difference(mesh: Mesh, plan: str, core: type[Branching], kind: str) -> float:
    """How far a converted model is from the whole one, on both sides of its branch, in both modes."""
    from tpconvert.spec.plan import Plan

    whole = built(core, kind)
    local = parallelize(copy.deepcopy(whole), Plan.loads(plan), mesh)
    found = 0.0
    for x in (SHORT, REACHING.get(kind, LONG) if core is not Nested else DEEP[kind]):
        for training in (False, True):
            for module in (whole, local):
                module.train(training)
            found = max(found, (whole(x.double()) - local(x.double())).abs().max().item())
    return found


@pytest.mark.parametrize(("core", "kind"), CASES)
def test_what_the_other_side_cannot_do_with_a_part_stays_whole(core: type[Branching], kind: str) -> None:
    plan = make_plan(built(core, kind), {"x": SHORT.double()}, tp=2, branches=True)
    assert not {"core.up.weight", "core.down.weight"} & set(cut(plan))
    reason = plan["core.up.weight"].reason
    assert "takes another path with" in reason
    where = "at test_sides.py:" if core is Turning or kind in (*VALUES, "nan") else "in the inputs' sizes"
    assert where in reason


@pytest.mark.parametrize(("core", "kind"), [*((Harmless, kind) for kind in TAKEN), *CASES])
def test_both_sides_are_equal_on_ranks(core: type[Branching], kind: str, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(built(core, kind), {"x": SHORT.double()}, tp=2, branches=True)
    assert (core is Harmless and kind != "read") is ({"core.up.weight", "core.down.weight"} <= set(cut(plan)))
    assert max(run_ranks(difference, 2, plan.dumps(), core, kind)) < 1e-12


@pytest.mark.parametrize("core", [Branching, Harmless])
@pytest.mark.parametrize("kind", [k for k in (*VALUES, "nan") if k not in ("list", "both values")])
def test_questions_about_values_are_answered_otherwise_where_a_forward_meets_parts(
    core: type[Branching], kind: str
) -> None:
    plan = make_plan(built(core, kind), {"x": SHORT.double()}, tp=2)
    assert ({"core.up.weight", "core.down.weight"} <= set(cut(plan))) is (core is Harmless)
    assert core is Harmless or "at test_sides.py:" in plan["core.up.weight"].reason


class Whole(nn.Module):
    """Asks about whole values, and does more with them, or less; what is cut lies in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Sequential(nn.Linear(WIDTH, 28), nn.GELU(), nn.Linear(28, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 100:
            x = x - x.mean(-1, keepdim=True)
        return self.core(x)


@pytest.mark.parametrize("branches", [False, True])
def test_those_about_whole_values_alone_cost_nothing_unless_asked_for(
    branches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(Sides, "by_values", lambda self: iter(asked.append(self.near) or []))
    plan = make_plan(seeded(Whole), {"x": SHORT}, tp=2, branches=branches)
    assert "core.0.weight" in cut(plan) and (asked != []) is branches


def sides(kind: str, x: Tensor = SHORT) -> list[tuple[str, bool]]:
    """The calls that are made for a branch, and whether without values."""
    trace = captured(Branching(kind), {"x": x})
    return [(calls[0].name, calls[0].large) for calls in Sides(Axes(trace, trace.rules), Way("", {"x": x}))]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("length", (LIMIT + 1, 6)), ("attribute", (LIMIT, 6)), ("multiple", (8, 6)), ("tokens", (17, 2))],
)
def test_the_nearest_size_that_reaches_the_other_side_is_taken(kind: str, sizes: tuple[int, int]) -> None:
    new, old = sizes
    assert sides(kind)[0] == (f"with {new} for {old} in the inputs' sizes", False)


def test_a_long_input_is_run_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TAKEN, "length", lambda m, x: x.shape[1] > 4 * SMALL)
    assert sides("length")[0] == (f"with {4 * SMALL + 1} for 6 in the inputs' sizes", True)
    plan = make_plan(built(Branching, "length"), {"x": SHORT.double()}, tp=2, branches=True)
    assert f"takes another path with {4 * SMALL + 1} for 6" in plan["core.up.weight"].reason


def test_sizes_that_nobody_would_run_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TAKEN, "length", lambda m, x: x.shape[1] > 2 * LARGEST)
    assert sides("length") == AS_EVER


def test_a_size_that_a_number_is_made_of_is_tried_as_one() -> None:
    assert sides("batch") == [AS_EVER[0], ("with 1 for 2 in the inputs' sizes", False), *AS_EVER[1:]]


AS_EVER = [
    ("with 5 for 2 and 13 for 6 in the inputs' sizes", False),
    ("with 1025 for 6 in the inputs' sizes", True),
]
"""The calls with other sizes that are made whatever a forward compares."""


class Causal(Branching):
    """It asks a mask that hangs on nothing but a size: its answer is no matter of values."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        return self.down(self.up(x).tanh() if mask[0, 0] == 1 else self.up(x).softmax(-1))


def test_what_hangs_on_sizes_alone_is_not_answered_otherwise() -> None:
    assert "core.up.weight" in cut(make_plan(built(Causal, "length"), {"x": SHORT.double()}, tp=2, branches=True))


def test_a_plan_holds_where_other_experts_are_reached_than_when_it_was_made() -> None:
    """The sum of what experts return is named after the first, which no token of these comes to."""
    module, inputs = topk_moe_idle()
    plan = make_plan(module, inputs, tp=2)
    assert next(b.axis for b in plan.boundaries if b.kind == "reduce") == "core.experts.0:gated-mlp"
    few = {"x": inputs["x"][:, :1]}
    assert "core.experts.0.up.weight" not in captured(module, few).parameters
    assert emulate_module(module, few, plan).equal


def test_the_command_looks_at_branches_where_it_is_asked_to(tmp_path: Path) -> None:
    code = "from tests.planning.test_sides import SHORT, Branching, built\n"
    code += "def build():\n    return built(Branching, 'length'), {'x': SHORT.double()}\n"
    (tmp_path / "model.py").write_text(code)

    def shown(*options: str) -> str:
        result = CliRunner().invoke(main, ["plan", f"{tmp_path}/model.py:build", "--tp", "2", "--all", *options])
        assert result.exit_code == 0, result.output
        return result.output

    assert "takes another path with 17 for 6" in " ".join(shown("--branches").split())
    assert "takes another path" not in shown()
