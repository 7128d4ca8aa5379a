"""Products that own a collective give what the plain ones give: outputs, gradients, and gradients of gradients."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.test_collectives import value
from tests.parallel.test_schedule import passes_alone
from tests.parallel.test_wire import TOKENS, WORDS, Wire, model_of
from tpconvert.parallel import Mesh, parallelize
from tpconvert.parallel.comm.collectives import all_gather, gather, gather_slices, parts_of
from tpconvert.parallel.compiled.layers import layers_of
from tpconvert.parallel.layers import linear as layers
from tpconvert.parallel.layers import products
from tpconvert.planning import make_plan
from tpconvert.spec.layout import Block
from tpconvert.spec.plan import Plan


@contextlib.contextmanager
def set_to(module, **values):
    old = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(old)


def twice(model):
    """The output, the gradients, and the gradients of the gradients' size."""
    ids = torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS
    parameters = [p for name, p in model.named_parameters() if "proj" in name]
    out = model(input_ids=ids).logits
    first = torch.autograd.grad(out.square().sum(), parameters, create_graph=True)
    plain = torch.autograd.grad(model(input_ids=ids).logits.square().sum(), parameters)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
    return [out.detach(), *(g.detach() for g in first), *plain, *second]


def alike(mesh, plan, options, changed):
    model = parallelize(model_of("llama", 2, "eager").double(), Plan.loads(plan), mesh, **options)
    others = {"gathered": {"was_gathered": lambda x: False}, "plain": {"PLAIN": ()}}
    with set_to(layers, LEAST=1, **others.get(changed, {})):
        if changed == "waves":
            for layer in model.modules():
                vars(layer).update({"tp_waves": 1} if hasattr(layer, "tp_waves") else {})
        return [t.numpy() for t in twice(model)]


@pytest.mark.parametrize(
    ("options", "changed"),
    [({}, "plain"), ({"waves": 3}, "waves"), ({"sequence_parallel": True}, "gathered")],
    ids=["in place", "waves", "again"],
)
def test_a_product_with_its_collective_is_the_plain_one(run_ranks, options, changed):
    inputs = {"input_ids": torch.randint(0, WORDS, TOKENS)}
    plan = make_plan(model_of("llama", 2, "eager"), inputs, tp=2).dumps()  # attention that can be differentiated twice
    ours = run_ranks(alike, 2, plan, options, "", timeout=240)
    plain = run_ranks(alike, 2, plan, options, changed, timeout=240)
    for mine, wanted in zip(ours, plain, strict=True):
        for a, b in zip(mine, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-9, atol=1e-9)


def waves_compiled(mesh, plan):
    torch.compiler.reset()
    with set_to(layers, LEAST=1):
        model = parallelize(model_of("llama", 2).double(), Plan.loads(plan), mesh, waves=2)
        ids = torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS

        def run():
            model.zero_grad()
            out = model(input_ids=ids).logits
            out.square().sum().backward()
            return [out.detach(), *(p.grad.clone() for p in model.parameters())]

        with Wire() as wire:
            eager = run()
        for layer in layers_of(model):
            layer.compile(fullgraph=True, backend=passes_alone)
        torch.testing.assert_close(run(), eager, rtol=1e-11, atol=1e-11)
    return wire.counts["forward", "all-reduce"]


def test_waves_compile_into_one_graph(run_ranks):
    plan = make_plan(model_of("llama", 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2).dumps()
    sums = run_ranks(waves_compiled, 2, plan, timeout=240)
    assert sums == [1 + 2 * 2 * 2 + 2 * 2 + 1] * 2  # words, two waves of each region, gradients of regions and head


def autocast(mesh, plan):
    model = parallelize(model_of("llama", 2), Plan.loads(plan), mesh, sequence_parallel=True)
    ids = torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS
    found = []
    for changed in ({}, {"was_gathered": lambda x: False}):
        with set_to(layers, **changed):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(input_ids=ids).logits
            out.float().square().sum().backward()
            found.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=2**-6, atol=2**-6)
    assert all(g.dtype == torch.float32 for g in found[0][1:])


def test_slices_are_kept_under_autocast_too(run_ranks):
    plan = make_plan(model_of("llama", 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2).dumps()
    run_ranks(autocast, 2, plan, timeout=240)


def test_one_rank_is_left_as_it_is():
    model = model_of("llama", 2)
    classes = {name: type(part) for name, part in model.named_modules()}
    plan = make_plan(model, {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=1)
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    alone = parallelize(model, plan, Mesh(0, 1, None, torch.device("cpu")), sequence_parallel=True, waves=2)
    assert {name: type(part) for name, part in alone.named_modules()} == classes
    assert {name: dict(vars(part)) for name, part in alone.named_modules()} == before
    assert not any(p._forward_hooks or p._forward_pre_hooks for p in alone.modules())


def written(mesh, after):
    """The gradient of a weight, of a gathered value that is doubled in place first or not, and what it should be."""
    slice_, weight = torch.ones(1, 2, 3, dtype=torch.float64).requires_grad_(), torch.ones(4, 3, dtype=torch.float64)
    weight.requires_grad_()
    x = products.gathered_from(slice_, 1, mesh)
    if after:
        x.mul_(2)
    assert products.was_gathered(x) is not after
    product = products.kept_product if products.was_gathered(x) else torch.nn.functional.linear
    product(x, weight, None).sum().backward()
    return weight.grad.tolist()


@pytest.mark.parametrize("after", [False, True])
def test_what_was_written_into_since_it_was_gathered_is_not_gathered_again(run_ranks, after):
    tokens, factor = 4, 2 if after else 1  # two on each of two ranks
    assert run_ranks(written, 2, after)[0] == [[float(tokens * factor)] * 3] * 4


class Names(TorchDispatchMode):
    """The ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def ops_of_backward(mesh):
    slice_, weight = torch.ones(1, 2, 3).requires_grad_(), torch.ones(4, 3).requires_grad_()
    y = products.kept_product(products.gathered_from(slice_, 1, mesh), weight, None)
    with Names() as called:
        y.sum().backward()
    return called.names


def test_what_is_gathered_again_is_on_its_way_while_the_gradient_of_the_input_is_computed(run_ranks):
    names = run_ranks(ops_of_backward, 2)[0]
    gathers = [at for at, name in enumerate(names) if "allgather" in name]
    assert len(gathers) == 1 and gathers[0] < min(at for at, name in enumerate(names) if name.endswith("mm"))


def sum_of_a_product(mesh, frozen):
    """The ops of a sum of products, and the elements that are kept for its backward."""
    x, weight = torch.ones(1, 2, 3).requires_grad_(), torch.ones(5, 3, requires_grad=not frozen)
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen,  # a mode might keep products
    ):
        y = products.summed_product(x, weight, mesh)
    y.sum().backward()
    assert y.tolist() == [[[6.0] * 5] * 2] and x.grad.tolist() == [[[5.0] * 3] * 2]
    assert weight.grad is None if frozen else weight.grad.tolist() == [[2.0] * 3] * 5
    return [event.name for event in seen.events()], kept


def test_a_product_is_summed_where_it_is(run_ranks):
    names, kept = run_ranks(sum_of_a_product, 2, False)[0]
    assert any("allreduce" in name for name in names) and not any("clone" in name or "copy" in name for name in names)
    assert kept == [6, 15]


def test_a_frozen_weight_keeps_no_input(run_ranks):
    assert run_ranks(sum_of_a_product, 2, True)[0][1] == [15]


def compiled(mesh):
    """Whether compiled functions have the gradients of eager ones, that of what is in one run of memory too."""
    rows = parts_of(0, (Block(2 * 4),), mesh)
    found = {}
    for name, function in {
        "product": lambda x, w: products.summed_product(x, w, mesh),
        "product of sequences": lambda x, w: products.summed_product(x.view(2, 2, 6), w, mesh),
        "gather": lambda x, w: gather(x @ w.t(), rows, mesh),
        "slices": lambda x, w: all_gather(x @ w.t(), 1, mesh),
        "first slices": lambda x, w: gather_slices(x @ w.t(), 0, mesh),
    }.items():
        graph = torch.compile(function, backend="aot_eager", fullgraph=True)
        x, w = value(1, 4, 6).requires_grad_(), value(2, 5, 6).requires_grad_()
        eager, traced = (torch.autograd.grad(f(x, w).square().sum(), (x, w)) for f in (function, graph))
        found[name] = all(a.any() and torch.allclose(a, b) for a, b in zip(eager, traced, strict=True))
    return found


def test_compiled_products_and_gathers_have_the_gradients_of_eager_ones(run_ranks):
    for found in run_ranks(compiled, 2, timeout=120):
        assert found and all(found.values()), found
