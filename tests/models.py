"""The table of tiny vanilla models, none from transformers: a name gives a function, the function a module and inputs.

    module, inputs = MODELS["gqa_sdpa"]()
    output = module(**inputs)

Weights are seeded and torch's default initialisation; use :func:`perturb` before comparing anything.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn

from tests.zoo import attention, builtin, dense, experts, forms, lm
from tests.zoo.frame import Built, Inputs, floats


def perturb(module: nn.Module, seed: int = 0) -> nn.Module:
    """The same module with seeded noise on every parameter and floating buffer: no bias is zero, no norm weight one.

    Buffers are scaled by up to 5 %, so variances stay positive and masks stay masks; buffers of zeros get noise.
    Integer and boolean buffers keep their values.  Tied tensors get their noise once.
    """
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=noise).to(p))
        for b in module.buffers():
            if b.is_floating_point():
                step = 0.05 * (2 * torch.rand(b.shape, generator=noise) - 1).to(b)
                b.copy_(b * (1 + step) if b.any() else step)
    return module


def as_double(module: nn.Module, inputs: Inputs) -> Built:
    """Module (changed in place) and inputs with every floating tensor in float64."""
    return module.double(), {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()
    }


def leaves(output: object) -> Iterator[Tensor]:
    """The tensors of an output in order: of tuples, lists, dicts and dataclasses, nested."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from leaves(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from leaves(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from leaves(getattr(output, field.name))


def loss_of(output: object) -> Tensor:
    """A scalar in which every number of every floating leaf has a weight of its own, so no gradient cancels."""
    return sum(
        (x * floats(*x.shape, seed=i + 5).to(x)).sum() for i, x in enumerate(leaves(output)) if x.is_floating_point()
    )


MODELS: dict[str, Callable[[], Built]] = {
    "mlp": dense.mlp,
    "mlp_odd": dense.mlp_odd,
    "gated_mlp": dense.gated_mlp,
    "gated_mlp_bias": dense.gated_mlp_bias,
    "fused_gated_mlp": dense.fused_gated_mlp,
    "fused_gated_mlp_odd": dense.fused_gated_mlp_odd,
    "interleaved_gated_mlp": dense.interleaved_gated_mlp,
    "unequal_split": dense.unequal_split,
    "mlp_transposed_tie": dense.mlp_transposed_tie,
    "mlp_tied_pair": dense.mlp_tied_pair,
    "called_twice": dense.called_twice,
    "conv_net": dense.conv_net,
    "conv_mixer": dense.conv_mixer,
    "uncuttable": dense.uncuttable,
    "attention": attention.attention,
    "attention_odd": attention.attention_odd,
    "gqa_interleave": attention.gqa_interleave,
    "gqa_few": attention.gqa_few,
    "gqa_expand": attention.gqa_expand,
    "gqa_sdpa": attention.gqa_sdpa,
    "mqa": attention.mqa,
    "alibi_buffer": attention.alibi_buffer,
    "alibi_computed": attention.alibi_computed,
    "head_norms": attention.head_norms,
    "width_norm": attention.width_norm,
    "rotary": attention.rotary,
    "relative_bias": attention.relative_bias,
    "fused_per_head": attention.fused_per_head,
    "fused_per_group": attention.fused_per_group,
    "einsum_attention": attention.einsum_attention,
    "einsum_layers": attention.einsum_layers,
    "latent_attention": attention.latent_attention,
    "parallel_block": attention.parallel_block,
    "mha_batch_first": builtin.mha_batch_first,
    "mha_length_first": builtin.mha_length_first,
    "mha_cross_batch_first": builtin.mha_cross_batch_first,
    "mha_cross_length_first": builtin.mha_cross_length_first,
    "encoder_norm_first": builtin.encoder_norm_first,
    "encoder_norm_last": builtin.encoder_norm_last,
    "encoder_dropout": builtin.encoder_dropout,
    "decoder": builtin.decoder,
    "translator": builtin.translator,
    "recurrent": builtin.recurrent,
    "nanogpt_literal": lm.nanogpt_literal,
    "nanogpt": lm.nanogpt,
    "nanogpt_dropout": lm.nanogpt_dropout,
    "vocab_odd": lm.vocab_odd,
    "log_softmax_head": lm.log_softmax_head,
    "tied_padding": lm.tied_padding,
    "scaled_embedding": lm.scaled_embedding,
    "two_heads": lm.two_heads,
    "soft_moe": experts.soft_moe,
    "slot_moe": experts.slot_moe,
    "topk_moe": experts.topk_moe,
    "topk_moe_idle": experts.topk_moe_idle,
    "stacked_moe": experts.stacked_moe,
    "in_out_linear": forms.in_out_linear,
    "transposed_linear": forms.transposed_linear,
    "scaled_linear": forms.scaled_linear,
    "parent_calls": forms.parent_calls,
    "in_place": forms.in_place,
    "residuals": forms.residuals,
    "tuple_output": forms.tuple_output,
    "dict_output": forms.dict_output,
    "dataclass_output": forms.dataclass_output,
}
