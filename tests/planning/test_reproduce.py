"""A plan's axes are found again in a trace, also where several have one size."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tpconvert.planning import make_plan
from tpconvert.verify import emulate_module


def test_heads_and_head_dim_of_one_size_are_told_apart() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_head=8, n_layer=1, vocab_size=108, n_positions=32, use_cache=False)
    module = GPT2LMHeadModel(config).eval()
    inputs = {"input_ids": torch.randint(0, 100, (2, 13)), "use_cache": False}
    plan = make_plan(module, inputs, tp=2)
    assert plan["transformer.h.0.attn.c_attn.weight"].layout.to_json() == {"dim": 1, "blocks": [[8, 8], [8, 8], [8, 8]]}
    assert emulate_module(module, inputs, plan).equal
