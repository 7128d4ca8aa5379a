"""More ranks than key heads: with a mask Llama repeats its key heads, which the plan is made without, and trains so."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.train.test_huggingface import SIZES, save_tokenizer
from tests.train.test_loop import worst
from tests.train.tiny import make_text
from tpconvert.checkpoint import read_plan, shard
from tpconvert.errors import ConfigError
from tpconvert.planning import make_plan
from tpconvert.source import open_source
from tpconvert.spec.plan import Plan
from tpconvert.train.loop import open_model, train
from tpconvert.train.model.open import told_of_packing
from tpconvert.train.saving.state import Progress, Run
from tpconvert.train.settings.config import Config, make_config

FEW = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}


def sharded(tmp_path: Path, *degrees: int, change: Any = None) -> list[Path]:
    """A folder for each degree, of one model of two key heads."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**FEW)).save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source", False)
    source = open_source(str(tmp_path / "source"))
    for tp in degrees:
        plan = make_plan(source.module, source.inputs, tp=tp, source=source.description)
        shard(source.weights(), plan if change is None else change(plan), tmp_path / f"tp{tp}")
    return [tmp_path / f"tp{tp}" for tp in degrees]


def settings(tmp_path: Path, **data: Any) -> Config:
    return make_config({
        "training": {"steps": 3, "micro_batch_size": 2, "seq_len": 32, "precision": "fp64", "lr": 0.01},
        "data": {"path": str(make_text(tmp_path / "a.txt", 900)), "documents": "line", **data},
        "logging": {"every": 1, "tensorboard": False, "jsonl": False},
    })  # fmt: skip


def trained(mesh, folder: Path, config: Config, output: Path) -> list[float] | str:
    try:
        return train(folder, config, mesh, output=output)
    except ConfigError as error:
        return f"{error.message} {error.hint}"


def called(mesh, folder: Path, config: Config, output: Path) -> tuple[str | None, str]:
    """The mask that the model is called with, and what is said of packing."""
    run = Run(folder, output, read_plan(folder), config, mesh)
    model = open_model(run, folder, Progress(), False, config.data.pack)
    return model.call.mask, told_of_packing(model)


def same_curves(run_ranks, tmp_path: Path, config: Config, *degrees: int) -> None:
    one, *more = sharded(tmp_path, 1, *degrees)
    (whole,) = run_ranks(trained, 1, one, config, tmp_path / "one")
    for tp, folder in zip(degrees, more, strict=True):
        for ours in run_ranks(trained, tp, folder, config, tmp_path / f"run{tp}"):
            assert worst(ours, whole) < 1e-11


def test_packed_documents_are_kept_apart(run_ranks, tmp_path: Path):
    config = settings(tmp_path, boundaries="auto")
    same_curves(run_ranks, tmp_path, config, 3, 4)
    for _, told in run_ranks(called, 4, tmp_path / "tp4", config, tmp_path / "run"):
        assert told == "packed documents: none sees another (by position_ids, tried out on this model)"


def test_padded_sequences_have_their_mask(run_ranks, tmp_path: Path):
    config = settings(tmp_path, pack=False)
    same_curves(run_ranks, tmp_path, config, 3, 4)
    assert {mask for mask, _ in run_ranks(called, 4, tmp_path / "tp4", config, tmp_path / "run")} == {"attention_mask"}


def examples() -> list[dict[str, torch.Tensor]]:
    """Sequences of which the first third at most is padding."""
    draw = torch.Generator().manual_seed(0)
    out = []
    for i in range(16):
        ids = torch.randint(5, 18, (24,), generator=draw)
        mask = (torch.arange(24) >= i % 9).long()
        labels = torch.where(mask.bool(), ids, -100).roll(-1).index_fill(0, torch.tensor(23), -100)
        out.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return out


def test_padding_at_the_left_is_as_good(run_ranks, tmp_path: Path):
    config = settings(tmp_path, path=[], dataset=f"{__file__}:examples")
    same_curves(run_ranks, tmp_path, config, 3, 4)


def without_edits(plan: Plan) -> Plan:
    """A plan of a time when none was held to calls with a mask."""
    from dataclasses import replace

    assert all(edit.attribute == "num_key_value_groups" for edit in plan.edits) and plan.edits
    return replace(plan, edits=())


def test_a_plan_made_without_masks_is_refused_in_words(run_ranks, tmp_path: Path):
    (folder,) = sharded(tmp_path, 4, change=without_edits)
    for said in run_ranks(trained, 4, folder, settings(tmp_path, pack=False), tmp_path / "padded"):
        assert "this model cannot be run with attention_mask at tp=4: its plan was made without. Shard it again" in said
    for said in run_ranks(trained, 4, folder, settings(tmp_path, boundaries="attention"), tmp_path / "packed"):
        assert "it cannot be shown that this model keeps packed documents apart" in said
