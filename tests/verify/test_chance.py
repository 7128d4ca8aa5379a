"""Random numbers of a converted model are the whole one's, or this rank's part of them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tpconvert.planning import make_plan
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.plan import Plan, Switch, Verdict
from tpconvert.verify import compare_on_rank
from tpconvert.verify.measure.dealt import Deal


class Noisy(nn.Module):
    """Noise on a cut value: its own on each rank."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        h = self.up(x)
        if self.kind == "like":
            h = h + torch.randn_like(h)
        elif self.kind == "in place":
            h = h + torch.empty_like(h).exponential_()
        elif self.kind == "rows":  # whole: drawn before what is cut, which takes fewer numbers on a rank
            h = h * torch.rand(1, h.shape[-1]) + torch.rand(x.shape[1], 1)
        return self.down(h.relu())


class Heads(nn.Module):
    """Noise of each head of each example, in one dim."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        b, n, _ = x.shape
        v = self.value(x).view(b, n, self.heads, -1).transpose(1, 2).reshape(b * self.heads, n, -1)
        v = v + torch.randn(v.shape[0], 1, 1)
        return self.out(v.view(b, self.heads, n, -1).transpose(1, 2).reshape(b, n, -1))


class Channels(nn.Module):
    """Dropout of whole channels first, which is a function of torch's around its op, and then of cut values."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)  # a rank of two has as many as come in

    def forward(self, x):
        h = F.dropout2d(x.unsqueeze(1), 0.5, self.training).squeeze(1)
        h = F.dropout(F.dropout(h, 0.1, self.training), 0.1, self.training)
        h = F.dropout(self.up(h).relu(), 0.5, self.training)
        return F.dropout(self.down(h), 0.5, self.training)


class Again(nn.Module):
    """A forward that the backward runs again, with dropout and noise."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def inner(self, x):
        h = F.dropout(self.up(x), 0.5, self.training)
        return self.down(h + torch.randn_like(h))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Reversed(torch.autograd.Function):
    """Runs a forward again in the backward, dropout and all, without a checkpoint's care for random numbers."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 8))
        self.last = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, x):
        return self.last(Reversed.apply(x, self.layer) if x.requires_grad else self.layer(x))


def built(kind):
    torch.manual_seed(0)
    models = {
        "heads": Heads, "channels": Channels, "checkpoint": Again, "reversible": Reversible
    }  # fmt: skip
    module = models.get(kind, lambda: Noisy(kind))()
    return module, (torch.randn(3, 5, 8),)


def proved(mesh, kind, plan):
    return compare_on_rank(*built(kind), Plan.loads(plan), mesh)


@pytest.mark.parametrize(("kind", "tp"), [
    ("like", 2), ("like", 3), ("in place", 2), ("rows", 2), ("heads", 2), ("heads", 3), ("channels", 2),
    ("checkpoint", 2), ("reversible", 2),
])  # fmt: skip
def test_a_model_that_draws_numbers_for_what_is_cut_is_proved_equal(run_ranks, kind, tp):
    plan = make_plan(*built(kind), tp=tp)
    assert any(v.layout.cut for v in plan.verdicts)
    result = run_ranks(proved, tp, kind, plan.dumps())[0]
    assert result.equal, result.verdict()
    assert any(c.kind == "replicas" for c in result.checks)  # drawn as ranks draw, besides


class Whole(Noisy):
    """Chance in a whole value: a sum over ranks comes after it, and hides whose numbers went into it."""

    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training) if self.kind == "dropout" else x + torch.rand_like(x))


def wholly(kind):
    torch.manual_seed(0)
    return Whole(kind), (torch.randn(3, 5, 8),)


def wholly_proved(mesh, kind, plan):
    return compare_on_rank(*wholly(kind), Plan.loads(plan), mesh)


@pytest.mark.parametrize("kind", ["noise", "dropout"])
def test_ranks_that_draw_their_own_numbers_for_what_is_whole_are_found(run_ranks, kind):
    plan = make_plan(*wholly(kind), tp=2)
    assert not plan.switches and run_ranks(wholly_proved, 2, kind, plan.dumps())[0].equal
    own = replace(plan, switches=(Switch("", "input", True, True), Switch("", "output", False, True)))
    result = run_ranks(wholly_proved, 2, kind, own.dumps())[0]
    name = {"noise": "draw 1 (rand_like)", "dropout": "dropout 1 (dropout)"}[kind]
    assert [c.name for c in result.checks if not c.equal] == [name]


@pytest.mark.parametrize(("whole", "own", "rank", "kept"), [
    ((2, 12), (2, 6), 1, [6, 7, 8, 9, 10, 11]),
    ((24, 1), (12, 1), 0, [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17]),
    ((2, 12), (2, 12), 1, list(range(12))),
    ((2, 12), (1, 6), 1, None),
    ((2, 12), (2, 5), 1, None),
    ((10, 1), (5, 1), 1, [5, 6, 7, 8, 9]),
])  # fmt: skip
def test_the_part_of_numbers_that_is_a_ranks(whole, own, rank, kept):
    layout = Layout(0, (Block(12),))
    plan = Plan(2, (Verdict("up.weight", (12, 8), "float32", layout, "cut"),))
    dim = max(range(2), key=lambda d: whole[d])
    numbers = torch.arange(whole[dim]).view([-1 if d == dim else 1 for d in range(2)]).expand(whole)
    part = Deal(plan, rank, 2).part(numbers, own)
    assert kept is None if part is None else part.select(1 - dim, 0).tolist() == kept
