"""A forward regenerated from a plan: sizes that are literals in the user's code become the rank's."""

import copy
import pickle
import re

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

from tests.models import MODELS
from tests.parallel.same import columns, plan_of, rows, train_alike
from tpconvert.errors import PlanError
from tpconvert.parallel import dry_mesh, parallelize
from tpconvert.parallel.calls.rewrite import resolve, rewritten_forward
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Boundary, Plan, Rewrite


class Literal(nn.Module):
    """Attention whose sizes are written out."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 36), nn.Linear(12, 6)

    def forward(self, x, mask=None, scale=1.0):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, 4, 3).transpose(1, 2) for z in self.qkv(x).split(12, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        y = F.dropout(y.transpose(1, 2).reshape(b, t, 12), 0.0, self.training)
        return self.out(y), None


def ref(name):
    return {"$": name}


def call(name, target, *args, **kwargs):
    return {"name": name, "op": "call", "target": target, "args": list(args), "kwargs": kwargs}


HEADS = [[4, 3]]
NODES = [
    {"name": "b", "op": "size", "args": [ref("args.0"), 0]},
    {"name": "t", "op": "size", "args": [ref("args.0"), 1]},
    {"name": "part", "op": "local", "value": 12, "blocks": HEADS},
    {"name": "heads", "op": "local", "value": 4, "blocks": HEADS, "per": [[1, 3]]},
    {"name": "fused", "op": "module", "target": "qkv", "args": [ref("args.0")]},
    call("split", "torch.Tensor.split", ref("fused"), ref("part"), dim=2),
    *(
        node
        for i, z in enumerate("qkv")
        for node in (
            {"name": f"{z}0", "op": "item", "args": [ref("split"), i]},
            call(f"{z}1", "torch.Tensor.view", ref(f"{z}0"), ref("b"), ref("t"), ref("heads"), 3),
            call(f"{z}2", "torch.Tensor.transpose", ref(f"{z}1"), 1, 2),
        )
    ),
    call("y", "torch.nn.functional.scaled_dot_product_attention", ref("q2"), ref("k2"), ref("v2"), scale=1.0),
    call("y1", "torch.Tensor.transpose", ref("y"), 1, 2),
    call("y2", "torch.Tensor.reshape", ref("y1"), ref("b"), ref("t"), ref("part")),
    {"name": "training", "op": "training"},
    call("y3", "torch.nn.functional.dropout", ref("y2"), 0.0, ref("training")),
    {"name": "w", "op": "param", "target": "out.weight"},
    {"name": "bias", "op": "param", "target": "out.bias"},
    call("z", "torch.nn.functional.linear", ref("y3"), ref("w")),
    {"name": "z1", "op": "reduce", "args": [ref("z")]},
    call("z2", "operator.add", ref("z1"), ref("bias")),
]


def literal_plan(module, tp):
    heads = (4, 3)
    signature = {"args.0": "tensor", "kwargs.mask": {"const": None}}
    rewrite = Rewrite("", "sizes are literals", signature, tuple(NODES), {"tuple": [ref("z2"), None]})
    plan = plan_of(
        module,
        tp,
        {"qkv.weight": rows(heads, heads, heads), "qkv.bias": rows(heads, heads, heads), "out.weight": columns(heads)},
        boundaries=(Boundary("copy", "qkv", "input", ("args.0",)),),
        rewrites=(rewrite,),
    )
    return Plan.loads(plan.dumps())


def inputs(seed):
    return {"x": torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


def through_bytes(module, plan, mesh):
    return copy.deepcopy(pickle.loads(pickle.dumps(parallelize(module, plan, mesh))))


def train_literal(mesh):
    model = train_alike(mesh, Literal, literal_plan, inputs)
    x = inputs(0)["x"]
    model(x, None)
    model(x=x, scale=1.0)
    with pytest.raises(PlanError, match="mask is None; here it is a tensor"):
        model(x, mask=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(PlanError, match=re.escape("scale is 1.0; here it is 2.0. Plan again")):
        model(x, scale=2.0)
    with pytest.raises(PlanError, match="other is not given; here it is 1"):
        model(x, other=1)
    assert "scaled_dot_product_attention" in model._tp_forward.code
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("degree", [2, 3])
def test_literal_sizes_become_local_and_other_calls_are_refused(run_ranks, degree):
    run_ranks(train_literal, degree, timeout=120)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rewritten_forward_runs_on_meta_with_a_dry_mesh(rank):
    module = Literal().to("meta")
    parallelize(module, literal_plan(module, 4), dry_mesh(rank, 4))
    again = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert type(again).__name__ == "Literal"
    assert again(torch.empty(2, 5, 6, device="meta"))[0].shape == (2, 5, 6)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "torch.load",
        "torch.hub.load",
        "builtins.eval",
        "operator.attrgetter",
        "operator.methodcaller",
        "operator.__call__",
        "torch.Tensor.__dict__",
        "torch.Tensor.__class__",
        "torch.nn.functional.torch.load",
        "torch.nn.functional.torch",
        "torch.utils.data.DataLoader",
        "torch.ops.aten.__class__.mro",
        "torch.ops.load_library",
        "",
    ],
)
def test_a_graph_may_only_call_ops_of_torch(target):
    with pytest.raises(PlanError, match=re.escape(f"attn: the plan's graph calls {target!r}, which is not an op")):
        resolve(target, "attn")


def test_ops_methods_properties_and_operators_are_found():
    assert resolve("torch.nn.functional.linear", "") is F.linear
    assert resolve("torch.bmm", "") is torch.bmm
    assert resolve("torch.arange", "") is torch.arange
    assert resolve("torch.Tensor.__add__", "")(torch.ones(1), 2) == 3
    assert resolve("torch.Tensor.mT", "")(torch.ones(2, 3)).shape == (3, 2)
    assert resolve("operator.matmul", "")(torch.ones(2), torch.ones(2)) == 2
    assert resolve("torch.ops.aten.relu.default", "")(-torch.ones(1)) == 0


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"name": "n", "op": "spread", "args": []}, "there is no op 'spread'"),
        ({"name": "n", "op": "local", "value": 11, "blocks": [[4, 3]]}, "11 is not 12 // 1"),
        ({"name": "n", "op": "gather", "args": [ref("args.0")]}, "KeyError"),
        (call("n", "torch.relu", ref("nowhere")), "nowhere"),
        (call("n", "torch.Tensor.to", ref("args.0"), {"dtype": "load"}), "is not an argument"),
    ],
)
def test_a_damaged_graph_is_refused_with_its_node(node, why):
    rewrite = Rewrite("", "", {"args.0": "tensor"}, (node,), ref("n"))
    with pytest.raises(PlanError, match=re.escape(why)) as error:
        rewritten_forward(Literal(), rewrite, dry_mesh(0, 2))
    assert "the root module: node" in str(error.value)


def test_every_form_of_argument_is_understood():
    nodes = [
        call("s", "operator.getitem", ref("args.0"), {"tuple": [{"ellipsis": 1}, {"slice": [0, None, 2]}]}),
        call("m", "torch.Tensor.masked_fill", ref("s"), ref("kwargs.mask"), {"float": "-inf"}),
        call("c", "torch.Tensor.to", ref("m"), {"dtype": "float64"}),
        call("z", "torch.zeros", [2], dtype={"dtype": "int64"}, device={"device": 1}),
    ]
    rewrite = Rewrite(
        "",
        "",
        {"args.0": "tensor", "kwargs.mask": "tensor"},
        tuple(nodes),
        {"dict": {"c": ref("c"), "z": [ref("z"), 1]}},
    )
    module = Literal()
    out = rewritten_forward(module, rewrite, dry_mesh(0, 1))(
        module, (torch.ones(2, 4),), {"mask": torch.tensor([True, False])}
    )
    assert out["c"].tolist() == [[-float("inf"), 1.0]] * 2 and out["c"].dtype == torch.float64
    assert out["z"][0].tolist() == [0, 0] and out["z"][1] == 1


def test_layers_that_are_alike_compile_into_one_graph():
    module, inputs = MODELS["nanogpt_literal"]()
    plan = make_plan(module, inputs, tp=2)
    assert [r.module for r in plan.rewrites] == ["h.0", "h.1"]
    parallelize(module, plan, dry_mesh(0, 2, device="cpu"))
    frames = torch._dynamo.testing.CompileCounter()
    for layer in module.h:
        layer.compile(backend=frames, fullgraph=True)
    with torch.no_grad():
        module(**inputs)
    assert frames.frame_count == 1
    assert [layer._tp_forward.signature.where for layer in module.h] == ["h.0", "h.1"]  # which errors name
