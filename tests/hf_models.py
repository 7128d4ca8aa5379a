"""The table of tiny real transformers models, from configurations, with random weights.

    module, inputs = build("llama_few")
    output = module(**inputs)

Nothing is downloaded.  Transformers is imported when the first model is built.  Many classes go down to float32 on
their way (norms, rotary tables, softmax) even when their weights are float64; inside :class:`Widened` they do not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.models import as_double, perturb
from tests.zoo.frame import Built, Inputs, floats, seeded, words

__all__ = ["CASES", "Case", "Widened", "build", "perturb", "ready"]

BATCH, LENGTH, SOURCE = 2, 13, 11
VOCAB, FFN = 108, 84  # both are cut by 2, 3 and 4


def text(length: int = LENGTH, vocab: int = VOCAB) -> Inputs:
    """Word ids without a mask; the ids leave out the first few, which are padding and marks."""
    return {"input_ids": words(BATCH, length, vocab=vocab - 5) + 5}


def masked(*, left: bool) -> Inputs:
    """Word ids of which the second row has four padding places, at its left or its right."""
    inputs, mask = text(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, slice(0, 4) if left else slice(-4, None)] = 0
    return inputs | {"attention_mask": mask}


def pair() -> Inputs:
    """A source and a target."""
    return {"input_ids": words(BATCH, SOURCE, vocab=VOCAB - 5) + 5, "decoder_input_ids": words(BATCH, 7, seed=2)}


def picture() -> Inputs:
    """Two pictures of 12 by 12."""
    return {"pixel_values": floats(BATCH, 3, 12, 12)}


def sound() -> Inputs:
    """Two sounds of 22 frames and the words said so far."""
    return {"input_features": floats(BATCH, 10, 2 * SOURCE), "decoder_input_ids": words(BATCH, 7, seed=2)}


@dataclass(frozen=True, slots=True)
class Case:
    """One model: a class of transformers, what its configuration is given, and its inputs."""

    name: str
    """The class, as transformers spells it."""
    config: Mapping[str, Any]
    inputs: Callable[[], Inputs] = text
    seed: int = field(default=0, kw_only=True)
    """For weights and for :func:`ready`'s noise; chosen so that no routing is near a tie."""
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Further arguments of construction, such as the attention implementation."""
    narrow: str = field(default="", kw_only=True)
    """Why the class cannot run in float64; empty where it can."""


def build(name: str) -> Built:
    """The named model in eval mode, in float32 and freshly initialised, with its inputs."""
    import transformers

    case = CASES[name]
    cls = getattr(transformers, case.name)
    config = cls.config_class(**case.config)
    module = seeded(cls._from_config, config, **case.options, seed=case.seed)
    cache = {"use_cache": False} if hasattr(config, "use_cache") else {}
    return module.float().eval(), case.inputs() | cache


def ready(name: str) -> Built:
    """The named model perturbed and in float64 where its class allows, with its inputs: where a comparison starts."""
    module, inputs = build(name)
    perturb(module, CASES[name].seed)
    return (module, inputs) if CASES[name].narrow else as_double(module, inputs)


class Widened(TorchFunctionMode):
    """Runs code that asks for float32 in float64 instead, so that equal stays equal to the last digits."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """What ``func`` returns with float64 wherever float32 is asked for."""
        if func is Tensor.float:
            func = Tensor.double
        given = {key: widen(value) for key, value in (kwargs or {}).items()}
        return func(*map(widen, args), **given)


def widen(x: object) -> object:
    """float64 for float32; anything else as it is."""
    return torch.float64 if x is torch.float32 else x


def causal(**changes: Any) -> dict[str, Any]:
    """Sizes of a Llama-like configuration: 8 heads of 6 on 4 key heads, width 40."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": FFN, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "max_position_embeddings": 64,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return sizes | changes


def bert(**changes: Any) -> dict[str, Any]:
    """Sizes of a BERT-like configuration: 12 heads of 5, no dropout."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 60, "intermediate_size": FFN, "num_hidden_layers": 2,
        "num_attention_heads": 12, "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "pad_token_id": 1,
    }  # fmt: skip
    return sizes | changes


def falcon(**changes: Any) -> Case:
    """A Falcon of 12 heads of 6; 4 key heads where they are grouped."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 72, "ffn_hidden_size": FFN, "num_hidden_layers": 2,
        "num_attention_heads": 12, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return Case("FalconForCausalLM", sizes | changes)


def falcons() -> dict[str, Case]:
    """Every combination of Falcon's flags that transformers can run; biases go with the serial ones.

    Grouped heads in a serial block are left out: its decoder layer then looks for a norm that it never made.
    """
    heads = {
        "multi": {"multi_query": False, "num_kv_heads": 12},
        "single": {"multi_query": True},
        "grouped": {"new_decoder_architecture": True, "num_kv_heads": 4},
    }
    return {
        f"falcon_{kind}_{'alibi' if alibi else 'rotary'}_{'parallel' if parallel else 'serial'}": falcon(
            **flags, alibi=alibi, parallel_attn=parallel, bias=not parallel
        )
        for (kind, flags), alibi, parallel in product(heads.items(), (False, True), (True, False))
        if parallel or kind != "grouped"
    }


T5 = {
    "vocab_size": VOCAB, "d_model": 44, "d_kv": 5, "d_ff": FFN, "num_layers": 2, "num_heads": 12, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
}  # fmt: skip
T5_GATED = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART = {
    "vocab_size": VOCAB, "d_model": 60, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 12,
    "decoder_attention_heads": 4, "encoder_ffn_dim": FFN, "decoder_ffn_dim": 28, "dropout": 0.0,
    "max_position_embeddings": 64,
}  # fmt: skip
OPT = {
    "vocab_size": VOCAB, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 12, "ffn_dim": FFN,
    "max_position_embeddings": 64, "dropout": 0.0, "word_embed_proj_dim": 60,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 60, "n_head": 12, "n_layer": 2, "n_inner": FFN, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
NEOX = {
    "vocab_size": VOCAB, "hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 2,
    "intermediate_size": FFN, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WHISPER = {
    "vocab_size": VOCAB, "num_mel_bins": 10, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 12,
    "decoder_attention_heads": 4, "encoder_ffn_dim": FFN, "decoder_ffn_dim": 28, "d_model": 60,
    "max_source_positions": SOURCE, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
VIT = {
    "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": FFN, "image_size": 12,
    "patch_size": 4, "num_labels": 10,
}  # fmt: skip
MPT = {"vocab_size": VOCAB, "d_model": 60, "n_heads": 12, "n_layers": 2, "expansion_ratio": 3}
MAMBA = {"vocab_size": VOCAB, "hidden_size": 22, "state_size": 5, "num_hidden_layers": 2, "time_step_rank": 3}
DISTILBERT = {
    "vocab_size": VOCAB, "dim": 60, "hidden_dim": FFN, "n_layers": 2, "n_heads": 12, "max_position_embeddings": 64,
    "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
CLIP = {
    "projection_dim": 26,
    "text_config": {
        "vocab_size": VOCAB, "hidden_size": 60, "intermediate_size": FFN, "num_hidden_layers": 2,
        "num_attention_heads": 12, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": VOCAB - 1, "projection_dim": 26,
    },
    "vision_config": {
        "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 12, "patch_size": 4, "projection_dim": 26,
    },
}  # fmt: skip
MIXTRAL = causal(intermediate_size=28, num_local_experts=4, num_experts_per_tok=2)
QWEN3_MOE = causal(moe_intermediate_size=28, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True)
GPT_OSS = causal(
    intermediate_size=28, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
    rope_parameters={
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 32,
    },
)  # fmt: skip
DEEPSEEK = causal(
    num_key_value_heads=8, head_dim=4, q_lora_rank=26, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=6,
    v_head_dim=5, moe_intermediate_size=28, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
    num_experts_per_tok=2, first_k_dense_replace=1,
)  # fmt: skip
EAGER = {"attn_implementation": "eager"}
LOOP = {"experts_implementation": "eager"}
GROUPED = "grouped_mm, the default for experts, has no float64 kernel"

CASES: dict[str, Case] = {
    "llama": Case("LlamaForCausalLM", causal()),
    "llama_few": Case("LlamaForCausalLM", causal(num_key_value_heads=2)),
    "llama_three": Case("LlamaForCausalLM", causal(num_attention_heads=12, num_key_value_heads=6, hidden_size=48)),
    "llama_odd": Case(
        "LlamaForCausalLM",
        causal(vocab_size=101, hidden_size=42, num_attention_heads=6, num_key_value_heads=3),
        lambda: text(vocab=101),
    ),
    "llama_eager": Case("LlamaForCausalLM", causal(), options=EAGER),
    "llama_padded": Case("LlamaForCausalLM", causal(), lambda: masked(left=True)),
    "llama_tied_bias": Case("LlamaForCausalLM", causal(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "llama_base": Case("LlamaModel", causal()),
    "qwen2": Case("Qwen2ForCausalLM", causal(num_attention_heads=12, num_key_value_heads=6, hidden_size=48)),
    "qwen3": Case("Qwen3ForCausalLM", causal()),
    "gemma2": Case("Gemma2ForCausalLM", causal(sliding_window=5, query_pre_attn_scalar=7, pad_token_id=0)),
    "olmo2": Case("Olmo2ForCausalLM", causal(num_attention_heads=12, num_key_value_heads=6, hidden_size=48)),
    "phi3": Case("Phi3ForCausalLM", causal(num_attention_heads=12, num_key_value_heads=4, hidden_size=48)),
    "gpt2": Case("GPT2LMHeadModel", GPT2),
    "gpt2_eager": Case("GPT2LMHeadModel", GPT2 | {"scale_attn_by_inverse_layer_idx": True}, options=EAGER),
    "gpt_neox": Case("GPTNeoXForCausalLM", NEOX),
    "gpt_neox_serial": Case("GPTNeoXForCausalLM", NEOX | {"use_parallel_residual": False}, options=EAGER),
    "bloom": Case("BloomForCausalLM", {"vocab_size": VOCAB, "hidden_size": 60, "n_layer": 2, "n_head": 12}),
    "bloom_eight": Case("BloomForCausalLM", {"vocab_size": VOCAB, "hidden_size": 40, "n_layer": 2, "n_head": 8}),
    **falcons(),
    "falcon_grouped_one_norm": falcon(new_decoder_architecture=True, num_kv_heads=4, num_ln_in_parallel_attn=1),
    "opt": Case("OPTForCausalLM", OPT),
    "opt_projected": Case("OPTForCausalLM", OPT | {"word_embed_proj_dim": 26, "do_layer_norm_before": False}),
    "mpt": Case("MptForCausalLM", MPT),
    "mamba": Case("MambaForCausalLM", MAMBA),
    "t5": Case("T5ForConditionalGeneration", T5, pair),
    "t5_gated": Case("T5ForConditionalGeneration", T5_GATED, pair),
    "bart": Case("BartForConditionalGeneration", BART, pair),
    "whisper": Case("WhisperForConditionalGeneration", WHISPER, sound),
    "bert": Case("BertModel", bert(), lambda: masked(left=False)),
    "bert_masked_lm": Case("BertForMaskedLM", bert()),
    "bert_eager": Case("BertForMaskedLM", bert(), options=EAGER),
    "roberta": Case("RobertaForMaskedLM", bert()),
    "albert": Case("AlbertForMaskedLM", bert(embedding_size=26, classifier_dropout_prob=0.0)),
    "distilbert": Case("DistilBertForMaskedLM", DISTILBERT),
    "vit": Case("ViTForImageClassification", VIT, picture),
    "clip": Case("CLIPModel", CLIP, lambda: text() | picture()),
    "mixtral": Case("MixtralForCausalLM", MIXTRAL, narrow=GROUPED),
    "mixtral_wide": Case("MixtralForCausalLM", MIXTRAL | {"intermediate_size": 64}, narrow=GROUPED),
    "mixtral_loop": Case("MixtralForCausalLM", MIXTRAL, options=LOOP),
    "qwen3_moe": Case("Qwen3MoeForCausalLM", QWEN3_MOE, seed=11, narrow=GROUPED),
    "qwen3_moe_wide": Case("Qwen3MoeForCausalLM", QWEN3_MOE | {"moe_intermediate_size": 64}, seed=11, narrow=GROUPED),
    "qwen3_moe_loop": Case("Qwen3MoeForCausalLM", QWEN3_MOE, seed=11, options=LOOP),
    "gpt_oss": Case("GptOssForCausalLM", GPT_OSS, narrow=GROUPED),
    "gpt_oss_wide": Case("GptOssForCausalLM", GPT_OSS | {"intermediate_size": 64}, narrow=GROUPED),
    "gpt_oss_loop": Case("GptOssForCausalLM", GPT_OSS, options=LOOP),
    "deepseek_v3": Case("DeepseekV3ForCausalLM", DEEPSEEK, seed=6, narrow=GROUPED),
    "deepseek_v3_wide": Case("DeepseekV3ForCausalLM", DEEPSEEK | {"moe_intermediate_size": 64}, seed=6, narrow=GROUPED),
    "deepseek_v3_loop": Case("DeepseekV3ForCausalLM", DEEPSEEK, seed=6, options=LOOP),
}
