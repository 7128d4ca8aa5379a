"""Rows that products take in the order in which slices come: what is copied no more, and the same numbers."""

import math
from functools import partial

import pytest
import torch

from tests.parallel.test_schedule import Draft, passes_alone, results
from tests.parallel.test_wire import TOKENS, WIDTH, WORDS, model_of
from tpconvert.parallel import parallelize
from tpconvert.parallel.compiled.layers import layers_of
from tpconvert.parallel.compiled.rows import take_as_they_come
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

aten, wire = torch.ops.aten, torch.ops._c10d_functional
CAST = torch.ops.prims.convert_element_type.default
RANKS, TOKENS_OF_A_RANK, WIDE, NARROW = 2, 3, 8, 5
SHAPE = 3, 10


class Sliced(Draft):
    """Graphs with slices of sequences, on CPUs so that they can be run."""

    def __init__(self, sequences=4):
        super().__init__()
        self.sequences = sequences
        self.rows = RANKS * sequences * TOKENS_OF_A_RANK

    def value(self, name, *shape):
        return self.meant(self.graph.placeholder(name), torch.randn(shape))

    def then(self, target, *args, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        given = torch.fx.map_arg(args, lambda n: n.meta["val"])
        if target is wire.all_gather_into_tensor.default:
            made = torch.cat([given[0]] * RANKS)
        elif target is wire.reduce_scatter_tensor.default:
            made = given[0][:1]
        else:
            made = given[0] if target is wire.wait_tensor.default else target(*given, **kwargs)
        return self.meant(node, made)

    def gathered(self, x, cast=None, dims=(1, 0, 2, 3)):
        """Rows of ``x``, a rank's slice, in the order of the sequences."""
        came = self.then(wire.all_gather_into_tensor.default, self.then(aten.unsqueeze.default, x, 0), RANKS, "0")
        came = self.then(wire.wait_tensor.default, came)
        turned = self.then(aten.permute.default, came, list(dims))
        rows = self.then(aten.clone.default, turned, memory_format=torch.contiguous_format)
        rows = rows if cast is None else self.then(CAST, rows, cast)
        rows = self.then(aten.view.default, rows, [self.sequences, RANKS * TOKENS_OF_A_RANK, -1])
        return self.then(aten.view.default, rows, [self.rows, x.meta["val"].shape[-1]])

    def scattered(self, rows):
        """Rows in the order of the sequences, summed into slices."""
        shape = [self.sequences, RANKS, TOKENS_OF_A_RANK, rows.meta["val"].shape[1]]
        turned = self.then(aten.permute.default, self.then(aten.view.default, rows, shape), [1, 0, 2, 3])
        sent = self.then(aten.clone.default, turned, memory_format=torch.contiguous_format)
        start = self.then(wire.reduce_scatter_tensor.default, sent, "sum", RANKS, "0")
        return sent, self.then(wire.wait_tensor.default, start)

    def slice_(self, name="x"):
        return self.value(name, self.sequences, TOKENS_OF_A_RANK, WIDE)


def run(graph):
    """What a graph's outputs are, with collectives as in :class:`Sliced`; what scatters are given is told too."""
    values, sent = {}, []
    for node in graph.nodes:
        args = torch.fx.map_arg(node.args, values.__getitem__)
        if node.op == "placeholder":
            values[node] = node.meta["val"]
        elif node.op == "output":
            return [*args[0], *sent]
        elif node.target is wire.all_gather_into_tensor.default:
            values[node] = torch.cat([args[0], args[0] + 1])
        elif node.target is wire.reduce_scatter_tensor.default:
            sent.append(args[0])
            values[node] = args[0][:1]
        else:
            values[node] = args[0] if node.target is wire.wait_tensor.default else node.target(*args, **node.kwargs)
    raise AssertionError


def changed(draft, *outputs):
    """How many copies of rows there are before and after, once it is known that nothing else differs."""
    draft.graph.output(outputs)
    before, copies = run(draft.graph), [sum(n.target is aten.clone.default for n in draft.graph.nodes)]
    take_as_they_come(draft.graph)
    draft.graph.lint()
    torch.testing.assert_close(run(draft.graph), before)
    return [*copies, sum(n.target is aten.clone.default for n in draft.graph.nodes)]


def widths(draft):
    return [n.args[0].meta["val"].shape[-1] for n in draft.graph.nodes if n.target is aten.clone.default]


@pytest.mark.parametrize("dims", [(1, 0, 2, 3), (-3, -4, 2, -1)])
def test_a_product_of_what_was_gathered_takes_it_as_it_came(dims):
    draft = Sliced()
    rows = draft.gathered(draft.slice_(), dims=dims)
    products = [draft.then(aten.mm.default, rows, draft.value(f"w{i}", WIDE, NARROW)) for i in range(2)]
    biased = draft.then(aten.addmm.default, draft.value("b", NARROW), rows, draft.value("w", WIDE, NARROW))
    seen = draft.then(aten.view.default, products[0], [draft.rows, NARROW, 1])
    outputs = [draft.then(aten.neg.default, each) for each in (seen, products[1])]
    assert changed(draft, *outputs, biased) == [1, 3]  # each behind its product, where two are for the compiler to make
    assert widths(draft) == [NARROW] * 3


@pytest.mark.parametrize("made_here", [True, False])
def test_what_is_scattered_is_made_as_it_goes(made_here):
    draft = Sliced()
    lefts = [draft.value(f"x{i}", draft.rows, NARROW) for i in range(3 if made_here else 1)]
    lefts = [draft.then(aten.exp.default, x) for x in lefts] if made_here else lefts
    terms = [draft.then(aten.mm.default, x, draft.value(f"w{i}", NARROW, WIDE)) for i, x in enumerate(lefts)]
    total = terms[0]
    for term in terms[1:]:
        total = draft.then(aten.add.Tensor, total, term)
    _, out = draft.scattered(draft.then(CAST, total, torch.float64))
    assert changed(draft, out) == [1, len(terms)]
    assert widths(draft) == [NARROW] * len(terms)


def test_what_would_take_more_copies_than_it_spares_stays():
    """Two products that nobody can fuse with, behind a gather and before a scatter, forward and backward."""
    draft = Sliced()
    rows = draft.gathered(draft.slice_())
    products = [draft.then(aten.mm.default, rows, draft.value(f"w{i}", WIDE, NARROW)) for i in range(2)]
    grads = [draft.value(f"g{i}", draft.rows, NARROW) for i in range(2)]
    of_weights = [draft.then(aten.mm.default, draft.then(aten.permute.default, g, [1, 0]), rows) for g in grads]
    terms = [draft.then(aten.mm.default, g, draft.value(f"v{i}", NARROW, WIDE)) for i, g in enumerate(grads)]
    _, out = draft.scattered(draft.then(aten.add.Tensor, *terms))
    assert changed(draft, *products, *of_weights, out) == [2, 2]
    assert widths(draft) == [WIDE] * 2


def test_gradients_of_weights_sum_over_rows_in_the_order_of_slices():
    draft = Sliced()
    grad = draft.gathered(draft.slice_("g"), torch.float64)
    x = draft.then(aten.exp.default, draft.value("y", draft.rows, NARROW))
    _, out = draft.scattered(draft.then(aten.mm.default, x, draft.value("w", NARROW, WIDE)))
    wide = draft.then(CAST, x, torch.float64)
    of_weight = draft.then(aten.mm.default, draft.then(aten.permute.default, grad, [1, 0]), wide)
    turned = draft.then(aten.mm.default, draft.then(aten.permute.default, wide, [1, 0]), grad)
    of_bias = draft.then(aten.sum.dim_IntList, grad, [0], True)
    assert changed(draft, out, of_weight, turned, of_bias) == [2, 2]  # of x, and of what is made of it, once each
    assert widths(draft) == [NARROW] * 2


@pytest.mark.parametrize("way", ["one sequence", "read elsewhere", "not of products", "with a value for each row"])
def test_what_cannot_be_spared_stays(way):
    draft = Sliced(1 if way == "one sequence" else 4)
    given = [draft.value("x", draft.rows, NARROW), draft.value("w", NARROW, WIDE)]
    product = draft.then(aten.mm.default, *given)
    if way == "with a value for each row":
        product = draft.then(aten.addmm.default, draft.value("a", draft.rows, WIDE), *given)
    other = draft.then(aten.neg.default, draft.value("y", draft.rows, WIDE))
    made = draft.then(aten.add.Tensor, product, other) if way == "not of products" else product
    _, out = draft.scattered(made)
    outputs = (out, product) if way == "read elsewhere" else (out,)
    assert changed(draft, *outputs) == [1, 1]


# -- on ranks -----------------------------------------------------------------------------------------------------


def compiled_layers(mesh, name, plan):
    """Widths of what is copied, and what of the model's width a forward keeps of all tokens; the numbers are equal."""
    torch.compiler.reset()
    model = parallelize(model_of(name, 2).double(), Plan.loads(plan), mesh, sequence_parallel=True).train()
    ids = torch.arange(math.prod(SHAPE)).view(SHAPE) % WORDS
    eager, copied, kept = results(model, ids), [], []

    def look(graph):
        if not any(n.target in (aten.mm.default, aten.addmm.default) for n in graph.nodes):
            return  # what stands around the layers
        clones = [n for n in graph.nodes if n.target is aten.clone.default]
        copied.extend(n.args[0].meta["val"].shape[-1] for n in clones)
        outputs = next(n for n in graph.nodes if n.op == "output").args[0]
        shapes = [n.meta["val"].shape for n in outputs if isinstance(n, torch.fx.Node)]
        kept.extend(s for s in shapes if math.prod(s[:-1]) == ids.numel() and s[-1:] == (WIDTH,))

    for layer in layers_of(model):
        layer.compile(fullgraph=True, backend=partial(passes_alone, look=look))
    found = results(model, ids)
    for what, value in eager.items():
        torch.testing.assert_close(found[what], value, rtol=1e-11, atol=1e-11, msg=lambda m, w=what: f"{w}: {m}")
    return sorted(set(copied)), kept


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_layers_copy_nothing_of_the_models_width_and_keep_slices_of_it(run_ranks, name):
    plan = make_plan(model_of(name, 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2).dumps()
    for copied, kept in run_ranks(compiled_layers, 2, name, plan, timeout=240):
        assert copied and WIDTH not in copied
        assert not kept
