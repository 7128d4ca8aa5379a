"""Values that hang on the last bits of what they are computed from are held to what other last bits do to them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank, emulate_module
from tpconvert.verify.measure.lastbits import measured, widened
from tpconvert.verify.result import FLOAT64, Check


class Amplified(nn.Module):
    """Beside a product, the rounding of it, made large; ``by`` is how far."""

    def __init__(self, by: float = 1e7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.by = nn.Linear(8, 32), nn.Linear(32, 8, bias=False), by

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        out = self.down(h)
        return out + self.by * (out - self.down(h * 3) / 3)


ROWS = {"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(0))}


def compared(mesh: Any, plan: str, by: float) -> Any:
    result = compare_on_rank(Amplified(by), ROWS, Plan.loads(plan), mesh)
    return None if result is None else (result.equal, max(c.error for c in result.checks), result.verdict())


def test_what_rounding_alone_decides_is_said_to_be_undecided(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Amplified(), ROWS, tp=2)
    alone = emulate_module(Amplified(1e11), ROWS, plan)
    assert alone.undecided and not alone.equal, alone.verdict()
    assert alone.to_json()["undecided"] is True
    verdict = run_ranks(compared, 2, plan.dumps(), 1e11)[0][2]
    assert verdict.startswith("Not decided: ") and " by itself " in verdict


def test_rounding_made_large_is_rounding_on_ranks_too(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Amplified(), ROWS, tp=2)
    assert plan["up.weight"].layout.cut
    equal, error, verdict = run_ranks(compared, 2, plan.dumps(), 1e7)[0]
    assert equal and error > FLOAT64.bound, verdict
    assert emulate_module(Amplified(), ROWS, plan).equal


def test_what_rounding_moves_too_far_proves_nothing(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Amplified(), ROWS, tp=2)
    assert not emulate_module(Amplified(1e13), ROWS, plan).equal
    assert not run_ranks(compared, 2, plan.dumps(), 1e13)[0][0]


@pytest.mark.parametrize(("error", "moved", "equal"), [(1e-12, 0.0, True), (1e-8, 1e-9, True), (1e-6, 1e-9, False)])
def test_a_bound_is_widened_by_what_was_measured(error: float, moved: float, equal: bool) -> None:
    asked = []

    def again(seed: int) -> list[Check]:
        asked.append(seed)
        return [Check("gradient", "w", moved, FLOAT64.bound, "eval")]

    (found,) = widened([Check("gradient", "w", error, FLOAT64.bound, "eval")], FLOAT64, again)
    assert found.undecided is False  # what last bits move less far is a fault, however small
    assert found.equal is equal and bool(asked) is (error > FLOAT64.bound)
    assert [n[:10] for n in measured([found], [FLOAT64.bound])] == ["1 check is"] * (equal and error > FLOAT64.bound)


class Ranked(nn.Module):
    """Takes the rows of the two largest scores, of which several are equal but for the rounding of a sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.score = nn.Linear(8, 33), nn.Linear(33, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(torch.relu(self.up(x)))
        out = torch.cat([out, out * 3 / 3, out / 7 * 7], 1)
        places = self.score(out).squeeze(-1).topk(2).indices
        return out.gather(1, places[..., None].expand(-1, -1, 8)) * (places[..., None] + 1)


MANY = {"x": torch.randn(7, 11, 8, generator=torch.Generator().manual_seed(0))}


def ranked(mesh: Any, plan: str) -> Any:
    result = compare_on_rank(Ranked(), MANY, Plan.loads(plan), mesh)
    return None if result is None or result.equal else result.verdict()


def test_equal_values_are_ranked_as_the_whole_model_ranked_them(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Ranked(), MANY, tp=3)
    assert plan["up.weight"].layout.cut
    assert run_ranks(ranked, 3, plan.dumps())[0] is None
