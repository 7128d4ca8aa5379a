"""What no planned forward called is treated as a sibling that was, or is not called among terms of a sum in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpconvert.errors import PlanError
from tpconvert.parallel import parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.spec.sliced import sliced_form

WIDTH = 8


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(WIDTH, 16, bias=False), nn.ReLU()
        self.down = nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Mixture(nn.Module):
    """Four experts, and ones that return their tokens as they are; the first of a token's entries chooses."""

    def __init__(self, same: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList([Expert() for _ in range(4)] + [nn.Identity() for _ in range(same)])

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        x = self.norm(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(choice == i)[0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


def tokens(*choice: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(len(choice), WIDTH), "choice": torch.tensor(choice)}


def converted(mesh: Any, plan: str, same: int, given: dict[str, Tensor]) -> Any:
    whole = Mixture(same).double()
    local = parallelize(Mixture(same).double(), Plan.loads(plan), mesh)
    given = given | {"x": given["x"].double()}
    try:
        return float((whole(**given) - local(**given)).abs().max().detach())
    except PlanError as error:
        return error.message


def test_an_expert_without_weights_that_was_not_reached_is_not_called(
    run_ranks: Callable[..., list[Any]],
) -> None:
    plan = make_plan(Mixture(), tokens(0, 2, 3, 0), tp=2)
    assert plan["experts.1.up.weight"].layout.cut and [b.kind for b in plan.boundaries if b.module == ""] == ["reduce"]
    assert plan.unreached == ("experts.4",)
    assert Plan.loads(plan.dumps()) == plan
    for found in run_ranks(converted, 2, plan.dumps(), 1, tokens(0, 1, 2, 3)):
        assert found < 1e-12
    for found in run_ranks(converted, 2, plan.dumps(), 1, tokens(0, 1, 4)):
        assert found.startswith("experts.4 (Identity) is called among terms of a sum over ranks")


@pytest.mark.parametrize("same", [1, 3])
def test_a_sibling_without_weights_is_treated_as_the_one_that_was_reached(
    same: int, run_ranks: Callable[..., list[Any]]
) -> None:
    plan = make_plan(Mixture(same), tokens(0, 2, 4, 0), tp=2)
    assert plan["experts.0.up.weight"].layout.cut and plan.unreached == ()
    for found in run_ranks(converted, 2, plan.dumps(), same, tokens(*range(4 + same))):
        assert found < 1e-12


class Optional(nn.Module):
    """Calls a layer beside a cut region by an option that no planned forward had."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.more = nn.Embedding(32, WIDTH), Expert(), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, more: bool = False) -> Tensor:
        x = self.embed(ids)
        x = x + self.mlp(x)
        return x + self.more(x) if more else x


def test_what_only_sees_whole_values_may_be_called_another_time() -> None:
    plan = make_plan(Optional(), {"ids": torch.randint(32, (2, 12))}, tp=2)
    assert plan["mlp.up.weight"].layout.cut and not plan["more.weight"].layout.cut
    assert plan.unreached == ()
    assert not plan.slices.reason and sliced_form(plan).unreached == ("more",)  # its gradients would be of slices


class Longer(Expert):
    """An expert whose way out has a layer more, of a size of its own."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.over, self.back = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.over(super().forward(x)))


def test_a_sibling_is_alike_in_all_of_its_parameters_or_none() -> None:
    """What is cut there and not here would be summed though it is whole."""
    module = Mixture(0)
    module.experts = nn.ModuleList([Longer(32), Longer(24), Longer(32)])
    plan = make_plan(module, tokens(0, 0, 0), tp=2)
    assert plan["experts.0.over.weight"].layout.cut
    assert plan["experts.2.over.weight"].layout == plan["experts.0.over.weight"].layout
    assert not any(v.layout.cut for v in plan.verdicts if v.name.startswith("experts.1."))
    assert not any(b.module.startswith("experts.1") for b in plan.boundaries)
