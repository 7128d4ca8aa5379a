"""A module called another number of times than when it was planned: each call is equal, or the forward is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpconvert.errors import PlanError
from tpconvert.parallel import Mesh, dry_mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank


class Core(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 44), nn.Linear(44, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Steps(nn.Module):
    """Calls its core ``n`` times, and then its parts once more."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.inp, self.core, self.more = nn.Linear(24, 24), Core(), more

    def forward(self, x: Tensor, n: int) -> Tensor:
        x = self.inp(x)
        for _ in range(n):
            x = self.core(x)
        return self.core.down(F.relu(self.core.up(x))) if self.more else x


class Lengths(nn.Module):
    """Calls its core with inputs of several lengths, each alike."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.core = nn.Linear(24, 24), Core()

    def forward(self, x: Tensor, n: int) -> Tensor:
        x = self.inp(x)
        for i in range(n):
            x = torch.cat([x, self.core(x[:, i:])], 1)
        return x


class Cycles(nn.Module):
    """Calls its core ``n`` times, the first time with a value that takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.core = nn.Linear(24, 24), Core()

    def forward(self, x: Tensor, n: int) -> Tensor:
        x = self.inp(x).detach()
        for _ in range(n):
            x = self.core(x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "alone": lambda: Steps(False),
    "its parts too": lambda: Steps(True),
    "lengths": Lengths,
}


def built(name: str, n: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return MODELS[name](), {"x": torch.randn(3, 7, 24), "n": n}


def equal(mesh: Mesh, name: str, n: int, planned: str) -> Any:
    result = compare_on_rank(*built(name, n), Plan.loads(planned), mesh)
    return result and (result.equal, result.verdict())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("planned", [1, 2])
def test_any_number_of_calls_is_equal_where_calls_are_alike(
    name: str, planned: int, run_ranks: Callable[..., list[Any]]
) -> None:
    plan = make_plan(*built(name, planned), tp=2)
    assert plan["core.up.weight"].layout.cut
    assert {b.call for b in plan.boundaries} == {-1}
    for n in (1, 2, 4):
        same, verdict = run_ranks(equal, 2, name, n, plan.dumps())[0]
        assert same, f"{n} calls: {verdict}"


def test_another_number_of_calls_is_refused_where_calls_differ() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 7, 24)
    plan = make_plan(Cycles(), {"x": x, "n": 3}, tp=2)
    assert {b.calls for b in plan.boundaries if b.call >= 0} == {3}
    model = parallelize(Cycles(), Plan.loads(plan.dumps()), dry_mesh(0, 2, device="cpu"))
    model(x, 3)
    for n in (2, 4):
        with pytest.raises(PlanError, match=f"core.up was planned with 3 calls .* this forward made {n}") as caught:
            model(x, n)
        assert "Plan again" in str(caught.value)
    model(x, 3)
    with pytest.raises(PlanError, match=r"core.up is called 3 times in one forward, with different collectives"):
        model.core(x)
