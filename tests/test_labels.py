"""A loss that the model's own forward takes from labels, which no trace saw, is the whole model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.hf_models import build, perturb
from tpconvert.parallel import Mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan


def losses(mesh: Mesh, name: str, planned: str) -> tuple[float, float]:
    """The whole model's loss and this rank's."""
    module, inputs = build(name)
    perturb(module)
    module.eval()
    local = parallelize(copy.deepcopy(module), Plan.loads(planned), mesh)
    labels = inputs.get("decoder_input_ids", inputs["input_ids"])
    return tuple(float(m(**inputs, labels=labels).loss.detach()) for m in (module, local))


@pytest.mark.parametrize("name", ["llama", "llama_tied_bias", "gpt2", "gemma2", "bart", "t5", "bert_masked_lm", "opt"])
def test_a_loss_taken_inside_the_forward_is_the_whole_models(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    module, inputs = build(name)
    plan = make_plan(module, inputs, tp=2)
    assert any(b.kind == "gather" for b in plan.boundaries)
    for whole, local in run_ranks(losses, 2, name, plan.dumps()):
        assert local == pytest.approx(whole, rel=1e-5)


def test_a_bias_added_to_gathered_logits_stays_whole() -> None:
    plan = make_plan(*build("bart"), tp=2)
    (gather,) = [b for b in plan.boundaries if b.kind == "gather"]
    assert gather.module == "lm_head"
    assert not plan["final_logits_bias"].layout.cut
