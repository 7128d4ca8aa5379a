"""The same Llama of Megatron-Core's own layers, in its local spec with torch's scaled dot product attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.compare.case import Case
from benchmarks.compare.models import layers_of
from benchmarks.compare.ways import Step


class Attention(torch.nn.Module):
    """Causal attention of [tokens, batch, heads, head size], in place of Megatron's, which keeps all scores."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """As Megatron calls it."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def megatron(case: Case, config: Any, device: torch.device) -> Step:
    """A step of it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.tp, create_gloo_process_groups=False)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(1)
    else:
        torch.cuda.current_device = lambda: device  # which its rotary tables are moved to
    settings = TransformerConfig(
        num_layers=case.layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        tensor_model_parallel_size=case.tp,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=device.type == "cpu",
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Attention
    module = GPTModel(
        settings,
        spec,
        config.vocab_size,
        case.tokens // case.batch,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    ).to(device, torch.bfloat16)
    module.train()
    if case.compiled:
        for layer in layers_of(module):
            layer.compile()
    random = torch.Generator(device).manual_seed(7)
    shape = (case.batch, case.tokens // case.batch)
    ids, labels = (torch.randint(0, config.vocab_size, shape, generator=random, device=device) for _ in range(2))
    places = torch.arange(shape[1], device=device).expand(shape)
    return Step(module, lambda: module(ids, places, None, labels=labels).mean())
