"""Every test model, planned and converted, is proved equal on gloo ranks."""

import pytest
import torch

from tests.hf_models import CASES
from tests.models import MODELS
from tests.verify.frame import built, planned, proved
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank

UNCUT = {("uncuttable", 2), ("qwen3_moe_loop", 3)}
"""Models and degrees at which everything may stay whole.  All others are cut, or equality would prove nothing."""

FOUR = [
    "mlp_odd", "attention_odd", "gqa_few", "mqa", "fused_per_group", "latent_attention", "alibi_computed",
    "nanogpt_literal", "vocab_odd", "tied_padding", "conv_mixer", "topk_moe", "mha_length_first", "translator",
    "llama_few", "llama_odd", "llama_tied_bias", "qwen3", "phi3", "gpt2", "gpt_neox", "bloom_eight",
    "falcon_single_alibi_parallel", "falcon_grouped_rotary_parallel", "mixtral_loop", "gpt_oss_loop",
    "deepseek_v3_loop", "t5", "bart", "whisper",
]  # fmt: skip
"""With four ranks: key heads shared, uneven heads and vocabularies, rewritten forwards, experts, ties."""

THREE = [
    "mlp_odd", "gated_mlp", "fused_gated_mlp_odd", "attention_odd", "gqa_interleave", "gqa_expand", "mqa",
    "relative_bias", "nanogpt", "vocab_odd", "two_heads", "stacked_moe", "translator",
    "llama_three", "llama_odd", "qwen2", "olmo2", "gpt2_eager", "bloom", "opt_projected", "t5_gated", "bert_masked_lm",
    "qwen3_moe_loop", "albert",
]  # fmt: skip
"""With three ranks: what two and four divide, three does not."""


@pytest.mark.parametrize(
    ("name", "tp"),
    [*((n, 2) for n in (*MODELS, *CASES)), *((n, 4) for n in FOUR), *((n, 3) for n in THREE)],
)
def test_a_converted_model_is_equal(run_ranks, name, tp):
    plan = planned(name, tp)
    assert any(v.layout.cut for v in plan.verdicts) or (name, tp) in UNCUT
    result = run_ranks(proved, tp, name, plan.dumps(), timeout=120)[0]
    assert result.equal, result.verdict()
    assert {c.kind for c in result.checks} >= {"output", "loss", "gradient", "after 2 steps"}


def without_gradients(mesh, name, plan):
    module, inputs = built(name)
    with torch.inference_mode():
        return compare_on_rank(module, inputs, Plan.loads(plan), mesh)


def test_the_callers_inference_mode_does_not_matter(run_ranks):
    result = run_ranks(without_gradients, 2, "gated_mlp", planned("gated_mlp", 2).dumps())[0]
    assert result.equal and any(c.kind == "gradient" for c in result.checks)


class Masked(torch.nn.Module):
    """A mask of integers times the least number of its parts' dtype, which float32 does not have in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(24, 48), torch.nn.Linear(48, 24)

    def forward(self, x, mask):
        y = self.down(torch.tanh(self.up(x)))
        return (y + (1 - mask)[..., None] * torch.finfo(y.dtype).min).softmax(1)


def masked():
    torch.manual_seed(0)
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[:, 5:] = 0
    return Masked(), {"x": torch.randn(3, 7, 24), "mask": mask}


def prove_masked(mesh, plan):
    return compare_on_rank(*masked(), Plan.loads(plan), mesh)


def test_numbers_made_of_integers_are_as_wide_as_all_others(run_ranks):
    plan = make_plan(*masked(), tp=2)
    assert plan["down.weight"].layout.cut
    result = run_ranks(prove_masked, 2, plan.dumps())[0]
    assert result.equal, result.verdict()
