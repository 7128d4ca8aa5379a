"""Exchanges of two ranks: who may have them, how they stand in graphs, and that these give the same numbers."""

from dataclasses import replace

import pytest
import torch
from torch import fx

from tests.parallel.test_products import set_to
from tests.parallel.test_schedule import Draft, aten, passes_alone, results
from tests.parallel.test_wire import TOKENS, WORDS, model_of
from tpconvert.errors import PlanError
from tpconvert.parallel import Mesh, make_mesh, parallelize
from tpconvert.parallel.comm.peers import Peers
from tpconvert.parallel.compiled import substitute
from tpconvert.parallel.compiled.layers import layers_of, norms_of
from tpconvert.parallel.layers import linear as layers
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore")


def refused(mesh):
    assert make_mesh(2, collectives="auto").peers is None
    with pytest.raises(PlanError, match=r"collectives=copies: copies are between GPUs, and the ranks are on cpu\. Use"):
        make_mesh(2, collectives="copies")
    with pytest.raises(PlanError, match="collectives is 'fast'; it is one of auto, copies, nccl"):
        make_mesh(2, collectives="fast")


def of_four(mesh):
    with pytest.raises(PlanError, match="copies are between two ranks, and there are 4"):
        make_mesh(4, collectives="copies")


def test_ranks_without_gpus_are_told_and_auto_leaves_them_to_their_backend(run_ranks):
    run_ranks(refused, 2, dp=2)
    run_ranks(of_four, 4)


# -- graphs -------------------------------------------------------------------------------------------------------


class Ordered(Draft):
    """Drafts whose group has peers; ops of ours are there by name only."""

    least = 1

    def ordered(self, *outputs):
        from tpconvert.parallel.compiled.schedule import HideCollectives

        self.graph.output(outputs)
        self.graph = fx.GraphModule({}, self.graph).graph
        HideCollectives({"0": ("begin_t", "end_t", self.least, 1)})(self.graph)
        self.graph.lint()
        names = [n.name for n in self.graph.nodes if n.op == "call_function"]
        return [name.replace("_default", "").replace("_tensor_Tensor", "_tensor") for name in names]


@pytest.fixture
def ops():
    library = torch.library.Library("tpconvert_peers", "FRAGMENT")
    library.define("begin_t(Tensor x, str kind, Tensor? after) -> Tensor")
    library.define("end_t(Tensor token, str kind, Tensor x, Tensor? y, Tensor? z, Tensor? last) -> Tensor")
    yield
    library._destroy()


def test_a_weight_gradient_goes_between_what_is_sent_and_what_is_received(ops):
    draft = Ordered()
    x, weight, grad = draft.value("x", 32, 64), draft.value("w", 32, 32), draft.value("g")
    total = draft.summed(draft.product(grad, weight))
    names = draft.ordered(draft.op(aten.neg.default, total), draft.product(x, grad))
    assert names == ["mm", "begin_t", "mm_1", "end_t", "neg"]


def test_waves_are_received_at_once_and_those_of_other_dims_are_not(ops):
    for dim, wanted in ((0, ["end_t_2"]), (1, ["end_t", "end_t_1", "cat"])):
        draft = Ordered()
        x, y, weight = draft.value("x"), draft.value("y"), draft.value("w", 32, 32)
        sums = [draft.summed(draft.product(v, weight)) for v in (x, y)]
        shape = (128, 32) if dim == 0 else (64, 64)
        both = draft.op(aten.cat.default, sums, dim, like=torch.empty(shape, device="meta"))
        assert draft.ordered(both) == ["mm", "begin_t", "mm_1", "begin_t_1", *wanted]
        begun = [n for n in draft.graph.nodes if n.name.startswith("begin_t")]
        assert [n.args[2] for n in begun] == [None, begun[0]]


def test_of_what_is_scattered_the_rows_of_the_other_rank_are_computed_first(ops):
    """Rank 1 of two: the first half of the rows is sent, and the other is computed meanwhile."""
    with set_to(substitute, ROWS=1):
        draft = Ordered()
        x, weight = draft.value("x"), draft.value("w", 32, 32)
        parts = draft.op(aten.view.default, draft.product(x, weight), [2, 32, 32], like=torch.empty(2, 32, 32))
        start = draft.op(torch.ops._c10d_functional.reduce_scatter_tensor.default, parts, "sum", 2, "0")
        mine = torch.empty(1, 32, 32, device="meta")
        total = draft.op(torch.ops._c10d_functional.wait_tensor.default, start, like=mine)
        names = draft.ordered(draft.op(aten.neg.default, total, like=mine))
    at = {name: i for i, name in enumerate(names)}
    assert at["mm_1"] < at["begin_t"] < at["mm_2"] < at["end_t"] < at["view_1"] < at["neg"] and "mm" not in at
    slices = {n.name: n.args[2:] for n in draft.graph.nodes if "slice" in n.name}
    assert list(slices.values()) in ([(0, 32), (32, 64)], [(32, 64), (0, 32)])
    rows = {n.name.replace("_default", ""): n.args[0].args[2:] for n in draft.graph.nodes if n.name.startswith("mm")}
    assert rows == {"mm_1": (0, 32), "mm_2": (32, 64)}


def test_own_rows_of_a_product_stay_beside_its_exchange_though_the_next_needs_them(ops):
    with set_to(substitute, ROWS=1):
        draft = Ordered()
        product = draft.product(draft.value("x"), draft.value("w", 32, 32))
        mine = torch.empty(32, 32, device="meta")
        start = draft.op(torch.ops._c10d_functional.reduce_scatter_tensor.default, product, "sum", 2, "0", like=mine)
        total = draft.op(torch.ops._c10d_functional.wait_tensor.default, start, like=mine)
        names = draft.ordered(gathered(draft, total, 64))
    wanted = ("mm", "begin", "mm", "end", "begin", "end")
    assert [n.rstrip("_t0123456789") for n in names if n.startswith(wanted)] == list(wanted)


def gathered(draft, x, rows):
    start = draft.op(torch.ops._c10d_functional.all_gather_into_tensor.default, x, 2, "0")
    like = torch.empty(2, *x.meta["val"].shape, device="meta")
    wait = draft.op(torch.ops._c10d_functional.wait_tensor.default, start, like=like)
    return draft.op(aten.view.default, wait, [rows, 32], like=torch.empty(rows, 32, device="meta"))


@pytest.mark.parametrize("biased", [False, True])
def test_of_what_is_gathered_the_own_rows_are_multiplied_before_the_others_come(ops, biased):
    """Rank 1 of two; only where half a product keeps a GPU busy, and not where rows are summed over."""
    with set_to(substitute, ROWS=1, BUSY=32 * 32):
        draft = Ordered()
        x, wide, narrow, bias = draft.value("x", 32, 32), draft.value("w", 32, 32), draft.value("n", 32, 8), None
        every = gathered(draft, x, 64)
        if biased:
            bias = draft.value("b", 32)
            whole = draft.op(aten.addmm.default, bias, every, wide, like=torch.empty(64, 32, device="meta"))
        else:
            whole = draft.product(every, wide)
        summed_over = draft.product(draft.value("g", 32, 64), every)
        names = draft.ordered(whole, draft.product(every, narrow), summed_over)
    nodes = {n.name.replace("_default", ""): n for n in draft.graph.nodes}
    (cat,) = (n for n in nodes.values() if n.target is aten.cat.default)
    theirs, mine = cat.args[0]  # rank 0's rows come first
    at = {name: i for i, name in enumerate(names)}
    told = [n.name.replace("_default", "") for n in (mine, theirs)]
    assert at["begin_t"] < at[told[0]] < at["end_t"] < at[told[1]]
    assert mine.args[-2].args == (x, [32, 32]) and theirs.args[-2].args[1:] == (0, 0, 32)
    assert all(part.args[:-2] == ((bias,) if biased else ()) and part.args[-1] is wide for part in (mine, theirs))
    assert sum(n.target in substitute.PRODUCTS for n in nodes.values()) == 4


def test_own_rows_that_the_next_exchange_needs_too_are_computed_beside_the_first(ops):
    with set_to(substitute, ROWS=1, BUSY=1):
        draft = Ordered()
        x, weight = draft.value("x", 32, 32), draft.value("w", 32, 32)
        total = draft.summed(draft.product(gathered(draft, x, 64), weight))
        names = draft.ordered(draft.op(aten.neg.default, total))
    at = {name: i for i, name in enumerate(names)}
    products = sorted(at[n] for n in names if n.startswith("mm"))
    assert at["begin_t"] < products[0] < at["end_t"] < products[1] < at["begin_t_1"]


def test_small_sums_and_other_groups_stay_as_they_are(ops):
    draft = Ordered()
    draft.least = 2**20
    assert draft.ordered(draft.summed(draft.value("x"))) == ["all_reduce", "wait_tensor"]
    draft = Ordered()
    start = draft.op(torch.ops._c10d_functional.all_reduce.default, draft.value("x"), "sum", "1")
    assert draft.ordered(draft.op(torch.ops._c10d_functional.wait_tensor.default, start))[0] == "all_reduce"


class Reach:
    """Peers, as far as a layer looks at them."""

    def __init__(self, least):
        self.least = least


@pytest.mark.parametrize(
    ("tokens", "least", "hides", "given", "wanted"),
    [
        (4096, 2**24, True, None, 2),  # 4096 x 2048 x 4 bytes are twice 2**24
        (4096, 2**24 + 1, True, None, 1),
        (4096, 0, False, None, 1),
        (4096, 0, True, 3, 3),
        (256, 0, True, None, 1),
    ],
)
def test_a_region_ends_in_two_waves_where_each_is_worth_a_copy(monkeypatch, tokens, least, hides, given, wanted):
    layer = layers.RowParallelLinear(8, 2048, bias=False)
    mesh = Mesh(0, 2, None, torch.device("cuda"), peers=Reach(least))
    monkeypatch.setattr(Mesh, "dry", False)
    layer.become((2048, 16), mesh, True, given)
    layer.tp_hides = hides
    asked = []
    monkeypatch.setattr(layers, "summed_product", lambda x, w, mesh: asked.append(1) or x @ w.t())
    monkeypatch.setattr(layers, "reduced_product", lambda x, w, waves, mesh: asked.append(waves) or x @ w.t())
    layer(torch.zeros(1, tokens, 8))
    assert asked == [wanted]


def test_norms_beside_the_layers_are_compiled_and_nothing_else():
    for name in ("llama", "gpt2"):
        model = model_of(name, 2)
        norms = [n for n, m in model.named_modules() if any(m is norm for norm in norms_of(model))]
        assert norms == [{"llama": "model.norm", "gpt2": "transformer.ln_f"}[name]]


# -- on ranks without GPUs, where an exchange is what the backend makes of it ------------------------------------------


def compiled_alike(mesh, plan, options, rows):
    """Layers with exchanges in their graphs give what eager ones without give; nothing is left under way."""
    torch.compiler.reset()
    paired = replace(mesh, peers=Peers(mesh.group, torch.device("cpu"), 0))
    with set_to(layers, LEAST=1), set_to(substitute, ROWS=1, BUSY=1):
        model = parallelize(model_of("llama", 2).double(), Plan.loads(plan), paired, **options)
        ids = torch.arange(rows * TOKENS[1]).view(rows, TOKENS[1]) % WORDS
        eager = results(model, ids)
        pairs, begun, halved = substitute.pairs_of(model), [], []

        def backend(gm, inputs):
            return passes_alone(gm, inputs, pairs, begun, halved)

        for layer in layers_of(model):
            layer.compile(fullgraph=True, backend=backend)
        for _ in range(2):
            found = results(model, ids)
            for what, value in eager.items():
                torch.testing.assert_close(
                    found[what], value, rtol=1e-11, atol=1e-11, msg=lambda m, w=what: f"{w}: {m}"
                )
    assert not paired.peers.under_way
    return begun, halved


@pytest.mark.parametrize(
    ("options", "rows", "begun", "halved"),
    [
        ({}, 2, [2, 2], [0, 0]),
        ({"waves": 2}, 2, [4, 2], [0, 0]),
        ({"sequence_parallel": True}, 2, [0, 4, 6, 1], [0, 5, 2, 0]),
        ({"sequence_parallel": True}, 1, [0, 4, 6, 1], [0, 5, 2, 0]),
    ],
    ids=["plain", "waves", "sliced", "sliced, of one sequence"],
)
def test_exchanges_in_compiled_layers_give_the_same_numbers(run_ranks, options, rows, begun, halved):
    plan = make_plan(model_of("llama", 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2).dumps()
    assert run_ranks(compiled_alike, 2, plan, options, rows, timeout=240) == [(begun, halved)] * 2
