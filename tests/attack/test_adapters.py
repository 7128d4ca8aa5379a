"""Low-rank adapters from peft, on column and row layers, an embedding and a head: cut with the weights they adapt."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests import hf_models
from tests.equal import difference
from tests.zoo.frame import seeded
from tpconvert.planning import make_plan

KINDS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    "every matrix": {"target_modules": "all-linear", "lora_dropout": 0.1},
    "rank-stabilised": {"target_modules": ["up_proj", "down_proj"], "use_rslora": True},
    "magnitude and direction": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
}


def built(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small Llama with adapters that are not zero."""

    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names that peft reads and transformers renames
            model = get_peft_model(hf_models.build("llama")[0], LoraConfig(r=4, **KINDS[kind]))
        for name, p in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                torch.nn.init.normal_(p, std=0.2)
        return model

    return seeded(make), hf_models.build("llama")[1]


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_cut_with_what_they_adapt(kind: str, run_ranks: Callable[..., list[Any]]) -> None:
    module, inputs = built(kind)
    plan = make_plan(module, inputs, tp=2)
    cut = {v.name for v in plan.verdicts if v.layout.cut}
    weights = {
        v.name for v in plan.verdicts if "_proj" in v.name and v.name.endswith("weight") and "lora_" not in v.name
    }
    if kind != "magnitude and direction":  # it takes the norm of whole weights
        assert weights <= cut
        assert any("lora_B" in n for n in cut)
        assert any("lora_A" in n for n in cut)
    assert run_ranks(difference, 2, __name__, plan.dumps(), kind, timeout=120)[0] is None
