"""Dropout: the same numbers on every rank where values are whole, different ones where they are cut."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.same import columns, plan_of, rows
from tpconvert.parallel import compile_layers, dry_mesh, parallelize
from tpconvert.parallel.comm.random import Streams, Tape, add_switches, meshes_of, seed_ranks
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Boundary, Plan, Rewrite, Switch


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
    after = torch.rand(3)
    model(torch.ones(8, 4, dtype=torch.float64))
    return torch.cat([after, torch.rand(3)])


def test_a_forward_that_fails_in_a_cut_region_does_not_part_the_ranks(run_ranks):
    first, second = run_ranks(fails_inside, 2, 7)
    assert torch.equal(first, second)


def compiles(mesh):
    model = Stack(8, False).double()
    parallelize(model, plan(model, mesh.degree, 8), mesh)
    seed_ranks(5, mesh)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(8, 4, dtype=torch.float64))
    return out.detach(), torch.get_rng_state()


def test_a_compiled_model_keeps_the_ranks_together(run_ranks):
    (out, state), (other, other_state) = run_ranks(compiles, 2, timeout=120)
    torch.testing.assert_close(out, other, rtol=1e-12, atol=0)
    assert torch.equal(state, other_state)


def test_switches_survive_copying_and_pickling_and_rest_on_a_dry_mesh():
    model = Stack(8, False)
    parallelize(model, plan(model, 2, 8), dry_mesh(1, 2, device="cpu"))
    model = copy.deepcopy(pickle.loads(pickle.dumps(model)))
    torch.manual_seed(0)
    model(torch.ones(8, 4))
    after = torch.get_rng_state()
    torch.manual_seed(0)
    for _ in range(2):
        F.dropout(torch.ones(8, 4))
        F.dropout(torch.ones(8, 4))
    assert torch.equal(torch.get_rng_state(), after)


class OneDraw(nn.Module):
    def forward(self, x):
        return x


def rewritten(mesh):
    draw = {"name": "d", "op": "draw", "cut": True}
    numbers = {"name": "n", "op": "call", "target": "torch.rand_like", "args": [{"$": "args.0"}]}
    back = {"name": "w", "op": "draw", "cut": False}
    rewrite = Rewrite("", "", {"args.0": "tensor"}, (draw, numbers, back), {"$": "n"})
    module = OneDraw()
    parallelize(module, plan_of(module, mesh.degree, {}, rewrites=(rewrite,)), mesh)
    seed_ranks(5, mesh)
    return module(torch.ones(mesh.rank + 3)), torch.rand(2)


def test_a_rewritten_forward_may_switch_too(run_ranks):
    (cut, whole), (other_cut, other_whole) = run_ranks(rewritten, 2)
    assert torch.equal(whole, other_whole) and not torch.equal(cut, other_cut[:3])


class Nest(nn.Module):
    """Draws before and after its child."""

    def __init__(self, child=None):
        super().__init__()
        self.child = child

    def forward(self, x):
        before = torch.rand(2)
        inner = [] if self.child is None else self.child(x)
        return [before, *inner, torch.rand(2)]


def nested(mesh):
    torch.manual_seed(5)
    model = Nest(Nest(Nest(Nest())))
    around = [
        Switch("child", "input", True),
        Switch("child", "output", False),
        Switch("child.child", "input", True),
        Switch("child.child", "output", False),
        Switch("child.child.child", "input", False),
        Switch("child.child.child", "output", True),
    ]
    parallelize(model, plan_of(model, mesh.degree, {}, switches=tuple(around)), mesh)
    return model(torch.ones(1))


def test_modules_with_switches_may_lie_within_each_other(run_ranks):
    mine, other = run_ranks(nested, 2)
    alike = [torch.equal(a, b) for a, b in zip(mine, other, strict=True)]
    assert alike == [True, False, False, True, True, False, False, True]
    assert len({tuple(x.tolist()) for x in mine}) == len(mine)


def test_a_recorded_forward_is_given_the_seeds_that_it_would_take():
    streams, device, seeds = Streams(), torch.device("cpu"), []
    torch.manual_seed(5)
    for _ in range(3):
        streams.draw(True, 1, device)
        seeds.append(torch.default_generator.initial_seed())
        streams.draw(False, 1, device)
    after = torch.rand(())
    tape = Tape(1, torch.Generator(), tuple(torch.Generator() for _ in range(streams.begun)))
    torch.manual_seed(5)
    tape.seed()
    assert [each.initial_seed() for each in tape.cuts] == seeds and len(set(seeds)) == 3
    assert torch.equal(torch.rand(()), after)


def test_meshes_are_found_where_forwards_draw_cut_numbers():
    root, mesh = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), dry_mesh(0, 2)
    assert meshes_of(root) == []
    add_switches(root[1], [Switch("", "input", True), Switch("", "output", False)], mesh)
    assert meshes_of(nn.Sequential(root, nn.Linear(2, 2))) == [mesh]


def told_of_equal_draws(mesh, plan, dropout):
    """What compiling says of a GPT-2 whose attention drops entries, or none."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_head=4, n_layer=2, n_positions=16, attn_pdrop=dropout)
    model = parallelize(GPT2LMHeadModel(config), Plan.loads(plan(config)), mesh)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compile_layers(model)
    return [str(w.message) for w in said if "compiled" in str(w.message)]


def planned(config):
    from transformers import GPT2LMHeadModel

    return make_plan(GPT2LMHeadModel(config), {"input_ids": torch.arange(8).view(1, 8)}, tp=2).dumps()


def test_compiled_layers_that_drop_alike_on_all_ranks_are_told_of_once(run_ranks):
    said, other = run_ranks(told_of_equal_draws, 2, planned, 0.1)
    assert len(said) == 1 and not other
    assert "transformer.h.0.attn and 1 like it: compiled, all tp ranks drop the same entries" in said[0]
    assert run_ranks(told_of_equal_draws, 2, planned, 0.0) == [[], []]
