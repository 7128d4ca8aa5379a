"""Products of one value as one product: equal numbers, fewer products, and no copy of a weight that is kept."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.parallel.test_schedule import passes_alone, results
from tests.parallel.test_wire import TOKENS, WORDS, model_of
from tpconvert.parallel import parallelize
from tpconvert.parallel.compiled import schedule
from tpconvert.parallel.compiled.layers import layers_of
from tpconvert.parallel.compiled.merged import PRODUCTS, merge_products
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

aten = torch.ops.aten
WIDTH, HEAD, COUNT = 12, 4, 15
ALL = {"rows": 1, "entries": 2**40}


class Attention(nn.Module):
    """Heads of a value, with what a test says besides."""

    widths = (8, 8, 8)
    bias = True

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, n, bias=self.bias) for n in self.widths)
        self.out = nn.Linear(self.widths[0], WIDTH)

    def heads(self, x):
        return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)

    def mixed(self, q, k, v):
        y = F.scaled_dot_product_attention(*map(self.heads, (q, k, v)), enable_gqa=k.shape != q.shape)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        return x + self.mixed(*(part(x) for part in self.parts))


class Bare(Attention):
    """Without biases."""

    bias = False


class Grouped(Bare):
    """Fewer heads of keys and values."""

    widths = 16, 8, 8


class ReadElsewhere(Attention):
    """The rows are read by what is no product, too."""

    def forward(self, x):
        return x.tanh() + super().forward(x)


class Doubled(Attention):
    """The rows are added twice, and their gradient has one term twice."""

    def forward(self, x):
        return x + x + super().forward(x)


class Returned(Attention):
    """What one of the products makes is returned too."""

    def forward(self, x):
        q, k, v = (part(x) for part in self.parts)
        return self.mixed(q, k, v) + q.sum() * k.square().sum()


class Gated(Attention):
    """A feed-forward besides, whose gate is not kept as the product that it is."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 16, bias=False) for _ in range(2))
        self.down = nn.Linear(16, WIDTH, bias=False)

    def forward(self, x):
        x = super().forward(x)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Adapted(Bare):
    """An adapter on one of them, which reads the same rows; what that one makes is not kept."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q, k, v = (part(x) for part in self.parts)
        return self.mixed(q + self.up(self.down(x)), k, v)


class Checkpointed(Attention):
    """All is made again in the backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Selected(Attention):
    """All but products is made again in the backward."""

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default])
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


class Frozen(Attention):
    """The gradient of one weight is not asked for: its product stays."""

    def __init__(self):
        super().__init__()
        self.parts[1].weight.requires_grad_(False)


class Viewed(Attention):
    """One is seen in a shape in which a slice cannot be seen."""

    def forward(self, x):
        q, k, v = (part(x) for part in self.parts)
        return self.mixed(q, k, v) + k.view(-1).cumsum(0).sum()


class Turned(Attention):
    """Two are turned by positions, after which nobody keeps them; a slice of the third would keep them."""

    def forward(self, x):
        q, k, v = (part(x) for part in self.parts)
        return x + self.mixed(q * torch.arange(8).cos(), k * torch.arange(8).sin(), v)


class Odd(Attention):
    """Slices would begin anywhere."""

    widths = 12, 12, 12


class Tied(Attention):
    """One weight twice."""

    def __init__(self):
        super().__init__()
        self.parts[1].weight = self.parts[0].weight


class Merged:
    """Counts the products of graphs, and what of the size of the joined weights a forward keeps."""

    def __init__(self, **limits):
        self.limits, self.products, self.kept = limits, [], []

    def backend(self, gm, inputs):
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition

        def partitioned(joint, joint_inputs, **rest):
            merge_products(joint.graph, **self.limits)
            joint.graph.lint()
            joint.recompile()
            return min_cut_rematerialization_partition(joint, joint_inputs, **rest)

        def compiled(graph_module, _):
            nodes = list(graph_module.graph.nodes)
            self.products.append(sum(n.target in PRODUCTS for n in nodes))
            made = {n for n in nodes if n.target is aten.cat.default}
            self.kept += [n for n in nodes[-1].args[0] if n in made]
            return make_boxed_func(graph_module)

        ways = {"fw_compiler": compiled, "bw_compiler": compiled, "partition_fn": partitioned}
        return aot_autograd(**ways, decompositions=select_decomp_table())(gm, inputs)


def gradients(call, module, x):
    module.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = call(x)
    y.square().sum().backward()
    return [
        y.detach(),
        *([x.grad] if x.requires_grad else []),
        *(p.grad for p in module.parameters() if p.requires_grad),
    ]


def compared(cls, x, **limits):
    """The products of the forward and of the backward; the numbers are those of eager code."""
    torch.compiler.reset()
    torch.manual_seed(0)
    module, merged = cls().double(), Merged(**limits)
    compiled = torch.compile(module, backend=merged.backend, fullgraph=True)
    for mine, theirs in zip(gradients(compiled, module, x), gradients(module, module, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert not merged.kept
    return merged.products


X = torch.randn(3, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.mark.parametrize(
    ("cls", "forward", "backward"),
    [
        (Attention, 4 - 2, 8 - 4), (Bare, 4 - 2, 8 - 4), (Grouped, 4 - 2, 8 - 4), (ReadElsewhere, 4 - 2, 8 - 4),
        (Doubled, 4 - 2, 8 - 4),
        (Returned, 4 - 2, 8 - 4), (Frozen, 4 - 1, 7 - 2), (Gated, 7 - 2, 14 - 4), (Adapted, 6 - 2, 12 - 4),
        (Checkpointed, 4 - 2, None), (Selected, 4 - 2, 8 - 4),
    ],
)  # fmt: skip
def test_products_of_one_value_are_one_and_so_are_their_gradients(cls, forward, backward):
    found = compared(cls, X, **ALL)
    assert found[0] == forward and backward in (None, found[1])


@pytest.mark.parametrize("cls", [Viewed, Turned, Odd, Tied])
def test_what_would_gain_nothing_or_is_no_slice_stays(cls):
    assert compared(cls, X, **ALL) == compared(cls, X)


def test_rows_without_a_gradient_stay():
    assert compared(Attention, X.detach(), **ALL) == [4, 5]


@pytest.mark.parametrize(
    ("limits", "merges"),
    [
        ({"rows": COUNT, "entries": COUNT * 8}, True), ({"rows": COUNT + 1, "entries": COUNT * 8}, False),
        ({"rows": COUNT, "entries": COUNT * 8 - 1}, False), ({}, False),
    ],
)  # fmt: skip
def test_it_is_done_for_many_rows_and_narrow_products(limits, merges):
    assert compared(Attention, X, **limits) == ([2, 4] if merges else [4, 8])


class Unequal(nn.Module):
    """A narrow layer and a wide one."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 40)

    def forward(self, x):
        return self.narrow(x).unsqueeze(-1) * self.wide(x).unsqueeze(-2)


def test_what_all_together_fills_a_gpu_often_stays():
    assert compared(Unequal, X, rows=1, entries=COUNT * 12) == [1, 2]
    assert compared(Unequal, X, rows=1, entries=COUNT * 12 - 1) == [2, 4]


def test_weights_in_another_dtype_are_joined_in_that():
    torch.compiler.reset()
    module, merged = Attention(), Merged(**ALL)
    compiled = torch.compile(module, backend=merged.backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = (gradients(call, module, X.float().detach().requires_grad_()) for call in (compiled, module))
    assert merged.products == [2, 4]
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)


def test_another_length_is_compiled_as_it_is():
    torch.compiler.reset()
    module, merged = Attention().double(), Merged(**ALL)
    compiled = torch.compile(module, backend=merged.backend, fullgraph=True)
    for length in (5, 4, 3):
        x = X[:, :length]
        for mine, theirs in zip(gradients(compiled, module, x), gradients(module, module, x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert merged.products == [2, 4, 4, 8]


# -- on ranks -----------------------------------------------------------------------------------------------------


def compiled_layers(mesh, name, plan, sliced):
    """How many products the layers have, merged and not; the numbers are those of eager code."""
    model = parallelize(model_of(name, 2).double(), Plan.loads(plan), mesh, sequence_parallel=sliced).train()
    ids = torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS
    eager, counts = results(model, ids), []
    for limits in (ALL, {}):
        torch.compiler.reset()
        counts.append(0)

        def look(graph):
            counts[-1] += sum(n.target in PRODUCTS for n in graph.nodes)

        with mock.patch.object(schedule, "merge_products", partial(merge_products, **limits)):
            for layer in layers_of(model):
                layer.compile(fullgraph=True, backend=partial(passes_alone, look=look))
            found = results(model, ids)
        for what, value in eager.items():
            torch.testing.assert_close(found[what], value, rtol=1e-11, atol=1e-11, msg=lambda m, w=what: f"{w}: {m}")
    return counts


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("tp", [2, 3])
def test_layers_are_equal_on_ranks(run_ranks, name, sliced, tp):
    plan = make_plan(model_of(name, 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=tp)
    for merged, apart in run_ranks(compiled_layers, tp, name, plan.dumps(), sliced, timeout=240):
        assert merged == apart if name == "gpt2" else merged < apart  # whose q, k, v are one layer
