"""What users do with a converted model: save, load, compile, recompute, autocast."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.models import perturb
from tests.parallel import test_convert as zoo
from tests.parallel.same import assert_equal, plan_of, rows, whole_of
from tpconvert.errors import PlanError
from tpconvert.parallel import clip_grad_norm_, dry_mesh, load_local, parallelize
from tpconvert.parallel.convert import part
from tpconvert.spec.layout import Block
from tpconvert.spec.plan import Boundary, Edit

MODELS = {
    "mlp": (zoo.Mlp, zoo.mlp_plan, lambda seed: zoo.floats(seed)),
    "fused": (zoo.FusedAttention, zoo.fused_plan, lambda seed: zoo.floats(seed, 12)),
    "grouped": (zoo.GroupedAttention, zoo.grouped_plan, lambda seed: zoo.floats(seed, 6)),
    "tied": (zoo.TiedWords, zoo.tied_plan, zoo.ids),
}


def built(name):
    torch.manual_seed(0)
    build, make_plan, inputs = MODELS[name]
    return perturb(build().double()), make_plan, inputs(0)


def first_of(output):
    return output["logits"] if isinstance(output, dict) else output


def gradients(model, run):
    model.zero_grad()
    out = first_of(run())
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


def used(mesh, name, way):
    whole, make_plan, inputs = built(name)
    model = parallelize(whole, make_plan(whole, mesh.degree), mesh)
    plain = gradients(model, lambda: model(**inputs))
    if way == "checkpoint":
        again = gradients(model, lambda: checkpoint(model, **inputs, use_reentrant=False))
    elif way == "reentrant":
        (x,) = (v.clone().requires_grad_(v.is_floating_point()) for v in inputs.values())
        again = gradients(model, lambda: checkpoint(model, x, use_reentrant=True))
    else:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        again = gradients(model, lambda: compiled(**inputs))
    for i, (a, b) in enumerate(zip(again, plain, strict=True)):
        assert_equal(a, b, f"{way}: {i}")


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_compiles_into_one_graph(run_ranks, name):
    run_ranks(used, 4 if name == "grouped" else 2, name, "compile", timeout=180)


@pytest.mark.parametrize(("name", "way"), [("grouped", "checkpoint"), ("tied", "checkpoint"), ("mlp", "reentrant")])
def test_activation_checkpointing_gives_the_same_gradients(run_ranks, name, way):
    run_ranks(used, 2, name, way)


def forward_alone(mesh, name):
    whole, make_plan, inputs = built(name)
    model = parallelize(copy.deepcopy(whole), make_plan(whole, mesh.degree), mesh)
    for one in (model, copy.deepcopy(model)):
        for m in (whole, one):
            m.zero_grad()
            first_of(m.forward(**inputs)).square().sum().backward()
        parameters = dict(one.named_parameters())
        for key, p in whole.named_parameters():
            plan = make_plan(whole, mesh.degree)
            assert_equal(whole_of(key, parameters[key].grad, plan, mesh), p.grad, f"gradient of {key}")
    assert isinstance(model, type(whole)) and type(model).__name__ == type(whole).__name__


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_without_a_call_makes_the_collectives_too(run_ranks, name):
    run_ranks(forward_alone, 2, name)


def over_dp(mesh, name, wrapped):
    """Both dp ranks see the same data, so the mean of their gradients is the whole model's gradient."""
    whole, make_plan, inputs = built(name)
    plan = make_plan(whole, mesh.degree)
    model = parallelize(copy.deepcopy(whole), plan, mesh)
    if wrapped == "ddp":
        model = DistributedDataParallel(model, process_group=mesh.dp_group)
    else:
        fully_shard(model, mesh=DeviceMesh.from_group(mesh.dp_group, "cpu"))
    for step in range(2):
        for m in (whole, model):
            m.zero_grad()
            first_of(m(**inputs)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        assert_equal(clip_grad_norm_(model, 0.05, mesh, plan), norm, f"step {step}: gradient norm")
        parameters = dict((model.module if wrapped == "ddp" else model).named_parameters())
        for key, p in whole.named_parameters():
            mine = parameters[key].grad
            mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
            assert_equal(whole_of(key, mine, plan, mesh), p.grad, f"step {step}: gradient of {key}")
        for m in (whole, model):
            torch.optim.SGD(m.parameters(), lr=1.0).step()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
def test_a_converted_model_is_data_parallel_by_torchs_own_means(run_ranks, name, wrapped):
    run_ranks(over_dp, 2, name, wrapped, dp=2)


def half(mesh, name):
    whole, make_plan, inputs = built(name)
    whole.float()
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    model = parallelize(copy.deepcopy(whole), make_plan(whole, mesh.degree), mesh)
    with torch.autocast("cpu", torch.bfloat16):
        expected, out = first_of(whole(**inputs)), first_of(model(**inputs))
    assert out.dtype == expected.dtype
    # bfloat16 keeps 8 bits; a sum of two roundings and one more of the total is within 4 of its steps.
    torch.testing.assert_close(
        out.float(), expected.float(), rtol=4 * 2**-8, atol=4 * 2**-8 * expected.abs().max().item()
    )
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_autocast_gives_the_dtypes_of_the_whole_model(run_ranks, name):
    run_ranks(half, 2, name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rank", [0, 1])
def test_parts_load_into_a_model_on_meta_under_the_same_names(name, rank):
    whole, make_plan, inputs = built(name)
    mesh, plan = dry_mesh(rank, 2, device="cpu"), make_plan(whole, 2)
    expected = parallelize(copy.deepcopy(whole), plan, mesh)
    tensors = {k: part(v, plan[k].layout, mesh) for k, v in whole.state_dict().items() if not plan[k].tied_to}
    with torch.device("meta"):
        model = MODELS[name][0]()
    parallelize(model, plan, mesh)
    model.get_parameter(plan.verdicts[0].name).requires_grad_(False)
    load_local(model, tensors)
    state = model.state_dict()
    assert list(state) == list(whole.state_dict())
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=0)
    assert [p.requires_grad for p in model.parameters()][:2] == [False, True]
    torch.testing.assert_close(first_of(model(**inputs)), first_of(expected(**inputs)), rtol=0, atol=0)
    model.load_state_dict(expected.state_dict())
    copied = copy.deepcopy(model)
    assert dict(copied.named_parameters()).keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(first_of(copied(**inputs)), first_of(expected(**inputs)), rtol=0, atol=0)


def test_parameters_stay_the_same_objects_with_their_hooks_and_flags():
    model = zoo.Mlp()
    up, weight = model.up, model.up.weight
    seen = []
    weight.register_hook(seen.append)
    up.register_forward_hook(lambda *_: seen.append("called"))
    model.norm.requires_grad_(False)
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parallelize(model, zoo.mlp_plan(model, 2), dry_mesh(1, 2, device="cpu"))
    assert model.up is up and model.up.weight is weight and optimizer.param_groups[0]["params"][2] is weight
    model(torch.ones(1, 5)).sum().backward()
    assert seen[0] == "called" and seen[1].shape == weight.shape == (3, 5)
    assert not model.norm.weight.requires_grad and not model.up.training


def test_degree_1_changes_nothing():
    model = zoo.Mlp()
    before = {n: type(m) for n, m in model.named_modules()}
    assert parallelize(model, zoo.mlp_plan(model, 1), dry_mesh(0, 1)) is model
    assert {n: type(m) for n, m in model.named_modules()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def plan_and(change):
    model = zoo.Mlp()
    return model, change(model, zoo.mlp_plan(model, 2))


def edited(model, plan):
    return replace(plan, edits=(Edit("up", "out_features", 8, (Block(7),)),))


def absent(model, plan):
    return replace(plan, edits=(Edit("up", "sizes.1", 8, (Block(7),)),))


def elsewhere(model, plan):
    return replace(plan, boundaries=(Boundary("copy", "gate", "input", ("args.0",)),))


def smaller(model, plan):
    model.up.bias = nn.Parameter(torch.zeros(6))
    return plan


def larger(model, plan):
    model.extra = nn.Linear(1, 1)
    return plan


def less(model, plan):
    del model.down
    return plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edited, "up: out_features is 7, the plan was made when it was 8."),
        (absent, "up: sizes.1 is not there to be edited."),
        (elsewhere, r"boundaries\[0\] \(gate\): the module has no part gate\."),
        (smaller, r"\(up.bias\): it is for shape \[7\], the module has \[6\]\."),
        (larger, "there is no verdict for extra.weight. Correct the entry, or make the plan again."),
        (less, r"\(down.weight\): the module has no such parameter or buffer\."),
    ],
)
def test_a_plan_for_another_module_is_refused(change, message):
    model, plan = plan_and(change)
    with pytest.raises(PlanError, match=message):
        parallelize(model, plan, dry_mesh(0, 2))


def test_a_plan_for_another_degree_is_refused():
    model = zoo.Mlp()
    with pytest.raises(PlanError, match=r"The plan is for tp=2, the mesh has 4 ranks."):
        parallelize(model, zoo.mlp_plan(model, 2), dry_mesh(0, 4))


def test_tied_tensors_must_be_cut_alike():
    model = zoo.TiedWords()
    plan = zoo.tied_plan(model, 2)
    verdicts = tuple(replace(v, layout=rows()) if v.tied_to else v for v in plan.verdicts)
    with pytest.raises(PlanError, match=r"head.weight: it is tied to words.weight, so both must be cut alike"):
        parallelize(model, replace(plan, verdicts=verdicts), dry_mesh(0, 2))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.zeros(2, 3)}, r"weight: the part has shape \[2, 3\], the module needs \[2, 4\]."),
        ({"scale": torch.zeros(2)}, "scale: the module has no parameter or buffer of that name."),
        ({"weight": torch.zeros(2, 4)}, "bias: no value was given for it."),
    ],
)
def test_parts_that_do_not_fit_are_refused(tensors, message):
    model = nn.Linear(4, 4).to("meta")
    parallelize(model, plan_of(model, 2, {"weight": rows(4), "bias": rows(4)}), dry_mesh(0, 2))
    with pytest.raises(PlanError, match=message):
        load_local(model, tensors)
    assert model.weight.is_meta


class Shared:
    def __init__(self):
        self.heads, self.sizes, self.by_name = 4, (2, 6), {"k": 8}


class Reader(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.pair = config, [3, 4]


def test_edits_reach_into_configs_and_sequences_of_one_module_only():
    config = Shared()
    model = nn.ModuleList([Reader(config), Reader(config)])
    edits = (
        Edit("0", "config.heads", 4, (Block(4),)),
        Edit("0", "config.sizes.1", 6, (Block(2, 3),)),
        Edit("0", "config.by_name.k", 8, (Block(4, 2),)),
        Edit("0", "pair.0", 3, (Block(3),)),
    )
    parallelize(model, plan_of(model, 2, {}, edits=edits), dry_mesh(0, 2))
    mine, other = model[0].config, model[1].config
    assert (mine.heads, mine.sizes, mine.by_name, model[0].pair) == (2, (2, 3), {"k": 4}, [2, 4])
    assert other is config and (other.heads, other.sizes, other.by_name, model[1].pair) == (4, (2, 6), {"k": 8}, [3, 4])
