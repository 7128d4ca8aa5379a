"""Real transformers classes: how they are called, what their loss is, and that a merge is theirs again."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.parallel.same import columns, plan_of, rows
from tests.train.tiny import make_text
from tpconvert.checkpoint import merge, shard
from tpconvert.errors import ConfigError
from tpconvert.parallel import make_mesh
from tpconvert.source import open_source
from tpconvert.spec.plan import Boundary, Plan
from tpconvert.train.data.run import Batches, Position, make_sequences
from tpconvert.train.examples.text import open_tokens, tokenize
from tpconvert.train.examples.tokenizer import open_tokenizer
from tpconvert.train.loop import train
from tpconvert.train.settings.config import Config, make_config

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 40,
}  # fmt: skip


def save_tokenizer(folder: Path, masked: bool, pair: bool = False) -> None:
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    inner = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*special, *"0123456789", "is", "times", "."])}, "[UNK]")
    )
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    if masked:
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1" if pair else None,
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
        if pair:
            names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    else:
        names |= {"eos_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)


def mlp_plan(module: torch.nn.Module, tp: int, source: dict) -> Plan:
    """The MLPs of a Llama are cut, all else is whole."""
    if tp == 1:
        return plan_of(module, 1, {}, source=source)
    cut, boundaries = {}, []
    for i in range(SIZES["num_hidden_layers"]):
        mlp, size = f"model.layers.{i}.mlp", SIZES["intermediate_size"]
        cut |= {f"{mlp}.gate_proj.weight": rows(size), f"{mlp}.up_proj.weight": rows(size)}
        cut[f"{mlp}.down_proj.weight"] = columns(size)
        boundaries.append(Boundary("copy", mlp, "input", ("args.0",)))
        boundaries.append(Boundary("reduce", f"{mlp}.down_proj", "output", ("",)))
    return plan_of(module, tp, cut, boundaries=tuple(boundaries), source=source)


def make_folder(tmp_path: Path, masked: bool, tp: int = 1) -> Path:
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES)) if masked else LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source", masked)
    source = open_source(str(tmp_path / "source"))
    plan, kept = mlp_plan(source.module, tp, source.description), source.module.state_dict()
    verdicts = tuple(replace(v, persistent=v.name in kept) for v in plan.verdicts)
    shard(source.weights(), replace(plan, verdicts=verdicts), tmp_path / "model")
    return tmp_path / "model"


def settings(tmp_path: Path, objective: str, **data) -> Config:
    return make_config({
        "training": {
            "steps": 12, "micro_batch_size": 4, "seq_len": 32, "lr": 0.01, "precision": "fp32", "schedule": "constant",
        },
        "data": {"path": str(make_text(tmp_path / "text.txt")), "objective": objective, **data},
        "logging": {"every": 1, "tensorboard": False},
    })  # fmt: skip


def first_batch(folder: Path, config: Config):
    tokenizer = open_tokenizer(config.data, folder)
    tokens = open_tokens(tokenize(config.data, tokenizer, folder / "data"))
    batches = Batches((make_sequences(config, tokens, tokenizer),), 0, 4, 1, 0, 1)
    return next(batches.steps(Position()))[0][0]


def test_a_llama_is_trained_with_the_loss_of_transformers(tmp_path: Path):
    folder, config = make_folder(tmp_path, masked=False), settings(tmp_path, "causal")
    losses = train(folder, config, make_mesh(1), output=tmp_path / "run")
    batch = first_batch(folder, config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    whole = torch.cat([batch.ids[:, :1], batch.labels], 1)  # transformers moves the labels by one itself
    with torch.no_grad():
        expected = model(input_ids=whole, labels=whole).loss.item()
    assert math.isclose(losses[0], expected, rel_tol=1e-6)
    assert losses[-1] < 0.8 * losses[0]


def test_a_bert_is_trained_with_the_loss_of_transformers_in_evaluation_mode(tmp_path: Path):
    folder, config = make_folder(tmp_path, masked=True), settings(tmp_path, "masked")
    batch = first_batch(folder, config)
    assert (batch.ids[:, 0] == 1).all() and (batch.ids[:, -1] == 2).all() and (batch.ids == 3).any()
    losses = train(folder, config, make_mesh(1), output=tmp_path / "run")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "source").eval()
    with torch.no_grad():
        expected = model(input_ids=batch.ids, attention_mask=batch.attention, labels=batch.labels).loss.item()
    assert math.isclose(losses[0], expected, rel_tol=0.02)  # dropout
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("pack", [True, False])
def test_padding_is_hidden_from_attention_and_from_the_loss(tmp_path: Path, pack: bool):
    folder = make_folder(tmp_path, masked=False)
    config = settings(tmp_path, "causal", pack=pack, documents="line", boundaries="none")
    batch = first_batch(folder, config)
    assert bool((batch.attention == 0).any()) != pack
    losses = train(folder, config, make_mesh(1), output=tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    with torch.no_grad():
        logits = model(input_ids=batch.ids, attention_mask=batch.attention).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()
    assert math.isclose(losses[0], expected, rel_tol=1e-6)


def test_the_trained_model_loads_with_transformers_and_has_learned(tmp_path: Path):
    folder, config = make_folder(tmp_path, masked=False), settings(tmp_path, "causal")
    losses = train(folder, config, make_mesh(1), output=tmp_path / "run")
    merge(tmp_path / "run" / "step-12", tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    batch = first_batch(folder, config)
    with torch.no_grad():
        logits = model(input_ids=batch.ids).logits
    learned = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()
    assert learned < 0.85 * losses[0]


def test_the_limits_of_the_model_are_read_from_its_configuration(tmp_path: Path):
    folder, config = make_folder(tmp_path, masked=False), settings(tmp_path, "causal", tokenizer="bytes")
    with pytest.raises(ConfigError, match="The tokens go up to 256, but the model has 64 words"):
        train(folder, config, make_mesh(1), output=tmp_path / "run")


def test_a_loop_of_ones_own_trains_and_saves_by_five_changed_lines(tmp_path: Path):
    root = Path(__file__).parents[2]
    script = root / "examples" / "own_loop.py"
    assert [f"# {i}:" in script.read_text() for i in range(1, 7)] == [True] * 5 + [False]
    folder, out = make_folder(tmp_path, masked=False, tp=2), tmp_path / "trained-tp2"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--local-ranks-filter", "0", str(script), str(folder), str(make_text(tmp_path / "text.txt")), str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)},
        text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    losses = [float(line.split()[3]) for line in lines]
    assert len(losses) == 20 and losses[-1] < 0.99 * losses[0]
    merge(out, tmp_path / "trained")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "source").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in before if name.endswith("_proj.weight"))
