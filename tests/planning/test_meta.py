"""A plan made without weights is the plan made with them."""

from __future__ import annotations

import pytest

from tests.hf_models import CASES, build
from tpconvert.planning import make_plan
from tpconvert.source.build.frugal import parameters_to_meta


@pytest.mark.parametrize("name", CASES)
def test_a_plan_without_weights_is_the_plan_with_them(name: str) -> None:
    module, inputs = build(name)
    with_weights = make_plan(module, inputs, tp=2)
    without = make_plan(parameters_to_meta(build(name)[0]), inputs, tp=2)
    assert [(v.name, v.layout, v.sum_grad, v.once) for v in without.verdicts] == [
        (v.name, v.layout, v.sum_grad, v.once) for v in with_weights.verdicts
    ]
    assert {(b.kind, b.module, b.slots, b.call) for b in without.boundaries} == {
        (b.kind, b.module, b.slots, b.call) for b in with_weights.boundaries
    }
    assert (without.edits, without.switches) == (with_weights.edits, with_weights.switches)


@pytest.mark.parametrize("name", ["mixtral_loop", "qwen3_moe_loop", "deepseek_v3_loop"])
def test_routing_without_weights_is_a_draw_and_the_plan_says_so(name: str) -> None:
    module, inputs = build(name)
    plan = make_plan(parameters_to_meta(module), inputs, tp=2)
    assert any("random draw" in note for note in plan.notes)
    assert all(v.layout.cut for v in plan.verdicts if v.name.endswith(("gate_up_proj", "experts.down_proj")))
