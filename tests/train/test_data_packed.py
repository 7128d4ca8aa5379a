"""Packed documents are as good as documents by themselves, or the run says that they are not."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tests.train.test_huggingface import SIZES, save_tokenizer
from tests.train.tiny import make_folder, make_text
from tpconvert.checkpoint import shard
from tpconvert.errors import ConfigError
from tpconvert.parallel import make_mesh
from tpconvert.planning import make_plan
from tpconvert.source import open_source
from tpconvert.train.data.packed import Trial, is_padding_left_out
from tpconvert.train.data.run import IGNORE, Position, open_data
from tpconvert.train.loop import train
from tpconvert.train.settings.config import Config, make_config

FEW = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "few": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | FEW)),
    "window": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=40)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
}


def sharded(tmp_path: Path, name: str, tp: int = 1) -> Path:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source", name == "bert")
    source = open_source(str(tmp_path / "source"))
    plan = make_plan(source.module, source.inputs, tp=tp, source=source.description)
    shard(source.weights(), plan, tmp_path / "model")
    return tmp_path / "model"


def settings(tmp_path: Path, objective: str = "causal", **data) -> Config:
    return make_config({
        "training": {"steps": 1, "micro_batch_size": 4, "seq_len": 32, "precision": "fp32"},
        "data": {"path": str(make_text(tmp_path / "text.txt")), "objective": objective, "documents": "line", **data},
        "logging": {"every": 1, "tensorboard": False},
    })  # fmt: skip


def first_batch(folder: Path, config: Config, mesh):
    from tpconvert.checkpoint import read_plan

    data = open_data(folder, folder, read_plan(folder), config, mesh, True)
    return next(data.train.steps(Position()))[0][0]


def loss_of_each_alone(model: torch.nn.Module, batch) -> float:
    """The mean loss over all documents, each run by itself."""
    total, count = 0.0, 0
    for row in range(len(batch.ids)):
        for number in batch.documents[row].unique():
            inside = batch.documents[row] == number
            ids, labels = batch.ids[row][inside], batch.labels[row][inside]
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0]
            total += F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum").item()
            count += int((labels != IGNORE).sum())
    return total / count


def run(mesh, folder: Path, config: Config, output: Path) -> list[float]:
    return train(folder, config, mesh, output=output)


@pytest.mark.parametrize(
    ("name", "tp", "sliced"),
    [
        *(("llama", 2, False), ("llama", 2, True), ("window", 1, False), ("gpt2", 2, False)),
        *(("few", 3, False), ("few", 4, False)),
    ],
)
def test_the_loss_of_packed_documents_is_that_of_each_alone(
    run_ranks, tmp_path: Path, name: str, tp: int, sliced: bool
):
    folder, config = sharded(tmp_path, name, tp), settings(tmp_path, boundaries="attention")
    config = make_config(config.model_dump(mode="json") | {"parallelism": {"sequence_parallel": sliced}})
    batch = first_batch(folder, config, make_mesh(1))
    assert (batch.documents[:, -1] > 0).any()
    model = MODELS[name]().from_pretrained(tmp_path / "source").eval()
    expected = loss_of_each_alone(model, batch)
    ours = run_ranks(evaluated, tp, folder, config, tmp_path / "run")
    assert all(abs(loss - expected) < 1e-5 * expected for loss in ours)


def evaluated(mesh, folder: Path, config: Config, output: Path) -> float:
    """The loss of the first batch in evaluation mode, by the trainer's own model."""
    from tpconvert.checkpoint import read_plan
    from tpconvert.train.loop import open_model
    from tpconvert.train.saving.state import Progress, Run

    batch = first_batch(folder, config, mesh)
    model = open_model(Run(folder, output, read_plan(folder), config, mesh), folder, Progress(), False, True)
    model.module.eval()
    with torch.no_grad():
        return model.loss(batch).item() / batch.predicted


def test_masked_documents_that_are_packed_have_the_loss_of_each_alone(run_ranks, tmp_path: Path):
    folder, config = sharded(tmp_path, "bert", 2), settings(tmp_path, "masked", boundaries="attention")
    batch = first_batch(folder, config, make_mesh(1))
    assert (batch.documents[:, -1] > 1).all() and (batch.attention == 0).any()
    expected = loss_of_each_alone(BertForMaskedLM.from_pretrained(tmp_path / "source").eval(), batch)
    ours = run_ranks(evaluated, 2, folder, config, tmp_path / "run")
    assert all(abs(loss - expected) < 1e-5 * expected for loss in ours)


def test_a_model_that_cannot_keep_documents_apart_says_so(tmp_path: Path, capsys):
    folder = make_folder(tmp_path / "model", 1)
    config = settings(tmp_path, tokenizer="bytes")
    train(folder, config, make_mesh(1), output=tmp_path / "run")
    assert "packed documents: attention goes across their ends; no label does" in capsys.readouterr().out
    stricter = settings(tmp_path, tokenizer="bytes", boundaries="attention")
    with pytest.raises(ConfigError, match=r"it cannot be shown that this model keeps packed documents apart .*labels"):
        train(folder, stricter, make_mesh(1), output=tmp_path / "other")


def test_one_document_is_trained_without_asking_the_model_anything(tmp_path: Path, capsys):
    folder, config = make_folder(tmp_path / "model", 1), settings(tmp_path, tokenizer="bytes", documents="file")
    train(folder, config, make_mesh(1), output=tmp_path / "run")
    assert "packed documents" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("forward", "left_out"),
    [
        (lambda batch: batch.ids.float().cumsum(1)[..., None], True),
        (lambda batch: (batch.ids.float() * batch.attention).mean(1, keepdim=True) * batch.attention, False),
        (lambda batch: (batch.ids.float() * batch.attention).sum(1, keepdim=True), True),
        (lambda batch: batch.ids.float().mean(1, keepdim=True), False),
        (lambda batch: batch.ids[:, batch.attention.shape[1] :].reshape(-1, 7), False),
    ],
    ids=["causal", "mean over padding", "masked", "not masked", "raises"],
)
def test_padding_is_left_out_or_not(forward, left_out: bool):
    trial = Trial(torch.arange(1, 90), 16, torch.float32, 1e-3)
    assert is_padding_left_out(torch.nn.Linear(1, 1), forward, trial, make_mesh(1)) == left_out


def padded(mesh, folder: Path, config, output: Path) -> list[float] | str:
    try:
        return train(folder, config, mesh, output=output)
    except ConfigError as error:
        return error.message


def test_slices_of_padded_sequences_are_trained_if_padding_is_shown_to_be_left_out(run_ranks, tmp_path: Path):
    from tests.train.test_loop import changed, settings, worst

    config = changed(settings(tmp_path, steps=3, micro_batch_size=4), data={"pack": False, "documents": "line"})
    folder = make_folder(tmp_path / "model", 2, by_hand=False)
    plain = run_ranks(padded, 2, folder, config, tmp_path / "plain")[0]
    sliced = run_ranks(padded, 2, folder, changed(config, parallelism={"sequence_parallel": True}), tmp_path / "sliced")
    assert worst(sliced[0], plain) < 1e-11
