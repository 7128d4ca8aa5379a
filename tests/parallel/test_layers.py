"""The parallel layers as users meet them: subclasses, ties, options, and what they print."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.parallel.same import columns, plan_of, rows, train_alike
from tpconvert.errors import PlanError
from tpconvert.parallel import dry_mesh, parallelize
from tpconvert.parallel.calls.boundaries import AtOutput
from tpconvert.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Boundary, Plan

REDUCE = Boundary("reduce", "down", "output", ("",))


class Scaled(nn.Linear):
    """Goes on after ``super().forward``, with a parameter of its own."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


class OwnLinear(nn.Linear):
    """Never calls ``super().forward``."""

    def forward(self, x):
        return x @ self.weight.mT + self.bias


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids + 1) * 3


class Net(nn.Module):
    def __init__(self, linear, embedding=nn.Embedding):
        super().__init__()
        self.words = embedding(12, 4, padding_idx=2)
        self.up, self.down = linear(4, 7), linear(7, 4)

    def forward(self, ids):
        return self.down(F.gelu(self.up(self.words(ids))))


def net_plan(module, tp):
    cut = {"up.weight": rows(7), "up.bias": rows(7), "down.weight": columns(7), "words.weight": rows(12)}
    flags = {"down.bias": {"once": True}}
    if isinstance(module.up, Scaled):
        flags |= {"up.scale": {"sum_grad": True}, "down.scale": {"sum_grad": True}}
    boundaries = (Boundary("copy", "up", "input", ("args.0",)), REDUCE, Boundary("reduce", "words", "output", ("",)))
    return plan_of(module, tp, cut, flags, boundaries=boundaries)


def ids(seed):
    return {"ids": torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(seed))}


def through_bytes(module, plan, mesh):
    """Convert, then copy deeply: everything must still hold."""
    return copy.deepcopy(parallelize(module, plan, mesh))


def train(mesh, linear, embedding):
    model = train_alike(mesh, lambda: Net(linear, embedding), net_plan, ids, convert=through_bytes)
    assert isinstance(model.up, linear) and isinstance(model.words, embedding)
    kinds = {c.__name__ for m in (model.up, model.down, model.words) for c in type(m).__mro__}
    return kinds, type(model.up).__name__


@pytest.mark.parametrize("embedding", [nn.Embedding, ScaledEmbedding])
@pytest.mark.parametrize("linear", [nn.Linear, Scaled, OwnLinear])
def test_subclasses_of_linear_and_embedding_train_like_the_whole_ones(run_ranks, linear, embedding):
    kinds, name = run_ranks(train, 3, linear, embedding)[0]
    ours = {"ColumnParallelLinear", "RowParallelLinear"}
    assert kinds & ours == (set() if linear is OwnLinear else ours)
    assert "VocabParallelEmbedding" in kinds
    assert name == ("ColumnParallelLinear" if linear is nn.Linear else linear.__name__)


@pytest.mark.parametrize("linear", [nn.Linear, Scaled, OwnLinear])
def test_a_converted_model_survives_pickling(linear):
    model = Net(linear, ScaledEmbedding)
    parallelize(model, net_plan(model, 2), dry_mesh(1, 2, device="cpu"))
    again = pickle.loads(pickle.dumps(model))
    assert [type(m).__name__ for m in again.modules()] == [type(m).__name__ for m in model.modules()]
    assert isinstance(again.up, linear) and again.state_dict().keys() == model.state_dict().keys()
    given = ids(0)["ids"]
    torch.testing.assert_close(again(given), model(given))


def test_layers_print_the_whole_size_and_the_degree():
    model = Net(nn.Linear)
    parallelize(model, net_plan(model, 2), dry_mesh(1, 2, device="cpu"))
    assert repr(model.up) == "ColumnParallelLinear(in_features=4, out_features=3, bias=True, whole=(7, 4), tp=2)"
    assert repr(model.down) == "RowParallelLinear(in_features=3, out_features=4, bias=True, whole=(4, 7), tp=2)"
    assert repr(model.words) == "VocabParallelEmbedding(6, 4, padding_idx=2, whole=(12, 4), tp=2)"
    assert isinstance(model.up, ColumnParallelLinear) and isinstance(model.down, RowParallelLinear)
    assert isinstance(model.words, VocabParallelEmbedding)


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_options_that_need_the_whole_vocabulary_are_refused(option):
    model = Net(nn.Linear, lambda *a, **k: nn.Embedding(*a, **k, **{option: 1}))
    with pytest.raises(
        PlanError, match=rf"words: an embedding with {option}=1.* cannot be cut by words. Use --set words"
    ):
        parallelize(model, net_plan(model, 2), dry_mesh(0, 2))


class OwnEmbedding(nn.Embedding):
    def forward(self, ids):
        return self.weight[ids]


def test_an_embedding_with_a_lookup_of_its_own_is_refused():
    model = Net(nn.Linear, OwnEmbedding)
    with pytest.raises(PlanError, match=re.escape("words: OwnEmbedding looks words up in code of its own")):
        parallelize(model, net_plan(model, 2), dry_mesh(0, 2))


class Normed(nn.Module):
    """Channels that a batch norm is over; ``kind`` is one over all ranks, or over this one."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Conv1d(5, 8, 3), kind(8), nn.Conv1d(8, 5, 3)

    def forward(self, x):
        return self.down(F.relu(self.norm(self.up(x))))


def trained(module, x):
    """What a step in training gives and leaves behind."""
    y = module.train()(x)
    y.square().sum().backward()
    return y.detach(), module.down.bias.grad, module.norm


def normed(mesh, planned):
    x = torch.randn(4, 5, 9, generator=torch.Generator().manual_seed(1))
    whole, _, norm = trained(Normed(nn.BatchNorm1d), x)
    local = parallelize(Normed(nn.SyncBatchNorm), Plan.loads(planned), mesh)
    copied = copy.deepcopy(local)
    found, _, mine = trained(local, x)
    again, _, _ = trained(copied, x)
    part = slice(4 * mesh.rank, 4 * mesh.rank + 4)
    torch.testing.assert_close(mine.running_var, norm.running_var[part])
    torch.testing.assert_close(mine.weight.grad, norm.weight.grad[part])
    return [float((y - whole).abs().max()) for y in (found, again)]


def test_a_batch_norm_over_ranks_is_over_those_of_data_alone(run_ranks):
    plan = make_plan(Normed(nn.SyncBatchNorm), {"x": torch.randn(4, 5, 9)}, tp=2)
    assert plan["norm.weight"].layout.cut
    for errors in run_ranks(normed, 2, plan.dumps()):
        assert max(errors) < 1e-5


class Twice(nn.Module):
    """A layer called with values of three dims, and of four."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(6, 8)

    def forward(self, x):
        return self.part(x), self.part(x[None])


def test_what_a_call_returns_is_put_together_before_it_is_copied_for_all_calls():
    whole = Twice()
    gathers = [
        Boundary("gather", "part", "output", ("",), call=i, calls=2, dim=2 + i, blocks=rows(8).blocks) for i in (0, 1)
    ]
    copy_ = Boundary("copy", "part", "output", ("",), calls=2)
    plan = plan_of(whole, 2, {"part.weight": rows(8), "part.bias": rows(8)}, boundaries=(gathers[0], copy_, gathers[1]))
    local = parallelize(whole, plan, dry_mesh(0, 2, device="cpu"))
    (hook,) = (h for h in local.part._forward_hooks.values() if isinstance(h, AtOutput))
    assert [c.boundary.kind for c in hook.crossings] == ["gather", "gather", "copy"]
    assert [y.shape for y in local(torch.randn(2, 3, 6))] == [(2, 3, 8), (1, 2, 3, 8)]
