"""Small models of four kinds, as ``benchmarks/compare/small.py:FUNCTION`` names them to ``tpconvert verify``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]
WORDS, BATCH, LENGTH = 1024, 2, 64


def llama() -> Built:
    """Grouped heads, gated ffn."""
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=WORDS, use_cache=False,
    )  # fmt: skip
    return _built(transformers.LlamaForCausalLM, config), {"input_ids": _words()}


def gpt2() -> Built:
    """Fused q, k and v, biases, tied words."""
    config = transformers.GPT2Config(n_embd=256, n_layer=2, n_head=8, vocab_size=WORDS, use_cache=False)
    return _built(transformers.GPT2LMHeadModel, config), {"input_ids": _words()}


def t5() -> Built:
    """An encoder and a decoder, a table of relative places for each head."""
    config = transformers.T5Config(
        d_model=256, d_kv=32, d_ff=512, num_layers=2, num_heads=8, vocab_size=WORDS, use_cache=False,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    inputs = {"input_ids": _words(), "decoder_input_ids": _words(2)[:, : LENGTH // 2]}
    return _built(transformers.T5ForConditionalGeneration, config), inputs


def mixtral() -> Built:
    """A mixture of eight experts, two for each word."""
    config = transformers.MixtralConfig(
        hidden_size=256, intermediate_size=448, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=WORDS, use_cache=False,
    )  # fmt: skip
    return _built(transformers.MixtralForCausalLM, config), {"input_ids": _words()}


def _built(kind: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(config)


def _words(seed: int = 1) -> torch.Tensor:
    return torch.randint(5, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
