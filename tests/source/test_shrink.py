"""Twins: the same classes, much smaller, with every kind of layer."""

import json

import pytest
import torch

from tpconvert.errors import SourceError
from tpconvert.source import open_source, twin

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
GEMMA = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
}
EXPERTS = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 64,
    "vocab_size": 32000,
}


def open_config(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return open_source(str(tmp_path))


@pytest.mark.parametrize("config", [LLAMA, GEMMA, EXPERTS], ids=lambda c: c["model_type"])
def test_a_twin_is_small_and_runs_and_keeps_its_heads(tmp_path, config):
    source = open_config(tmp_path, config)
    small = twin(source)
    assert type(small.module) is type(source.module)
    assert sum(p.numel() for p in small.module.parameters()) < 1e8
    for name in ("num_attention_heads", "num_key_value_heads"):
        assert getattr(small.config, name) == config[name]
    assert small.config.vocab_size == 2048
    with torch.no_grad():
        assert torch.isfinite(small.build()(**small.inputs).logits).all()


def test_a_twin_keeps_every_kind_of_layer(tmp_path):
    small = twin(open_config(tmp_path, EXPERTS))
    assert small.config.num_hidden_layers == 4  # three dense ones come before the first with experts
    names = [n for n, _ in small.module.named_parameters()]
    assert any("layers.0.mlp.up_proj" in n for n in names)
    assert any("layers.3.mlp.experts" in n for n in names)


def test_a_twin_keeps_every_type_that_the_config_lists(tmp_path):
    small = twin(open_config(tmp_path, GEMMA))
    assert len(set(small.config.layer_types)) == 2


def test_a_twin_says_what_it_shrank(tmp_path):
    small = twin(open_config(tmp_path, LLAMA))
    assert "num_hidden_layers 32 -> 2" in small.notes[0]
    assert "num_hidden_layers 32 -> 2" in small.description["twin"]


def test_the_config_of_the_source_is_left_alone(tmp_path):
    source = open_config(tmp_path, LLAMA)
    twin(source)
    assert source.config.num_hidden_layers == 32


def test_a_function_has_no_twin(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("import torch\ndef build(): return torch.nn.Linear(2, 2), (torch.ones(1, 2),)\n")
    with pytest.raises(SourceError, match="only a Hugging Face config can be shrunk"):
        twin(open_source(f"{path}:build"))
