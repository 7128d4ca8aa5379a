"""Low-rank adapters from peft, on column and row layers, an embedding and a head: cut with the weights they adapt."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.hf_models import build
from tests.zoo.frame import seeded
from tpconvert.parallel import Mesh
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank

KINDS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    "every matrix": {"target_modules": "all-linear", "lora_dropout": 0.1},
    "rank-stabilised": {"target_modules": ["up_proj", "down_proj"], "use_rslora": True},
    "magnitude and direction": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
}


def adapted(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small Llama with adapters that are not zero."""

    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names that peft reads and transformers renames
            model = get_peft_model(build("llama")[0], LoraConfig(r=4, **KINDS[kind]))
        for name, p in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                torch.nn.init.normal_(p, std=0.2)
        return model

    return seeded(make), build("llama")[1]


def compared(mesh: Mesh, kind: str, plan: str) -> str:
    """What differs on rank 0; empty where nothing does."""
    result = compare_on_rank(*adapted(kind), Plan.loads(plan), mesh)
    return "" if result is None or result.equal else result.verdict()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_cut_with_what_they_adapt(kind: str, run_ranks: Callable[..., list[Any]]) -> None:
    module, inputs = adapted(kind)
    plan = make_plan(module, inputs, tp=2)
    cut = {v.name for v in plan.verdicts if v.layout.cut}
    weights = {
        v.name for v in plan.verdicts if "_proj" in v.name and v.name.endswith("weight") and "lora_" not in v.name
    }
    if kind != "magnitude and direction":  # it takes the norm of whole weights
        assert weights <= cut
        assert any("lora_B" in n for n in cut)
        assert any("lora_A" in n for n in cut)
    assert run_ranks(compared, 2, kind, plan.dumps(), timeout=120)[0] == ""
