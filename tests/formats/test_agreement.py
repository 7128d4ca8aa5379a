"""A tp_plan of others beside a plan of ours."""

import json

import pytest

from tests.hf_models import build
from tpconvert.errors import PlanError
from tpconvert.formats.agreement import agreement, agreement_text, read_tp_plan
from tpconvert.formats.transformers import cut_by, tp_plan
from tpconvert.planning import make_plan


@pytest.fixture(scope="module")
def qwen3():
    module, inputs = build("qwen3")
    return module, make_plan(module, inputs, tp=2)


def row(found, name):
    return next(r for r in found.rows if r.name == name)


def test_the_plan_a_model_brings_along_is_read_by_default(qwen3):
    module, plan = qwen3
    found = agreement(module, plan)
    assert found.agree
    assert found.share == 1
    up = row(found, "model.layers.*.mlp.up_proj.weight")
    assert (up.theirs, up.ours, up.count, up.agree) == ("dim 0", "dim 0", 2, True)
    assert row(found, "model.layers.*.self_attn.q_norm.weight").ours == "whole, gradient summed"


def test_what_only_we_cut_is_told_with_our_reason(qwen3):
    module, plan = qwen3
    theirs = {k: v for k, v in module.tp_plan.items() if "mlp" not in k}
    found = agreement(module, plan, theirs)
    up = row(found, "model.layers.*.mlp.up_proj.weight")
    assert (up.theirs, up.ours, up.agree) == ("whole", "dim 0", False)
    assert up.why == plan["model.layers.0.mlp.up_proj.weight"].reason
    assert 0 < found.share < 1
    assert "!" in agreement_text(found, "qwen3")


def test_what_only_they_cut_is_told_with_our_reason():
    module, inputs = build("qwen3")
    plan = make_plan(module, inputs, tp=2, overrides=["model.layers.*.mlp=whole"])
    down = row(agreement(module, plan), "model.layers.*.mlp.down_proj.weight")
    assert (down.theirs, down.ours, down.agree) == ("dim 1", "whole", False)
    assert down.why.startswith("whole: ")


def test_a_gradient_that_only_one_sums_is_no_agreement(qwen3):
    module, plan = qwen3
    theirs = {k: v for k, v in module.tp_plan.items() if "q_norm" not in k}
    norm = row(agreement(module, plan, theirs), "model.layers.*.self_attn.q_norm.weight")
    assert not norm.agree
    assert norm.why == "each rank computes a term of its gradient"


def test_the_same_dim_dealt_otherwise_is_no_agreement():
    module, inputs = build("phi3")
    found = agreement(module, make_plan(module, inputs, tp=2))
    fused = row(found, "model.layers.*.mlp.gate_up_proj.weight")
    assert (fused.theirs, fused.ours, fused.agree) == ("dim 0", "dim 0, both halves", False)


def test_a_plan_written_by_us_agrees_with_ours():
    from tpconvert.formats.express import express
    from tpconvert.formats.transformers import abilities

    for name in ("mixtral_wide", "deepseek_v3_wide", "gpt_oss_wide"):
        module, inputs = build(name)
        expressed = express(module, inputs, tp=2, abilities=abilities(module))
        assert agreement(module, expressed.plan, tp_plan(module, expressed)).agree, name


def test_a_pattern_that_names_nothing_is_told(qwen3):
    module, plan = qwen3
    found = agreement(module, plan, module.tp_plan | {"model.layers.*.mlp.gate": "colwise"})
    assert found.unused == ("model.layers.*.mlp.gate",)
    assert "names model.layers.*.mlp.gate, which is nothing in the model" in agreement_text(found, "qwen3")


def test_a_model_without_a_plan_of_its_own_has_nothing_to_compare():
    module, inputs = build("gpt2")
    with pytest.raises(PlanError, match="GPT2LMHeadModel brings no tp_plan along"):
        agreement(module, make_plan(module, inputs, tp=2))


def test_a_style_that_is_not_known_is_an_error(qwen3):
    with pytest.raises(PlanError, match="'diagonal' is no style of transformers known here"):
        agreement(*qwen3, {"lm_head": "diagonal"})


@pytest.mark.parametrize("text", ["no", "[]", '{"lm_head": 1}'])
def test_a_file_that_holds_no_tp_plan_is_one_line(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match="tp_plan is"):
        read_tp_plan(tmp_path / "plan.json")


def test_a_file_of_patterns_is_read(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"lm_head": "colwise"}))
    assert read_tp_plan(tmp_path / "plan.json") == {"lm_head": "colwise"}


def test_styles_cut_what_transformers_cuts():
    """Held to the placements that transformers itself gives, for one, two and three dims."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import _StridedShard
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    from tpconvert.formats.transformers import CUTS, WHOLES

    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", list(range(2)))
        for style in sorted(CUTS) + sorted(WHOLES):
            for shape in ((8,), (8, 8), (8, 8, 8)):
                if style.startswith("embedding") and len(shape) != 2:
                    continue
                for name in ("weight", "bias"):
                    module = torch.nn.Module()
                    module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, device="meta")))
                    ALL_PARALLEL_STYLES[style].shard_param(module, name, mesh)
                    found = cut_by(style, f"layer.{name}", shape)
                    placed = getattr(getattr(module, name), "placements", (None,))[0]
                    if found is None:
                        assert placed is None or placed.is_replicate(), (style, shape, name)
                    else:
                        have = placed.dim % len(shape), isinstance(placed, _StridedShard)
                        assert have == (found.dim, found.packed), (style, shape, name)
    finally:
        torch.distributed.destroy_process_group()
