"""The example configurations, each run for two steps on a tiny model with the head that it is for."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.train.test_huggingface import SIZES, save_tokenizer
from tpconvert.checkpoint import shard
from tpconvert.errors import ConfigError
from tpconvert.parallel import make_mesh
from tpconvert.planning import make_plan
from tpconvert.source import open_source
from tpconvert.train.loop import train
from tpconvert.train.settings.config import load_config, make_config

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDTH = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
MODELS = {
    "gpt": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=40)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "bert-mlm": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(**WIDTH, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0)
    ),
    "classifier": lambda: BertForSequenceClassification(BertConfig(**SIZES, id2label={0: "bad", 1: "good"})),
    "tagger": lambda: BertForTokenClassification(BertConfig(**SIZES, id2label={0: "O", 1: "NAME"})),
}


def sums(number: int) -> str:
    return f"{number} times {number % 7} is {number * (number % 7)} ."


ITEMS = {
    "gpt": lambda i: {"text": sums(i)},
    "llama": lambda i: {"text": sums(i)},
    "bert-mlm": lambda i: {"text": sums(i)},
    "t5": lambda i: {"translation": {"en": f"{i} times 2", "fr": f"{2 * i} ."}},
    "classifier": lambda i: {"text": sums(i), "label": ["bad", "good"][i % 2]},
    "tagger": lambda i: {"tokens": sums(i).split(), "tags": ["NAME" if w == "is" else "O" for w in sums(i).split()]},
}


def sharded(tmp_path: Path, name: str, tp: int) -> Path:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source", name not in ("gpt", "llama", "t5"))
    source = open_source(str(tmp_path / "source"))
    shard(source.weights(), make_plan(source.module, source.inputs, tp=tp, source=source.description), tmp_path / "tp")
    return tmp_path / "tp"


def written(tmp_path: Path, name: str, count: int = 200) -> list[str]:
    """The overrides that put a small file in the place of the example's own data."""
    path = tmp_path / ("corpus.jsonl.gz" if name == "gpt" else "corpus.jsonl")
    with gzip.open(path, "wt") if name == "gpt" else path.open("w") as file:
        file.write("".join(json.dumps(ITEMS[name](i)) + "\n" for i in range(count)))
    other = ["data.hub=null", "data.subset=null"] if name == "t5" else []
    return [f"data.path={path}", *other]


def small(tmp_path: Path, name: str, *more: str):
    return load_config(
        EXAMPLES / f"train-{name}.yaml",
        [*written(tmp_path, name), "training.steps=2", "training.warmup_steps=0", "training.seq_len=32",
         "training.micro_batch_size=2", "training.global_batch_size=4", "training.precision=fp32",
         "logging.every=1", "logging.tensorboard=false", "checkpoint.resume=none", *more],
    )  # fmt: skip


def run(mesh, folder: Path, config, output: Path) -> list[float]:
    return train(folder, config, mesh, output=output)


@pytest.mark.parametrize("name", list(MODELS))
def test_each_example_trains_the_model_that_it_is_for(run_ranks, tmp_path: Path, name: str):
    folder, config = sharded(tmp_path, name, 2), small(tmp_path, name)
    losses = run_ranks(run, 2, folder, config, tmp_path / "run", timeout=250)
    assert losses[0] == losses[1] and len(losses[0]) == 2 and losses[0][0] > losses[0][1] - 0.2
    if config.data.eval is not None:
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        (held,) = [line["eval_loss"] for line in lines if "eval_loss" in line]
        assert abs(held - losses[0][1]) < 0.5
        right = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
        assert len(right) == (name in ("classifier", "tagger")) and all(0 <= share <= 1 for share in right)


@pytest.mark.parametrize("name", ["t5", "classifier", "tagger"])
def test_the_loss_is_that_of_transformers(run_ranks, tmp_path: Path, name: str):
    """One batch in evaluation mode, with the labels given to the model of transformers."""
    from tpconvert.checkpoint import read_plan
    from tpconvert.train.data.run import Position, open_data

    folder, config = sharded(tmp_path, name, 2), small(tmp_path, name)
    data = open_data(folder, tmp_path, read_plan(folder), config, make_mesh(1), True)
    batch = next(data.train.steps(Position()))[0][0]
    model = type(MODELS[name]()).from_pretrained(tmp_path / "source").eval()
    with torch.no_grad():
        expected = model(input_ids=batch.ids, attention_mask=batch.attention, labels=batch.labels).loss.item()
    for ours in run_ranks(evaluated, 2, folder, config, tmp_path / "run", timeout=250):
        assert abs(ours - expected) < 1e-5 * expected


def test_pairs_of_texts_are_what_transformers_makes_of_them(run_ranks, tmp_path: Path):
    """Ids, kinds and mask are those of its tokenizer; loss and share of right answers those of its model."""
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.eval().save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source", True, pair=True)
    source = open_source(str(tmp_path / "source"))
    shard(source.weights(), make_plan(source.module, source.inputs, tp=2, source=source.description), tmp_path / "tp")
    items = [{"text": sums(i), "other": f"{i} is" + " times" * (i % 30), "label": i % 3} for i in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    config = small(
        tmp_path, "classifier", "data.labels=[]", "data.pair=other", f"data.path={tmp_path / 'pairs.jsonl'}",
        "data.eval.fraction=null", f"data.eval.path={tmp_path / 'pairs.jsonl'}",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    texts = [[item[key] for item in items] for key in ("text", "other")]
    given = tokenizer(*texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
    assert given["token_type_ids"].any() and (given["attention_mask"].sum(1) == 32).any()
    labels = torch.tensor([item["label"] for item in items])
    with torch.no_grad():
        expected = model(**given, labels=labels)
    right = (expected.logits.argmax(-1) == labels).double().mean().item()
    for ours in run_ranks(judged, 2, tmp_path / "tp", config, tmp_path / "run", timeout=250):
        assert abs(ours["eval_loss"] - expected.loss.item()) < 1e-5 and abs(ours["eval_accuracy"] - right) < 1e-9


def judged(mesh, folder: Path, config, output: Path) -> dict[str, float] | None:
    from tpconvert.checkpoint import read_plan
    from tpconvert.train.data.run import open_data
    from tpconvert.train.loop import open_model
    from tpconvert.train.saving.state import Progress, Run
    from tpconvert.train.steps.evaluate import evaluate

    data = open_data(folder, output, read_plan(folder), config, mesh, mesh.rank == 0)
    model = open_model(Run(folder, output, read_plan(folder), config, mesh), folder, Progress(), False, data.packed)
    return evaluate(model, data, lambda: False)


def of_parts(mesh) -> tuple[list[int], list[int]]:
    from tpconvert.spec.layout import Block, Layout
    from tpconvert.train.model.open import likeliest

    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    blocks = (Block(3), Block(4))
    mine = [logits[..., a:z] for a, z in Layout(0, blocks).pieces(mesh.rank, mesh.degree)]
    found = likeliest(torch.cat(mine, -1), mesh, blocks)
    return found.flatten().tolist(), logits.argmax(-1).flatten().tolist()


def test_the_likeliest_class_is_found_where_each_rank_has_some(run_ranks):
    for ours, whole in run_ranks(of_parts, 3):
        assert ours == whole


def test_a_pair_of_what_has_no_pairs_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data: pair is for objective classification, not causal; seq2seq has"):
        make_config({"data": {"path": "x", "pair": "other"}})
    (tmp_path / "a.jsonl").write_text('{"text": "1", "label": 0}\n')
    folder = sharded(tmp_path, "classifier", 1)
    config = small(tmp_path, "classifier", "data.pair=other", f"data.path={tmp_path / 'a.jsonl'}")
    with pytest.raises(ConfigError, match=r"line 1: there is no text under the key 'other'; .*\. Set data\.pair, or"):
        train(folder, config, make_mesh(1), output=tmp_path / "run")


def evaluated(mesh, folder: Path, config, output: Path) -> float:
    from tpconvert.checkpoint import read_plan
    from tpconvert.train.data.run import Position, open_data
    from tpconvert.train.loop import open_model
    from tpconvert.train.saving.state import Progress, Run

    data = open_data(folder, output, read_plan(folder), config, mesh, mesh.rank == 0)
    batch = next(data.train.steps(Position()))[0][0]
    model = open_model(Run(folder, output, read_plan(folder), config, mesh), folder, Progress(), False, data.packed)
    model.module.eval()
    with torch.no_grad():
        return model.loss(batch).item() / batch.predicted


def test_a_head_that_does_not_fit_the_objective_is_told(tmp_path: Path):
    folder = sharded(tmp_path, "classifier", 1)
    config = small(tmp_path, "classifier").model_dump(mode="json")
    config["data"] |= {"objective": "causal", "labels": [], "eval": None}
    with pytest.raises(
        ConfigError, match=r"logits of shape \[2, 2\], but the labels have shape \[2, 32\]\. Does data\."
    ):
        train(folder, make_config(config), make_mesh(1), output=tmp_path / "run")


def test_more_labels_than_the_head_has_are_told_before_training(tmp_path: Path):
    folder = sharded(tmp_path, "classifier", 1)
    config = small(tmp_path, "classifier", "data.labels=[worse, bad, good]")
    with pytest.raises(ConfigError, match=r"The labels go up to 2, but the model has 2 classes"):
        train(folder, config, make_mesh(1), output=tmp_path / "run")


def test_an_own_model_trains_on_its_own_examples_by_its_own_loss(run_ranks, tmp_path: Path):
    source = open_source(f"{EXAMPLES / 'own_model.py'}:build")
    plan = make_plan(source.module, source.inputs, tp=2, source=source.description | {"name": source.name})
    shard(source.weights(), plan, tmp_path / "tp")
    own = f"{EXAMPLES / 'own_model.py'}"
    config = load_config(
        EXAMPLES / "train-own.yaml",
        [f"data.dataset={own}:examples", f"data.loss={own}:loss", "training.steps=8", "training.warmup_steps=0",
         "data.eval.every=8", "logging.every=1", "logging.tensorboard=false"],
    )  # fmt: skip
    every = run_ranks(run, 2, tmp_path / "tp", config, tmp_path / "run", dp=2)
    assert all(losses == every[0] for losses in every) and every[0][-1] < 0.95 * every[0][0]
