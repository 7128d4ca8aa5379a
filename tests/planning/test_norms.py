"""Norms over a cut width: taken apart into means, which ranks sum their parts of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.analyze.test_flow import cut
from tests.equal import difference
from tests.zoo.frame import floats, seeded
from tpconvert.analyze.capture.parts import NORMS
from tpconvert.errors import PlanError
from tpconvert.formats.dtensor import ABILITIES
from tpconvert.formats.express import express
from tpconvert.parallel import dry_mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.planning.layers import norms_apart
from tpconvert.spec.plan import Plan
from tpconvert.verify.run import emulate_module


class SubNorm(nn.Module):
    """An mlp with a norm of its inner width before its way out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = self.made(4 * width)

    def made(self, width: int) -> nn.Module:
        return nn.LayerNorm(width, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(torch.tanh(self.up(x))))


class RootMean(SubNorm):
    def made(self, width: int) -> nn.Module:
        return nn.RMSNorm(width, eps=1e-3)


class Plain(SubNorm):
    """A norm without parameters, as a function of its forward."""

    def made(self, width: int) -> nn.Module:
        return nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return self.down(F.layer_norm(h, h.shape[-1:], eps=1e-3))


class NormedHeads(nn.Module):
    """Attention whose queries and keys have a norm over all heads at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.LayerNorm(width), nn.LayerNorm(width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (t.unflatten(-1, (-1, 3)).transpose(1, 2) for t in normed)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


CORES = {
    "SubNorm": {"up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight"},
    "RootMean": {"up.weight", "up.bias", "norm.weight", "down.weight"},
    "Plain": {"up.weight", "up.bias", "down.weight"},
    "NormedHeads": {"q.weight", "k.weight", "v.weight", "out.weight", "q_norm.weight", "q_norm.bias", "k_norm.weight"},
}


def built(core: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return seeded(lambda: globals()[core](12)), {"x": floats(2, 5, 12)}


@pytest.mark.parametrize("core", CORES)
def test_a_norm_over_a_cut_width_is_summed(core: str, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(core), tp=2)
    assert cut(plan) == CORES[core]
    assert run_ranks(difference, 2, __name__, plan.dumps(), core)[0] is None


def test_the_lockstep_takes_the_same_norms_apart() -> None:
    module, inputs = built("SubNorm")
    assert emulate_module(module, inputs, make_plan(module, inputs, tp=3)).equal


class Deep(nn.Module):
    """Blocks that begin with a norm of the width of the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), SubNorm(width)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_norms_of_the_width_of_a_model_stay_one_op() -> None:
    module, inputs = built("Deep")
    plan = make_plan(module, inputs, tp=2)
    assert {r.module for r in plan.rewrites} == {f"blocks.{i}.1.norm" for i in range(3)}
    local = parallelize(module, plan, dry_mesh(0, 2))
    assert type(local.blocks[0][0]) is nn.LayerNorm


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_a_norm_taken_apart_is_what_torch_gives(dtype: torch.dtype, error: float) -> None:
    x, weight, bias = (3 * floats(4, 30)).to(dtype), floats(30).to(dtype), floats(30).to(dtype)
    for found, whole in (
        (NORMS["layer_norm"](x, (30,), weight, bias, 1e-3), F.layer_norm(x, (30,), weight, bias, 1e-3)),
        (NORMS["rms_norm"](x, (30,), weight, 1e-3), F.rms_norm(x, (30,), weight, 1e-3)),
    ):
        torch.testing.assert_close(found, whole, rtol=0, atol=error)


def test_a_norm_whose_least_size_is_its_dtypes_is_left_as_it_is() -> None:
    assert NORMS["rms_norm"](floats(2, 3), (3,)) is None


def test_norms_that_no_forward_is_written_anew_for_are_whole_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever reads the plan would see the norm as one op, and its width cut."""
    given = {"x": floats(2, 5, 16)}
    tries: list[Plan] = []

    def none_at_first(plan: Plan) -> frozenset[str]:
        tries.append(plan)
        return frozenset() if len(tries) == 1 else norms_apart(plan)

    monkeypatch.setattr("tpconvert.planning.make.norms_apart", none_at_first)
    plan = make_plan(seeded(SubNorm, 16), given, tp=2)
    assert norms_apart(tries[0]) == {"norm"} and tries[0]["norm.weight"].layout.cut
    assert norms_apart(plan) == frozenset() and not plan["norm.weight"].layout.cut
    assert emulate_module(seeded(SubNorm, 16), given, plan).equal


def test_a_plan_with_norms_apart_is_seen_with_them_apart_where_it_is_told_in_other_words() -> None:
    with pytest.raises(PlanError, match="the forward of norm is written anew"):
        express(seeded(SubNorm, 16), {"x": floats(2, 5, 16)}, tp=2, abilities=ABILITIES)
