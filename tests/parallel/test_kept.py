"""What is changed in a converted module is refused where it would meet a rank's part, in one clear line."""

import copy

import pytest
import torch
from torch import nn

from tests.parallel import test_convert as zoo
from tests.parallel.same import columns, plan_of, rows
from tpconvert.errors import PlanError
from tpconvert.parallel import dry_mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Boundary

MESH = dry_mesh(0, 2, device="cpu")


class Adapter(nn.Module):
    """As low-rank adapters go around a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.less = nn.Linear(base.in_features, 2, bias=False)
        self.more = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.more(self.less(x))


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Listed(nn.Module):
    """Layers in a list, which is never called itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())


def mlp():
    model = zoo.Mlp()
    return parallelize(model, zoo.mlp_plan(model, 2), MESH)


def listed():
    model = Listed()
    cut = {"layers.0.weight": rows(7), "layers.0.bias": rows(7), "layers.1.weight": columns(7)}
    sums = (Boundary("reduce", "layers.1", "output", ("",)),)
    return parallelize(model, plan_of(model, 2, cut, {"layers.1.bias": {"once": True}}, boundaries=sums), MESH)


def adapted(model):
    model.down = Adapter(model.down)


def new(model):
    model.up = nn.Linear(5, 4)


def none(model):
    model.down = None


def normed(model):
    nn.utils.parametrizations.spectral_norm(model.down)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (adapted, "down: it was replaced after the conversion and is now a Adapter. Change the model first"),
        (new, "up: it was replaced after the conversion and is now a Linear."),
        (none, "down: it was replaced after the conversion and is gone."),
        (normed, "down.weight: it was replaced after the conversion."),
    ],
)
def test_parts_that_are_replaced_after_the_conversion_are_refused(change, message):
    model, x = mlp(), torch.ones(2, 5)
    model(x)
    other = copy.deepcopy(model)
    change(model)
    with pytest.raises(PlanError, match=message):
        model(x)
    with pytest.raises(PlanError, match=message):
        Wrapper(model)(x)
    other(x)
    change(other)
    with pytest.raises(PlanError, match=message):
        other(x)


def test_parts_in_a_list_are_looked_for_by_the_module_that_has_the_list():
    model = listed()
    model(torch.ones(2, 5))
    model.layers[1] = Adapter(model.layers[1])
    with pytest.raises(PlanError, match=r"layers\.1: it was replaced"):
        model(torch.ones(2, 5))


def test_what_only_wraps_a_part_may_take_its_place():
    model, x = mlp(), torch.ones(2, 5)
    before = model(x)
    model.down = Wrapper(model.down)
    model.norm = Wrapper(nn.LayerNorm(5))  # whole, and at no boundary
    torch.testing.assert_close(model(x), before)


def test_a_converted_module_is_neither_planned_nor_converted_again():
    plan, model, inputs = zoo.mlp_plan(zoo.Mlp(), 2), mlp(), (torch.ones(2, 5),)
    with pytest.raises(PlanError, match="Mlp has been converted already"):
        parallelize(model, plan, MESH)
    for module, name in ((model, "Mlp"), (Wrapper(model), "inner"), (model.up, "ColumnParallelLinear")):
        with pytest.raises(PlanError, match=f"^{name} has been converted already"):
            make_plan(module, inputs, tp=2)


def test_methods_that_take_a_part_for_the_whole_are_refused(llama, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = make_plan(model, {"input_ids": torch.arange(10).view(2, 5)}, tp=2)
    parallelize(model, plan, MESH)
    with pytest.raises(PlanError, match=r"save_pretrained would take this rank's part .* tpconvert\.save"):
        model.save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="resize_token_embeddings would take"):
        model.resize_token_embeddings(64)
    model.save_pretrained(tmp_path, state_dict=whole)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
