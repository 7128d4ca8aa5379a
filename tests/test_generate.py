"""A converted model generates the tokens the whole one does, with its own cache of keys and values on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.hf_models import build, perturb
from tpconvert.parallel import Mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

MODELS = [
    "llama", "llama_few", "qwen3", "gemma2", "gpt2", "gpt_neox", "bloom_eight", "falcon_single_rotary_parallel",
    "falcon_grouped_rotary_parallel", "falcon_multi_alibi_parallel", "phi3", "opt", "bart", "mixtral_wide",
    "gpt_oss_wide", "deepseek_v3_wide", "olmo2", "mamba",
]  # fmt: skip


def generate(mesh: Mesh, name: str, planned: str) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens of the whole model and of this rank's."""
    module, inputs = build(name)
    perturb(module)
    module.eval()
    module.generation_config.eos_token_id = None
    local = parallelize(copy.deepcopy(module), Plan.loads(planned), mesh)
    ids = inputs["input_ids"][:, :7]
    how = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    found = [m.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how).tolist() for m in (module, local)]
    return found[0], found[1]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_with_a_cache_are_the_whole_models(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    module, inputs = build(name)
    plan = make_plan(module, inputs, tp=2)
    for whole, local in run_ranks(generate, 2, name, plan.dumps()):
        assert local == whole


def test_a_forward_that_was_regenerated_without_a_cache_says_so(run_ranks: Callable[..., list[Any]]) -> None:
    module, inputs = build("mpt")
    plan = make_plan(module, inputs, tp=2)
    assert plan.rewrites
    with pytest.raises(AssertionError, match="regenerated for calls where cache is None"):
        run_ranks(generate, 2, "mpt", plan.dumps())
