"""The gradient of the model's own inputs: whole on every rank, and no cost where nobody asks for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.analyze.capture.run import capture
from tpconvert.parallel import Mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

ROWS = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    """A model that is part of a larger one: floating rows beside integer ids, in a list, and written into."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.m = nn.Embedding(11, 24), nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))

    def forward(self, rows: list[Tensor], ids: Tensor) -> Tensor:
        first, second = rows
        first += 1
        return self.m(first) * 2 + self.m(self.words(ids)) + second


def inputs() -> dict[str, Any]:
    return {"rows": [ROWS.clone(), ROWS.flip(0) * 2], "ids": torch.arange(10).reshape(2, 5)}


class Outer(nn.Module):
    """The larger one: soft prompts before the inner model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.prompt = inner, nn.Parameter(torch.ones(24))

    def forward(self) -> Tensor:
        given = inputs()
        return self.inner([given["rows"][0] * self.prompt, given["rows"][1] * self.prompt], given["ids"])


def prompts(mesh: Mesh, planned: str) -> bool:
    """Whether the gradient of the prompts is whole."""
    torch.manual_seed(0)
    whole = Outer(Inner())
    local = Outer(parallelize(copy.deepcopy(whole.inner), Plan.loads(planned), mesh))
    for module in (whole, local):
        module().square().sum().backward()
    return torch.allclose(whole.prompt.grad, local.prompt.grad, rtol=1e-4)


def test_the_gradient_of_a_floating_input_is_whole(run_ranks: Callable[..., list[Any]]) -> None:
    torch.manual_seed(0)
    plan = make_plan(Inner(), inputs(), tp=2)
    assert plan["m.0.weight"].layout.cut
    assert all(run_ranks(prompts, 2, plan.dumps()))


def test_floating_inputs_take_part_in_differentiation_and_stay_as_they_were() -> None:
    given = inputs()
    given["rows"][1].requires_grad_()
    kept = [t.detach().clone() for t in given["rows"]]
    trace = capture(Inner(), given)
    grads = {n.meta["slot"]: n.meta["grad"] for n in trace.nodes if n.meta["op"] == "input"}
    assert grads == {"kwargs.rows.0": True, "kwargs.rows.1": True, "kwargs.ids": False}
    assert [t.requires_grad for t in given["rows"]] == [False, True]
    assert all(map(torch.equal, given["rows"], kept))
    assert given["rows"][0].grad_fn is None


def test_inputs_that_share_memory_still_do() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, part: Tensor) -> Tensor:
            x.mul_(2)
            return part * 1

    x = torch.ones(4)
    trace = capture(Writes(), (x, x[1:3]), values=True)
    (out,) = trace.outputs.values()
    assert out.meta["value"].tolist() == [2, 2]
    assert x.tolist() == [1, 1, 1, 1]


def test_a_forward_that_cannot_differentiate_its_inputs_is_still_recorded() -> None:
    class Frees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.requires_grad_(False))

    trace = capture(Frees(), {"x": ROWS})
    assert [n.meta["grad"] for n in trace.nodes if n.meta["op"] == "input"] == [False]


def sums(mesh: Mesh, planned: str, needs_grad: bool) -> int:
    """How often the ranks sum a gradient for a first layer."""
    from unittest import mock

    torch.manual_seed(0)
    local = parallelize(nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24)), Plan.loads(planned), mesh)
    out = local(ROWS.clone().requires_grad_(needs_grad))
    with mock.patch("tpconvert.parallel.comm.collectives._all_reduce", side_effect=lambda x, op, group: x) as calls:
        out.sum().backward()
    return calls.call_count


def test_an_input_without_a_gradient_costs_no_sum(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24)), (ROWS,), tp=2).dumps()
    assert run_ranks(sums, 2, plan, True) == [1, 1]
    assert run_ranks(sums, 2, plan, False) == [0, 0]
