"""Numbers that a forward chooses by the dtype it is run in, where that forward is written anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.analyze.rewrite.spelling import Limit
from tpconvert.parallel import Mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.planning.proof.training import limit
from tpconvert.spec.plan import Plan

MODEL = 24


class Masked(nn.Module):
    """Four heads, a literal; what comes later is hidden by the least number of the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(MODEL, 3 * MODEL), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 4, 6).transpose(1, 2) for t in self.qkv(x).split(24, dim=-1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.scaled(q @ k.transpose(-1, -2))
        weights = scores.masked_fill(later, -torch.finfo(scores.dtype).max).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))

    def scaled(self, scores: Tensor) -> Tensor:
        return scores * 0.5


class ByDtype(Masked):
    """A number that is another one in any dtype but float32, as norms written by hand choose their epsilon."""

    def scaled(self, scores: Tensor) -> Tensor:
        return scores * (0.5 if scores.dtype == torch.float32 else 0.25)


def built(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layer = {"masked": Masked, "by dtype": ByDtype}[kind]
    return nn.Sequential(layer(), nn.LayerNorm(MODEL)), (torch.randn(2, 7, MODEL),)


def apart_in(mesh: Mesh, kind: str, plan: str, dtype: torch.dtype, training: bool) -> float:
    """How far outputs are apart in a dtype."""
    whole, (x,) = built(kind)
    local, _ = built(kind)
    parallelize(local, Plan.loads(plan), mesh)
    outputs = [module.to(dtype).train(training)(x.to(dtype)) for module in (whole, local)]
    return float((outputs[0] - outputs[1]).abs().max().detach())


def test_a_limit_of_the_dtype_is_that_of_the_dtype_it_runs_in(pool: Pool) -> None:
    plan = make_plan(*built("masked"), tp=2)
    assert plan["0.qkv.weight"].layout.cut
    assert [n["target"] for r in plan.rewrites for n in r.nodes if n["op"] == "limit"] == ["min"]
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        for training in (False, True):
            found = pool.run(apart_in, 2, "masked", plan.dumps(), dtype, training)
            assert max(found) < bound
    assert pool.run(difference, 2, __name__, plan.dumps(), "masked")[0] is None


@pytest.mark.parametrize("training", [False, True])
def test_another_number_in_another_dtype_is_another_path(pool: Pool, training: bool) -> None:
    plan = make_plan(*built("by dtype"), tp=2)
    assert not plan.rewrites
    assert "it takes another path in another dtype" in plan["0.qkv.weight"].reason
    assert max(pool.run(apart_in, 2, "by dtype", plan.dumps(), torch.float32, training)) < 1e-5


@pytest.mark.parametrize(("value", "other"), [(slice(1), slice(2)), ([1], [2]), ("mean", "sum"), (None, 1.0)])
def test_what_is_no_number_is_no_limit_of_a_dtype(value, other):
    assert limit(value, other) is None


def test_a_limit_of_a_dtype_is_known_by_its_value_in_both():
    assert limit(torch.finfo(torch.float32).min, torch.finfo(torch.float64).min) == Limit("min")
