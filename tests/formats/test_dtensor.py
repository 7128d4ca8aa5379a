"""Plans of ours as Python code: it runs, and outputs and gradients are equal."""

import ast

import pytest
from torch import nn

from tests.formats.same import under_parallelize_module
from tests.formats.test_transformers import cut_fraction
from tests.hf_models import build
from tpconvert.formats.dtensor import ABILITIES, dtensor_code
from tpconvert.formats.express import express


def told(name, tp=2, **options):
    module, inputs = build(name)
    expressed = express(module, inputs, tp=tp, abilities=ABILITIES, **options)
    return dtensor_code(module, expressed), expressed


# plain; one tensor under two names; norms of heads; fused heads; integers that change; a bias with two names
CASES = {"llama_few": 0.99, "llama_tied_bias": 0.98, "qwen3": 0.99, "gpt_neox": 0.98, "opt": 0.6, "bert_masked_lm": 0.8}


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_the_code_cuts_is_equal(pair, name):
    code, expressed = told(name)
    assert cut_fraction(expressed.plan) > CASES[name]
    assert pair.run(under_parallelize_module, 2, name, code) == [[], []]


def test_layers_that_differ_are_named_one_by_one(pair):
    code, _ = told("llama_few", overrides=["model.layers.0.mlp=whole"])
    assert '"model.layers.1.mlp.up_proj": ColwiseParallel()' in code
    assert "layers.0.mlp" not in code
    assert '"model.layers.*.self_attn.q_proj": ColwiseParallel()' in code
    assert pair.run(under_parallelize_module, 2, "llama_few", code) == [[], []]


def test_experts_have_no_style_and_stay_whole():
    _, expressed = told("mixtral_wide")
    assert any("has no style for model.layers.*.mlp.experts (experts)" in note for note in expressed.notes())
    assert expressed.plan["model.layers.0.self_attn.q_proj.weight"].layout.cut


def test_an_integer_of_a_config_that_modules_share_is_not_changed():
    _, expressed = told("phi3")
    assert not expressed.plan["model.layers.0.self_attn.o_proj.weight"].layout.cut


def test_the_code_imports_what_it_uses_and_no_more():
    for name in ("llama_few", "qwen3"):
        tree = ast.parse(told(name)[0])
        imported = {a.asname or a.name.split(".")[-1] for n in ast.walk(tree) for a in getattr(n, "names", ())}
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {"distributed"}
        assert imported - {"distributed"} <= used, name
        assert ("dist" in imported) == (name == "qwen3")


class Net(nn.Module):
    """One linear layer after another, of which one forward reads the weight itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12, bias=False)

    def forward(self, x):
        return self.up(x).relu() @ self.down.weight.T


def test_a_layer_whose_weight_is_read_from_outside_stays_whole():
    import torch

    from tpconvert.errors import PlanError

    with pytest.raises(PlanError, match=r"down.weight is used outside its own module"):
        express(Net(), (torch.randn(3, 12),), tp=2, abilities=ABILITIES)
