"""Plans of ours that transformers follows: equal outputs and gradients, and what it cannot say left whole."""

import math

import pytest
from torch import nn

from tests.formats.same import under_transformers
from tests.hf_models import build
from tpconvert.errors import PlanError
from tpconvert.formats.express import express
from tpconvert.formats.transformers import abilities, tp_plan


def told(name, tp=2, **options):
    module, inputs = build(name)
    expressed = express(module, inputs, tp=tp, abilities=abilities(module), **options)
    return tp_plan(module, expressed), expressed


def cut_fraction(plan):
    own = [v for v in plan.verdicts if v.kind == "parameter" and not v.tied_to]
    return sum(math.prod(v.shape) for v in own if v.layout.cut) / sum(math.prod(v.shape) for v in own)


# each has something of its own: plain; tied with biases; norms of heads; a scaled embedding; two layers in one;
# fused heads; experts; a gradient of a segment; sinks; a bias with two names
CASES = {
    "llama_few": 0.99,
    "llama_tied_bias": 0.98,
    "qwen3": 0.99,
    "gemma2": 0.98,
    "phi3": 0.6,
    "gpt_neox": 0.98,
    "mixtral_wide": 0.99,
    "deepseek_v3_wide": 0.9,
    "gpt_oss_wide": 0.2,
    "bert_masked_lm": 0.8,
    "bart": 0.9,
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_transformers_cuts_by_our_plan_is_equal(pair, name):
    plan, expressed = told(name)
    assert cut_fraction(expressed.plan) > CASES[name]
    assert pair.run(under_transformers, 2, name, plan) == [[], []]


def test_a_style_that_is_missing_shows_in_a_gradient(pair):
    plan, _ = told("qwen3")
    without = plan | {"model.layers.*.self_attn.q_norm": "replicate"}
    found = pair.run(under_transformers, 2, "qwen3", without)
    assert found[0] and all("q_norm.weight" in line for line in found[0]), found


def test_a_plan_names_layers_as_transformers_does():
    plan, _ = told("qwen3")
    assert plan["model.layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert plan["lm_head"] == "colwise_gather_output"
    assert plan["model.embed_tokens"] == "embedding_rowwise"


def test_what_the_models_own_plan_cuts_and_ours_does_not_is_named_whole(pair):
    plan, expressed = told("llama_few", overrides=["model.layers.*.mlp=whole"])
    assert plan["model.layers.*.mlp.up_proj"] == "replicate"
    assert not expressed.plan["model.layers.0.mlp.up_proj.weight"].layout.cut
    assert pair.run(under_transformers, 2, "llama_few", plan) == [[], []]


def test_layers_that_differ_cannot_be_told_apart_and_stay_whole():
    plan, expressed = told("llama_few", overrides=["model.layers.0.mlp=whole"])
    assert plan["model.layers.*.mlp.up_proj"] == "replicate"
    assert "not all of them are cut alike" in expressed.notes()[0]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama_odd", "model.embed_tokens.weight is dealt unevenly (101 on 2 ranks)"),
        ("olmo2", "is written anew"),
        ("phi3", "qkv_proj.weight is several tensors side by side"),
        ("gpt_oss_wide", "model.layers.*.mlp.experts adds a whole parameter to the sum"),
        ("bloom", "a value is taken in part in transformer.h.*.self_attention where no layer does it"),
        ("opt", "num_heads would have to change"),
    ],
)
def test_what_cannot_be_said_is_left_whole_with_the_reason(name, why):
    _, expressed = told(name)
    assert any(why in note for note in expressed.notes()), expressed.notes()


def test_heads_that_ranks_share_are_left_whole():
    _, expressed = told("llama_few", tp=4)  # of two heads of keys and values
    assert any("has rows that several ranks hold" in note for note in expressed.notes()), expressed.notes()
    assert expressed.plan["model.layers.0.mlp.up_proj.weight"].layout.cut


def test_one_reason_is_told_for_all_layers():
    notes = told("gpt_oss_wide")[1].notes()
    assert len(notes) == 1


def test_a_module_that_is_not_of_transformers_takes_no_tp_plan():
    module = nn.Linear(4, 4)
    with pytest.raises(PlanError, match="Linear is no model of transformers, so it takes no tp_plan"):
        abilities(module)


def test_a_model_of_which_nothing_can_be_said_is_refused():
    with pytest.raises(PlanError, match="Nothing of this plan can be told as a tp_plan of transformers"):
        told("llama_few", overrides=["*=whole"])
