"""The training configuration: one YAML file in five sections, checked before anything else happens.

Eight lines train::

    training:
      steps: 200
      micro_batch_size: 4
      seq_len: 256
      lr: 3.0e-4
    data:
      path: corpus.txt
      objective: causal
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from tpconvert.errors import ConfigError
from tpconvert.train.settings.data import Data
from tpconvert.train.settings.foreign import meant
from tpconvert.train.settings.read import Loader, read_yaml
from tpconvert.train.settings.section import Section

START = "Say where the text is, as in data: {path: corpus.txt}."
"""The least that a configuration has."""
Share = Annotated[float, Field(ge=0, lt=1)]


class Parallelism(Section):
    """How the ranks share the work; the tp degree is the folder's own, dp is what remains of the world."""

    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each dp rank holds everything. fsdp: weights, gradients and optimizer state are shared out over dp."""
    reshard_after_forward: bool = True
    """For fsdp: give the other ranks' weights back after each layer's forward, and fetch them again for backward."""
    cpu_offload: bool = False
    """For fsdp: weights, gradients and optimizer state lie in the machine's memory, and the update is made there."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What backward runs again: selective all but matmuls and attention; full each layer's whole forward."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    cuda_graphs: bool = False
    """Record forward and backward of a micro-batch as a CUDA graph, which costs one launch; for small models."""
    collectives: Literal["auto", "copies", "nccl"] = "auto"
    """Of tp ranks: copies between two GPUs of one machine, or nccl. auto copies what is very large; copies all."""
    sequence_parallel: bool = False
    """Between cut regions each tp rank has a slice of the sequence; seq_len must be a multiple of tp, or
    micro_batch_size where the plan shares whole sequences (slices.sequences)."""
    bucket_mb: float = Field(25.0, gt=0)
    """For ddp: gradients are summed over dp in buckets of this size."""
    pp: int = Field(1, ge=1)
    """Pipeline stages. There is one: the trainer knows tp and dp."""

    @model_validator(mode="after")
    def _check(self) -> Parallelism:
        if self.pp > 1:
            raise ValueError(f"pp is {self.pp}, but the trainer has no pipeline stages; use more tp, or fsdp over dp")
        if self.cpu_offload and self.data_parallel != "fsdp":
            raise ValueError("cpu_offload needs data_parallel: fsdp")
        if self.cuda_graphs and self.data_parallel != "ddp":
            raise ValueError("cuda_graphs needs data_parallel: ddp; fsdp moves weights about within a step")
        return self


class Training(Section):
    """Batch, length, precision, optimizer and schedule."""

    steps: int = Field(1000, ge=1)
    epochs: float | None = Field(None, gt=0)
    """Instead of steps: how often to go through all of the data."""
    micro_batch_size: int = Field(1, ge=1)
    """Sequences that one rank runs at once."""
    global_batch_size: int | None = Field(None, ge=1)
    """Sequences of one optimizer step: micro_batch_size x dp x accumulation. Default: no accumulation."""
    seq_len: int = Field(512, ge=2)
    precision: Literal["bf16", "fp16", "fp32", "fp64", "fp8"] = "bf16"
    """bf16, fp16: autocast over fp32 parameters. fp8: bf16 with the products of linear layers in fp8, by torchao.
    fp64 is for proofs."""
    loss_scale: float = Field(65536.0, gt=0)
    """For fp16: what the loss is multiplied by at first. Halved by a step that overflows, which is skipped."""
    loss_scale_window: int = Field(2000, ge=1)
    """For fp16: good steps after which the scale is doubled."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(3e-4, gt=0)
    min_lr: float = Field(0.0, ge=0)
    """Where cosine and linear end."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    """For matrices; never for norms and biases."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    """For sgd."""
    clip: float | None = Field(1.0, gt=0)
    """Largest gradient norm; null for no clipping."""
    seed: int = Field(0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _check(self) -> Training:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("steps and epochs are both set; leave one out")
        if self.epochs is None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is more than lr {self.lr}")
        return self


class Checkpoint(Section):
    """When to save and where to go on from."""

    every: int | None = Field(None, ge=1)
    """Save each N steps; the last step is always saved."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay."""
    keep_best: bool = False
    """The best step by the held-out set is saved when it is found and stays besides; OUTPUT/best is a link to it."""
    best_metric: Literal["eval_loss", "eval_accuracy"] = "eval_loss"
    """What the best step is the best by."""
    greater_is_better: bool | None = None
    """Default: for eval_accuracy yes, for eval_loss no."""
    resume: str = "none"
    """``auto`` (the newest complete step of the output folder), ``none``, or the path of a step folder."""
    asynchronous: bool = True
    """Training goes on while a step is being written, out of a copy in the machine's memory."""

    @property
    def greater(self) -> bool:
        """Whether more of the metric is better."""
        return self.best_metric != "eval_loss" if self.greater_is_better is None else self.greater_is_better


class Logging(Section):
    """What is shown, and how often."""

    every: int = Field(10, ge=1)
    jsonl: bool = True
    tensorboard: bool = True
    split_every: int | None = Field(100, ge=1)
    """Profile each Nth step in short, for the share of communication in the lines that follow; null for never."""
    peak_tflops: float | None = Field(None, gt=0)
    """What one GPU could, for MFU. Default: what its name says for dense products in 16 bits."""


class Profile(Section):
    """Steps to profile in full, once a run: a trace for Perfetto and a table of where time goes, in OUTPUT/profile."""

    start: int | None = Field(None, ge=1)
    """The first of them; by default none is."""
    steps: int = Field(3, ge=1)


class Config(Section):
    """Everything a run depends on besides the sharded folder."""

    parallelism: Parallelism = Parallelism()
    training: Training = Training()
    data: Data
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    profile: Profile = Profile()

    @model_validator(mode="after")
    def _check(self) -> Config:
        packed = self.data.pack and self.data.objective in ("causal", "masked")
        if self.parallelism.cuda_graphs and self.data.pad_to == "longest" and not packed:
            raise ValueError("parallelism.cuda_graphs needs sequences of one length; use data.pad_to: seq_len")
        if self.checkpoint.keep_best and self.data.eval is None:
            raise ValueError("checkpoint.keep_best needs a held-out set; set data.eval")
        classes = self.data.objective in ("classification", "tagging") and not (self.data.dataset or self.data.loss)
        if self.checkpoint.keep_best and self.checkpoint.best_metric == "eval_accuracy" and not classes:
            raise ValueError(
                "checkpoint.best_metric eval_accuracy is for objective classification or tagging without data.loss; "
                "use eval_loss"
            )
        return self

    def to_yaml(self) -> str:
        """The whole configuration with every default written out."""
        data = self.model_dump(mode="json")
        if self.training.epochs is not None:
            del data["training"]["steps"]  # which nobody knows before the data is read
        return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)

    def with_steps(self, steps: int) -> Config:
        """The configuration with so many steps in place of epochs."""
        data = self.model_dump(mode="json")
        data["training"] |= {"steps": steps, "epochs": None}
        return make_config(data, where="training.epochs")


def schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a YAML file with ``section.key=value`` overrides applied."""
    data = apply_overrides(read_yaml(path), overrides)
    if not data:
        raise ConfigError(f"{path}: is empty.", hint=START)
    return make_config(data, where=f"{path} and the command line" if overrides else str(path))


def make_config(data: Mapping[str, Any], *, where: str = "config") -> Config:
    """A checked configuration of plain data; ``where`` names its origin in errors."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        text = "; ".join(_explain(error))
        raise ConfigError(f"{where}: {text}{'' if text.endswith('?') else '.'}") from None


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``data`` in which each ``section.key=value`` holds; values are YAML."""
    out: dict[str, Any] = dict(data)
    for item in overrides:
        name, equals, text = item.partition("=")
        *sections, key = name.split(".")
        if not equals or not sections:
            raise ConfigError(f"{item}: an override is written section.key=value.{_full_name(name, equals)}")
        try:
            value = yaml.load(text, Loader)
        except yaml.YAMLError:
            value = text
        inner = out
        for depth, section in enumerate(sections, 1):
            held = inner.get(section) or {}
            if not isinstance(held, dict):
                where = ".".join(sections[:depth])
                raise ConfigError(f"{item}: {where} is not a section in the configuration file.")
            inner[section] = inner = dict(held)
        inner[key] = value
    return out


def accumulation(training: Training, dp: int) -> int:
    """Micro-batches that one rank runs for one optimizer step.

    >>> accumulation(Training(micro_batch_size=2, global_batch_size=16), dp=4)
    2
    """
    micro = training.micro_batch_size * dp
    total = micro if training.global_batch_size is None else training.global_batch_size
    if total % micro:
        down, up = total // micro * micro, (total // micro + 1) * micro
        raise ConfigError(
            f"training.global_batch_size {total} is not a multiple of micro_batch_size {training.micro_batch_size} "
            f"x dp {dp} = {micro}.",
            hint=f"Use {f'{down} or ' if down else ''}{up}.",
        )
    return total // micro


def _keys(of: type[Section] | None = None, before: str = "") -> Iterator[tuple[str, str]]:
    """``("training.lr", "lr")`` for every key, those of sections within sections included."""
    for name, info in (of or Config).model_fields.items():
        if of is not None:
            yield f"{before}{name}", name
        for section in _sections(info.annotation):
            yield from _keys(section, f"{before}{name}.")


def _sections(kind: Any) -> Iterator[type[Section]]:
    """The sections in an annotation."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for part in get_args(kind):
        yield from _sections(part)


def _explain(error: ValidationError) -> Iterator[str]:
    """One sentence for each thing that is wrong."""
    for item in error.errors():
        path = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            other = meant(path.rpartition(".")[2])
            yield f"{path} is not a key.{f' {other}' if other else _near(path, _candidates(path))}".removesuffix(".")
        elif item["type"] == "missing":
            yield f"{path} is missing{f'. {START}' if path == 'data' else ''}".removesuffix(".")
        elif item["type"] == "value_error":
            yield f"{path}: {item['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        elif item["type"] == "model_type":
            yield f"{path} is {_spelled(item['input'])}, but it should be a section of keys"
        else:
            text = item["msg"].removeprefix("Input ").replace("valid tuple", "list")
            yield f"{path} is {_spelled(item['input'])}, but it {text}" if text != item["msg"] else f"{path}: {text}"


def _spelled(value: Any) -> str:
    """A value as YAML has it, but for texts, which have quotes to tell them from numbers."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


_LONG = 100
"""Letters of a value that are told."""
_NEAR = 0.6
"""How much of a word has to be right."""


def _full_name(name: str, equals: str) -> str:
    """What else to say of an override that has no section, or no value."""
    keys = list(_keys())
    if any(name == path for path, _ in keys) and not equals:
        return f" Write {name}=VALUE."
    if name in Config.model_fields:
        return f" {name} is a section, as in {next(path for path, _ in keys if path.startswith(name))}=..."
    return f" {other}" if (other := meant(name)) else _near(name, [path for path, _ in keys])


def _candidates(path: str) -> list[str]:
    """Keys that ``path`` may have meant: of its own section, else the same word elsewhere."""
    path = ".".join(part for part in path.split(".") if not part.isdigit())
    section, _, key = path.rpartition(".")
    full = [p for p, _ in _keys()]
    if any(p.startswith(f"{section}.") for p in full):
        own = [p for p in full if p.startswith(f"{section}.")]
        if difflib.get_close_matches(key, [p.removeprefix(f"{section}.") for p in own], n=1, cutoff=_NEAR):
            return own
    elsewhere = [p for p, k in _keys() if k == (key or path)]
    return elsewhere or ([*Config.model_fields] if not section else full)


def _near(path: str, candidates: Sequence[str]) -> str:
    """`` Did you mean X?`` for the candidate nearest to ``path``, or nothing."""
    last = path.rpartition(".")[2]
    short = {c.rpartition(".")[2]: c for c in candidates}
    found = difflib.get_close_matches(last, list(short), n=1, cutoff=_NEAR)
    return f" Did you mean {short[found[0]]}?" if found else ""


if __name__ == "__main__":  # python -m tpconvert.train.settings.config docs/schemas/train-config.schema.json
    Path(sys.argv[1]).write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
