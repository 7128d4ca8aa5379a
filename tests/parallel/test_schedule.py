"""What is made of compiled graphs: sums beside arithmetic, gathers made again, and the same numbers as before."""

from functools import partial

import pytest
import torch
from torch import fx

from tests.parallel.test_wire import TOKENS, WORDS, model_of
from tpconvert.errors import PlanError
from tpconvert.parallel import parallelize
from tpconvert.parallel.compiled.layers import compile_layers, layers_of
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

aten, wire = torch.ops.aten, torch.ops._c10d_functional
ROWS, WIDTH = 64, 32


class Draft:
    """A graph by hand, whose values are on meta."""

    def __init__(self):
        self.graph = fx.Graph()

    def value(self, name, *shape):
        return self.meant(self.graph.placeholder(name), torch.empty(shape or (ROWS, WIDTH), device="meta"))

    def op(self, target, *args, like=None):
        node = self.graph.call_function(target, args)
        return self.meant(node, next(a for a in args if isinstance(a, fx.Node)).meta["val"] if like is None else like)

    def meant(self, node, value):
        node.meta["val"] = value
        return node

    def summed(self, x):
        start = self.op(wire.all_reduce.default, x, "sum", "0")
        return self.op(wire.wait_tensor.default, start)

    def product(self, a, b):
        rows, columns = a.meta["val"].shape[0], b.meta["val"].shape[1]
        return self.op(aten.mm.default, a, b, like=a.meta["val"].new_empty(rows, columns))

    def ordered(self, *outputs):
        from tpconvert.parallel.compiled.schedule import HideCollectives

        self.graph.output(outputs)
        module = fx.GraphModule({}, self.graph)
        HideCollectives()(module.graph)
        module.graph.lint()
        names = [n.name for n in module.graph.nodes if n.op == "call_function"]
        return [name.replace("_default", "").replace("_tensor_Tensor", "_tensor") for name in names]


def test_weight_gradients_go_between_a_sum_and_its_wait():
    draft = Draft()
    x, weight, grad = draft.value("x", WIDTH, ROWS), draft.value("w", WIDTH, WIDTH), draft.value("g")
    inner = draft.product(grad, weight)
    total = draft.summed(inner)
    norm = draft.op(aten.neg.default, total)
    of_weight = draft.product(x, grad)
    assert draft.ordered(norm, of_weight) == ["mm", "all_reduce", "mm_1", "wait_tensor", "neg"]


def test_each_wave_is_summed_while_the_next_is_computed():
    draft = Draft()
    x, y, weight = draft.value("x"), draft.value("y"), draft.value("w", WIDTH, WIDTH)
    sums = [draft.summed(draft.product(v, weight)) for v in (x, y)]
    both = draft.op(aten.cat.default, sums, like=torch.empty(2 * ROWS, WIDTH, device="meta"))
    assert draft.ordered(both) == ["mm", "all_reduce", "mm_1", "all_reduce_1", "wait_tensor", "wait_tensor_1", "cat"]


def test_one_product_hides_one_sum_and_leaves_the_next_to_the_next():
    draft = Draft()
    wide = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    x, g, w = (draft.meant(draft.graph.placeholder(n), wide) for n in "xgw")
    first = draft.summed(draft.product(g, w))
    others = [draft.product(x, g), draft.product(g, x)]
    second = draft.summed(draft.product(first, w))
    names = draft.ordered(second, *others)
    at = {name: i for i, name in enumerate(names)}
    assert at["all_reduce"] < at["mm_1"] < at["wait_tensor"] < at["all_reduce_1"] < at["mm_2"] < at["wait_tensor_1"]


def test_collectives_keep_their_order_though_the_first_is_waited_for_last():
    draft = Draft()
    x, y = draft.value("x"), draft.value("y")
    late = draft.summed(draft.op(aten.neg.default, x))
    for _ in range(3):
        x = draft.op(aten.exp.default, x)
    starts = [n for n in draft.ordered(draft.summed(x), draft.summed(y), late) if n.startswith("all_reduce")]
    assert starts == ["all_reduce", "all_reduce_1", "all_reduce_2"]


def test_products_that_a_collective_takes_the_sum_of_are_added_where_they_are():
    """Three gradients of what three layers read, and one that is no product; what others read stays."""

    def drafted(also):
        draft = Draft()
        terms = [draft.product(draft.value(f"g{i}"), draft.value(f"w{i}", WIDTH, WIDTH)) for i in range(3)]
        total = draft.op(aten.view.default, terms[0], [1, ROWS, WIDTH], like=torch.empty(1, ROWS, WIDTH, device="meta"))
        total = draft.op(aten.view.default, total, [ROWS, WIDTH], like=terms[1].meta["val"])
        for each in (draft.value("x"), *terms[1:]):
            total = draft.op(aten.add.Tensor, total, each)
        named = {"nobody": [], "term": [terms[2]], "sum": [total]}[also]
        return draft.ordered(draft.summed(total), *named)

    apart = ["mm", "view", "view_1", "add_tensor", "add_tensor_1", "add_tensor_2"]
    assert drafted("nobody") == ["sum_of_products", "view_2", "view_3", "add_tensor_3", "all_reduce", "wait_tensor"]
    names = ["mm_2", "sum_of_products", "view_2", "view_3", "add_tensor_3", "add_tensor_4"]
    assert drafted("term") == [*names, "all_reduce", "wait_tensor"]
    assert [n for n in drafted("sum") if n in apart] == apart


def test_a_sum_of_products_is_what_it_says():
    from tpconvert.parallel.compiled.sums import SUM_OF_PRODUCTS

    lefts, rights = ([torch.randn(*n).double() for n in s] for s in ([(4, 3), (4, 5)], [(3, 2), (5, 2)]))
    torch.testing.assert_close(SUM_OF_PRODUCTS(lefts, rights), lefts[0] @ rights[0] + lefts[1] @ rights[1])
    torch.library.opcheck(SUM_OF_PRODUCTS, (lefts, rights))


@pytest.mark.parametrize("order", ["x x", "xx", "y x y"], ids=str)
def test_a_sum_of_products_keeps_what_is_added_twice(order):
    """Terms that are no products, of which one counts as often as it is added."""
    from tpconvert.parallel.compiled.sums import SUM_OF_PRODUCTS, add_in_place

    graph, given = fx.Graph(), {n: torch.randn(4, 4).double() for n in ("a", "b", "c", "d", "x", "y")}
    nodes = {}

    def op(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    for name, value in given.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = value
    total = op(aten.mm.default, nodes["a"], nodes["b"])
    total = op(aten.add.Tensor, total, op(aten.mm.default, nodes["c"], nodes["d"]))
    for names in order.split():
        term = nodes[names[0]] if len(names) == 1 else op(aten.add.Tensor, nodes[names[0]], nodes[names[1]])
        total = op(aten.add.Tensor, total, term)
    taken = op(aten.neg.default, total)
    graph.output(taken)
    add_in_place(graph, lambda node: node is taken)
    graph.lint()
    assert any(n.target is SUM_OF_PRODUCTS for n in graph.nodes)
    torch.testing.assert_close(fx.Interpreter(fx.GraphModule({}, graph)).run(*given.values()), taken.meta["val"])


def test_products_of_which_torch_looks_for_the_fastest_are_left_to_it():
    def drafted():
        draft = Draft()
        terms = [draft.product(draft.value(f"g{i}"), draft.value(f"w{i}", WIDTH, WIDTH)) for i in range(2)]
        return draft.ordered(draft.summed(draft.op(aten.add.Tensor, *terms)))

    assert drafted() == ["sum_of_products", "all_reduce", "wait_tensor"]
    with torch._inductor.config.patch(max_autotune_gemm=True):
        assert drafted() == ["mm", "mm_1", "add_tensor", "all_reduce", "wait_tensor"]


def test_a_graph_that_writes_keeps_its_order_but_for_writes_into_inputs_at_its_end():
    def drafted(target):
        draft = Draft()
        x, grad, weight = draft.value("x", WIDTH, ROWS), draft.value("g"), draft.value("w", WIDTH, WIDTH)
        total = draft.summed(draft.product(grad, weight))
        of_weight = draft.product(x, grad)
        draft.op(target, x if target is aten.copy_.default else total, total)
        return draft.ordered(total, of_weight)

    assert drafted(aten.add_.Tensor) == ["mm", "all_reduce", "wait_tensor", "mm_1", "add__tensor"]
    assert drafted(aten.copy_.default) == ["mm", "all_reduce", "mm_1", "wait_tensor", "copy_"]


def test_only_what_a_forward_gathers_is_gathered_again():
    from tpconvert.parallel.compiled.schedule import JointPass

    draft = Draft()
    x, grad = draft.value("primals_1"), draft.value("tangents_1")
    marked = []
    for value in (x, grad):
        start = draft.op(wire.all_gather_into_tensor.default, value, 2, "0")
        wait = draft.op(wire.wait_tensor.default, start)
        scattered = draft.op(wire.reduce_scatter_tensor.default, wait, "sum", 2, "0")
        marked.append((start, wait, scattered))
    JointPass()(draft.graph)
    assert [["recompute" in n.meta for n in nodes] for nodes in marked] == [[True, True, False], [False] * 3]


# -- on ranks -----------------------------------------------------------------------------------------------------


def passes_alone(gm, inputs, pairs=None, begun=None, halved=None, look=None):
    """torch.compile's way from a graph to the passes and back, without the compiler behind them.

    ``begun`` is told how many exchanges each graph begins, ``halved`` how many products it makes of two; ``look`` is
    called with each graph.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    from tpconvert.parallel.compiled.schedule import HideCollectives, JointPass

    def partitioned(joint, joint_inputs, **rest):
        JointPass()(joint.graph)
        return min_cut_rematerialization_partition(joint, joint_inputs, **rest)

    def ordered(graph_module, _):
        HideCollectives(pairs)(graph_module.graph)
        graph_module.recompile()
        if begun is not None:
            begun.append(sum("begin" in str(n.target) for n in graph_module.graph.nodes))
        if halved is not None:
            cats = [n.args[0] for n in graph_module.graph.nodes if n.target is aten.cat.default]
            halved.append(sum(all(part.target is aten.mm.default for part in parts) for parts in cats))
        if look is not None:
            look(graph_module.graph)
        return make_boxed_func(graph_module)

    return aot_autograd(fw_compiler=ordered, bw_compiler=ordered, partition_fn=partitioned)(gm, inputs)


def results(model, ids):
    model.zero_grad()
    out = model(input_ids=ids).logits
    out.square().sum().backward()
    return {"": out.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def compiled_alike(mesh, name, plan, options):
    torch.compiler.reset()
    model = parallelize(model_of(name, 2).double(), Plan.loads(plan), mesh, **options).train()
    ids = torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS
    longer = torch.cat([ids, ids], 1)
    eager = [results(model, ids), results(model, longer)]
    added = []

    def look(graph):
        added.append([len(n.args[0]) for n in graph.nodes if "sum_of_products" in str(n.target)])

    for layer in layers_of(model):
        layer.compile(fullgraph=True, backend=partial(passes_alone, look=look))
    for inputs, wanted in zip((ids, longer), eager, strict=True):
        found = results(model, inputs)
        for what, value in wanted.items():
            torch.testing.assert_close(found[what], value, rtol=1e-11, atol=1e-11, msg=lambda m, w=what: f"{w}: {m}")
    return added


@pytest.mark.parametrize(
    ("name", "options", "sums"),
    [("llama", {"sequence_parallel": True}, [2, 3]), ("gpt2", {}, []), ("qwen3", {"sequence_parallel": True}, [2, 3])],
    ids=["llama sliced", "gpt2 plain", "qwen3 sliced"],
)
def test_ordered_graphs_give_the_same_numbers(run_ranks, name, options, sums):
    """Their backwards have sums of the gradients that gate and up have, and q, k and v."""
    plan = make_plan(model_of(name, 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2).dumps()
    for added in run_ranks(compiled_alike, 2, name, plan, options, timeout=240):
        made = [each for each in added if each]
        assert bool(made) == bool(sums) and all(each == sums for each in made)


def test_a_model_without_layers_is_told():
    with pytest.raises(PlanError, match="Linear has no list of equal layers to compile"):
        compile_layers(torch.nn.Linear(2, 2))
