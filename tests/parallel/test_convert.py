"""Hand-written plans: a converted model trains like the whole one, to 1e-9 in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.parallel.same import columns, plan_of, rows, train_alike
from tpconvert.spec.plan import Boundary, Edit


class Mlp(nn.Module):
    def __init__(self, width=5, hidden=7):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def mlp_plan(module, tp):
    return plan_of(
        module,
        tp,
        {"up.weight": rows(7), "up.bias": rows(7), "down.weight": columns(7)},
        {"down.bias": {"once": True}},
        boundaries=(Boundary("copy", "up", "input", ("args.0",)), Boundary("reduce", "down", "output", ("",))),
    )


def floats(seed, width=5):
    return {"x": torch.randn(2, 3, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


def train_mlp(mesh):
    model = train_alike(mesh, Mlp, mlp_plan, floats)
    return type(model.up).__name__, type(model.down).__name__, model.up.out_features, str(model.down)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_an_mlp_with_biases_and_uneven_parts_trains_like_the_whole_one(run_ranks, degree):
    column, row, width, text = run_ranks(train_mlp, degree)[0]
    assert (column, row) == ("ColumnParallelLinear", "RowParallelLinear")
    assert width == {2: 4, 3: 3, 4: 2}[degree]
    assert f"in_features={width}, out_features=5, bias=True, whole=(5, 7), tp={degree}" in text


def test_an_mlp_trains_like_the_whole_one_on_tp2_dp2_with_other_data_on_each_dp_rank(run_ranks):
    run_ranks(train_mlp, 2, dp=2)


class FusedAttention(nn.Module):
    """GPT-2's: one projection to q, k, v; sizes from attributes."""

    def __init__(self, width=12, heads=4):
        super().__init__()
        self.heads, self.width = heads, width
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).split(self.width, -1)
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, -1))


def fused_plan(module, tp):
    heads = (4, 3)
    return plan_of(
        module,
        tp,
        {"qkv.weight": rows(heads, heads, heads), "qkv.bias": rows(heads, heads, heads), "out.weight": columns(heads)},
        {"out.bias": {"once": True}},
        boundaries=(Boundary("copy", "norm", "output", ("",)), Boundary("reduce", "out", "output", ("",))),
        edits=(
            Edit("", "heads", 4, rows(4).blocks),
            Edit("", "width", 12, rows(heads).blocks),
        ),
    )


def train_fused(mesh):
    train_alike(mesh, FusedAttention, fused_plan, lambda seed: floats(seed, 12))


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_fused_qkv_is_cut_segment_by_segment(run_ranks, degree):
    run_ranks(train_fused, degree)
