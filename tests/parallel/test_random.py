"""Dropout: the same numbers on every rank where values are whole, different ones where they are cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.same import columns, plan_of, rows
from tpconvert.parallel import parallelize
from tpconvert.parallel.random import seed_ranks
from tpconvert.spec.plan import Boundary, Plan, Switch


class Dropping(nn.Module):
    """Functional dropout of a cut value and of a whole one in one forward."""

    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 4, bias=False)

    def forward(self, x):
        self.mask = F.dropout(torch.ones_like(h := self.up(x)), 0.5, self.training)
        return x + F.dropout(self.down(h * self.mask), 0.5, self.training)


class Stack(nn.Module):
    def __init__(self, hidden, saving):
        super().__init__()
        self.layers = nn.ModuleList([Dropping(hidden), Dropping(hidden)])
        self.saving = saving

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.saving else layer(x)
        return x


def plan(module, tp, hidden):
    cut, boundaries, switches = {}, (), ()
    for i in range(2):
        p = f"layers.{i}."
        cut |= {p + "up.weight": rows(hidden), p + "up.bias": rows(hidden), p + "down.weight": columns(hidden)}
        boundaries += (
            Boundary("copy", p + "up", "input", ("args.0",)),
            Boundary("reduce", p + "down", "output", ("",)),
        )
        switches += (Switch(p + "up", "output", True), Switch(p + "down", "output", False))
    return Plan.loads(plan_of(module, tp, cut, boundaries=boundaries, switches=switches).dumps())


def train(mesh, hidden, saving):
    torch.manual_seed(0)
    model = Stack(hidden, saving).double()
    parallelize(model, plan(model, mesh.degree, hidden), mesh)
    seed_ranks(5, mesh)
    x = torch.ones(8, 4, dtype=torch.float64, requires_grad=True)
    out = model(x)
    masks = [layer.mask for layer in model.layers]
    after = torch.get_rng_state()
    out.square().sum().backward()
    again = [layer.mask for layer in model.layers]
    assert torch.equal(torch.get_rng_state(), after)
    second = model(x.detach())
    model.eval()
    assert torch.equal(model(x), model(x))
    return out.detach(), x.grad, masks, again, after, second.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("degree", "hidden"), [(2, 8), (2, 7), (3, 7)])
def test_whole_regions_draw_alike_and_cut_ones_differently_even_when_uneven(run_ranks, degree, hidden):
    results = run_ranks(train, degree, hidden, False)
    first = results[0]
    for out, grad, masks, _, after, second, _ in results[1:]:
        torch.testing.assert_close(out, first[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, first[1], rtol=1e-12, atol=0)
        torch.testing.assert_close(second, first[5], rtol=1e-12, atol=0)
        assert torch.equal(after, first[4])
        width = min(masks[0].shape[1], first[2][0].shape[1])
        assert not torch.equal(masks[0][:, :width], first[2][0][:, :width])
    assert not torch.equal(first[2][0], first[2][1])
    assert not torch.equal(first[0], first[5])


def test_activation_checkpointing_draws_the_same_numbers_again(run_ranks):
    for saved, plain in zip(run_ranks(train, 3, 7, True), run_ranks(train, 3, 7, False), strict=True):
        torch.testing.assert_close(saved[0], plain[0], rtol=0, atol=0)
        torch.testing.assert_close(saved[3], plain[2], rtol=0, atol=0)  # masks of the recomputation
        torch.testing.assert_close(saved[5:], plain[5:], rtol=0, atol=0)


def states(mesh):
    seed_ranks(5, mesh)
    return mesh.rank, mesh.dp_rank, torch.rand(3)


def test_seeds_are_the_same_on_tp_and_different_on_dp(run_ranks):
    a, b, c, d = run_ranks(states, 2, dp=2)
    assert torch.equal(a[2], b[2]) and torch.equal(c[2], d[2]) and not torch.equal(a[2], c[2])


def fails_inside(mesh, hidden):
    model = Stack(hidden, False).double()
    parallelize(model, plan(model, mesh.degree, hidden), mesh)
    seed_ranks(5, mesh)
    down = model.layers[0].down
    hook = down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(8, 4, dtype=torch.float64))
    hook.remove()
    torch.rand(mesh.rank + 1)
    model(torch.ones(8, 4, dtype=torch.float64))
    return torch.rand(3)


def test_a_forward_that_fails_in_a_cut_region_does_not_part_the_ranks(run_ranks):
    first, second = run_ranks(fails_inside, 2, 7)
    assert torch.equal(first, second)
