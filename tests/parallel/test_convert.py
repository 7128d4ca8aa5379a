"""Hand-written plans: a converted model trains like the whole one, to 1e-9 in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import perturb
from tests.parallel.same import columns, plan_of, rows, train_alike
from tpconvert.parallel import parallelize
from tpconvert.parallel.comm.collectives import joined, parts_of
from tpconvert.parallel.convert import output_gathers
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.plan import Axis, Boundary, Edit


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


class GroupedAttention(nn.Module):
    """Fewer key and value heads than query heads, a norm on each head's query, a slope per head."""

    def __init__(self, width=6, heads=4, kv=2, size=3):
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, size
        self.q, self.k = nn.Linear(width, heads * size), nn.Linear(width, kv * size)
        self.v, self.out = nn.Linear(width, kv * size), nn.Linear(heads * size, width, bias=False)
        self.q_norm = nn.LayerNorm(size)
        self.slopes = nn.ParameterList([nn.Parameter(torch.ones(heads))])
        self.register_buffer("offsets", torch.arange(float(heads)))

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_norm(self.q(x).view(b, t, self.heads, self.size)).transpose(1, 2)
        q = q * (self.slopes[0] + self.offsets)[:, None, None]
        k, v = (p(x).view(b, t, self.kv, self.size).transpose(1, 2) for p in (self.k, self.v))
        k, v = (z.repeat_interleave(self.heads // self.kv, 1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


def grouped_plan(module, tp):
    kv, q = Block(2, 3), Block(2, (Block(2, 3),))
    shared = {"sum_grad": True}
    cut = {
        "q.weight": Layout(0, (q,)),
        "q.bias": Layout(0, (q,)),
        "k.weight": Layout(0, (kv,)),
        "k.bias": Layout(0, (kv,)),
        "v.weight": Layout(0, (kv,)),
        "v.bias": Layout(0, (kv,)),
        "out.weight": Layout(1, (q,)),
        "slopes.0": Layout(0, (Block(2, (Block(2),)),)),
        "offsets": Layout(0, (Block(2, (Block(2),)),)),
    }
    flags = dict.fromkeys(("k.weight", "k.bias", "v.weight", "v.bias", "q_norm.weight", "q_norm.bias"), shared)
    return plan_of(
        module,
        tp,
        cut,
        flags,
        boundaries=(Boundary("copy", "", "input", ("kwargs.x",)), Boundary("reduce", "out", "output", ("",))),
        edits=(
            Edit("", "heads", 4, (Block(2, (Block(2),)),)),
            Edit("", "kv", 2, (Block(2),)),
        ),
    )


def train_grouped(mesh):
    model = train_alike(mesh, GroupedAttention, grouped_plan, lambda seed: floats(seed, 6))
    return model.heads, model.kv, tuple(model.slopes[0].shape), model.offsets.tolist(), type(model.k).__name__


@pytest.mark.parametrize("degree", [2, 4])
def test_key_and_value_heads_are_shared_when_fewer_than_ranks(run_ranks, degree):
    heads, kv, slopes, offsets, name = run_ranks(train_grouped, degree)[-1]
    assert (heads, kv, slopes) == ({2: 2, 4: 1}[degree], 1, ({2: 2, 4: 1}[degree],))
    assert [round(x) for x in offsets] == {2: [2, 3], 4: [3]}[degree]
    assert name == "ColumnParallelLinear"


class TiedWords(nn.Module):
    """An embedding whose weight is the head's too; 11 words; word 3 is padding; returns a dict."""

    def __init__(self, words=11, width=4):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=3)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        h = self.words(ids).tanh()
        return {"logits": self.head(self.mix(h)), "hidden": (h, None)}


def tied_plan(module, tp):
    return plan_of(
        module,
        tp,
        {"words.weight": rows(11)},
        boundaries=(
            Boundary("reduce", "words", "output", ("",)),
            Boundary("copy", "head", "input", ("args.0",)),
            Boundary("gather", "head", "output", ("",), dim=2, blocks=(Block(11),), axis="words"),
        ),
        axes=(Axis("words", "vocabulary", 11, ("words.weight",)),),
    )


def ids(seed):
    return {"ids": torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(seed))}


def train_tied(mesh):
    model = train_alike(mesh, TiedWords, tied_plan, ids)
    assert model.words.weight is model.head.weight
    assert type(model.words).__name__ == "VocabParallelEmbedding"
    with pytest.raises(IndexError):
        model(ids=torch.tensor([[0, 11]]))


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_tied_embedding_and_head_stay_tied(run_ranks, degree):
    run_ranks(train_tied, degree)


def keeps_logits_cut(mesh):
    model = perturb(TiedWords().double())
    whole = copy.deepcopy(model)(**ids(0))["logits"]
    plan = tied_plan(model, mesh.degree)
    (left_out,) = output_gathers(plan)
    logits = parallelize(model, plan, mesh, gather_output=False)(**ids(0))["logits"]
    parts = parts_of(left_out.dim, left_out.blocks, mesh)
    assert logits.shape[-1] == parts.sizes[mesh.rank]
    torch.testing.assert_close(joined(logits.detach(), parts, mesh), whole.detach())


def test_logits_stay_cut_without_gather_output(run_ranks):
    run_ranks(keeps_logits_cut, 3)
