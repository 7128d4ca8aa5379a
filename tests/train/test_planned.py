"""Training of what the planner cuts is training of the whole: a Llama whose key heads are fewer than the ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models import perturb
from tests.train.tiny import make_text
from tpconvert.checkpoint import merge, shard
from tpconvert.planning import make_plan
from tpconvert.source import open_source
from tpconvert.train.loop import train
from tpconvert.train.settings.config import Config, make_config


def make_folder(tmp_path: Path, tp: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=261, hidden_size=24, intermediate_size=46, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, max_position_embeddings=40, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    perturb(LlamaForCausalLM(config)).save_pretrained(tmp_path / "source")
    source = open_source(str(tmp_path / "source"))
    plan = make_plan(source.module, source.inputs, tp=tp, source=source.description)
    assert tp == 1 or all(v.layout.cut for v in plan.verdicts if v.name.endswith("k_proj.weight"))
    shard(source.weights(), plan, tmp_path / f"tp{tp}")
    return tmp_path / f"tp{tp}"


def settings(tmp_path: Path, **training) -> Config:
    return make_config({
        "training": {
            "steps": 10, "micro_batch_size": 2, "global_batch_size": 4, "seq_len": 24, "precision": "fp64",
            "lr": 0.02, "weight_decay": 0.3, "clip": 0.2, **training,
        },
        "data": {
            "path": str(make_text(tmp_path / "text.txt")), "tokenizer": "bytes", "cache": str(tmp_path / "cache"),
        },
        "logging": {"every": 1, "tensorboard": False, "jsonl": False},
    })  # fmt: skip


def run(mesh, folder: Path, config: Config, output: Path) -> list[float]:
    return train(folder, config, mesh, output=output)


def trained(run_ranks, tmp_path: Path, tp: int, config: Config) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the weights in the end."""
    every = run_ranks(run, tp, make_folder(tmp_path, tp), config, tmp_path / f"run{tp}", timeout=120)
    assert all(losses == every[0] for losses in every)
    merge(tmp_path / f"run{tp}" / f"step-{config.training.steps}", tmp_path / f"merged{tp}")
    return every[0], load_file(tmp_path / f"merged{tp}" / "model.safetensors")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_ten_steps_on_two_and_four_ranks_are_those_on_one(run_ranks, tmp_path: Path, optimizer: str):
    config = settings(tmp_path, optimizer=optimizer, **({"lr": 1.0, "momentum": 0.9} if optimizer == "sgd" else {}))
    losses, weights = trained(run_ranks, tmp_path, 1, config)
    before = load_file(tmp_path / "source" / "model.safetensors")
    for tp in (2, 4):
        ours, made = trained(run_ranks, tmp_path, tp, config)
        assert ours == pytest.approx(losses, rel=1e-9)
        assert made.keys() == weights.keys()
        for name, tensor in weights.items():
            assert (tensor - before[name]).abs().max() > 1e-4, name
            assert (made[name] - tensor).abs().max() < 3e-7, name  # they are stored in float32


def test_bf16_on_two_ranks_follows_one(run_ranks, tmp_path: Path):
    config = settings(tmp_path, precision="bf16", lr=0.005)
    losses, _ = trained(run_ranks, tmp_path, 1, config)
    ours, _ = trained(run_ranks, tmp_path, 2, config)
    assert ours == pytest.approx(losses, rel=0.02) and ours != losses
