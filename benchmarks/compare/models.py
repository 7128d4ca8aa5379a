"""The models that are measured, on meta, with what a step of each is fed and how its loss is made."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tpconvert.source.build.frugal import frugal, parameters_to_meta

KINDS: Mapping[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_hidden_layers": 8, "vocab_size": 32000, "max_position_embeddings": 65536,
        },
    ),
    "mixtral": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        {
            "hidden_size": 4096, "intermediate_size": 7168, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_hidden_layers": 4, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "gpt2-xl": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {"n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257, "n_positions": 4096},
    ),
    "bert-large": (
        hf.BertForMaskedLM,
        hf.BertConfig,
        {
            "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
            "vocab_size": 30522,
        },
    ),
    "vit-l": (
        hf.ViTForImageClassification,
        hf.ViTConfig,
        {
            "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
            "num_labels": 1000,
        },
    ),
}  # fmt: skip

TOY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128,
    "n_embd": 64, "n_head": 8, "num_labels": 16, "image_size": 32, "patch_size": 8,
}  # fmt: skip
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "n_embd", "n_head")
DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop",
)  # fmt: skip


UNMASKED = "sdpa_unmasked"
"""The attention of models recorded as a CUDA graph.  For a name of one's own transformers makes no mask; for its
own ``sdpa`` it looks for packed documents, and where it must not wait for the GPU takes all for packed.
"""


def config_of(kind: str, layers: int, width: float, toy: bool, attention: str = "sdpa") -> Any:
    """A configuration; ``toy`` is small enough for a CPU."""
    hf.AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    _, config, numbers = KINDS[kind]
    numbers = dict(numbers)
    if toy:
        numbers |= {k: v for k, v in TOY.items() if k in numbers or k in ("image_size", "patch_size")}
    numbers |= {k: int(v * width) for k, v in numbers.items() if k in WIDTHS}
    numbers["n_layer" if "n_layer" in numbers else "num_hidden_layers"] = layers
    made = config(**numbers, dtype="bfloat16", attn_implementation=attention)
    for name in DROPOUTS:
        if hasattr(made, name):
            setattr(made, name, 0.0)
    if hasattr(made, "use_cache"):
        made.use_cache = False
    return made


def skeleton_of(kind: str, config: Any) -> nn.Module:
    """The model without weights, in bfloat16."""
    with frugal():
        return parameters_to_meta(KINDS[kind][0](config)).to(torch.bfloat16)


def example_of(kind: str, config: Any) -> dict[str, Any]:
    """What a plan is made with."""
    if kind == "vit-l":
        return {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size, dtype=torch.bfloat16)}
    ids = {"input_ids": torch.randint(5, config.vocab_size, (2, 13))}
    return ids | ({"use_cache": False} if hasattr(config, "use_cache") else {})


def batch_of(kind: str, config: Any, tokens: int, rows: int, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """``(inputs, labels)`` of a step, the same on each rank."""
    random = torch.Generator(device).manual_seed(7)
    if kind == "vit-l":
        places = (config.image_size // config.patch_size) ** 2 + 1
        pictures = max(tokens // places, 1)
        shape = (pictures, 3, config.image_size, config.image_size)
        pixels = torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16)
        return {"pixel_values": pixels}, torch.randint(
            0, config.num_labels, (pictures,), generator=random, device=device
        )
    shape = (rows, tokens // rows)
    ids, labels = (torch.randint(0, config.vocab_size, shape, generator=random, device=device) for _ in range(2))
    return {"input_ids": ids} | ({"use_cache": False} if hasattr(config, "use_cache") else {}), labels


def whole_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of whole logits, in float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def value_of(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """The whole value of a parameter, by its name alone, so that all ways of running a model train one model."""
    random = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    made = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02, generator=random)
    return made + 1 if len(shape) == 1 and name.endswith("weight") else made


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The repeated layers, which are compiled one by one."""
    from tpconvert.train.model.open import layers_of as repeated

    return list(repeated(module))
