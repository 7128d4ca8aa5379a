"""The ``data`` section: where the examples are, what is learned from them, and what is held out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tpconvert.train.settings.section import Section, one_or_many

Format = Literal["auto", "text", "jsonl", "parquet"]


class Source(Section):
    """One set of examples: local files, or a data set of the hub."""

    path: tuple[str, ...] = Field((), json_schema_extra=one_or_many)
    """Files, folders or globs, relative to the current folder."""
    hub: str | None = None
    """A data set of the Hugging Face hub, or a local folder that is laid out as one; read by ``datasets``."""
    subset: str | None = None
    """The configuration of a hub data set that has several."""
    split: str = "train"
    """Of a hub data set."""
    revision: str | None = None
    """Of a hub data set: a branch, a tag or a commit."""
    format: Format | None = None
    """Default: ``data.format``."""
    field: str | None = None
    """Default: ``data.field``."""
    weight: float = Field(1.0, gt=0)
    """The share of the sequences of each step, relative to the other sources'."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _either(self) -> Source:
        if bool(self.path) == bool(self.hub):
            raise ValueError("a source has either a path or a hub")
        return self


class Evaluation(Section):
    """What is held out, and how often the model is judged by it."""

    path: tuple[str, ...] = Field((), json_schema_extra=one_or_many)
    """Files, folders or globs of their own; or else"""
    hub: str | None = None
    """a data set of the hub, or else"""
    subset: str | None = None
    split: str = "validation"
    revision: str | None = None
    dataset: str | None = None
    """``file.py:function`` that returns numbered examples of one's own, or else"""
    fraction: float | None = Field(None, gt=0, lt=1)
    """this part of each source: the last packed sequences, or single examples chosen by the seed."""
    every: int = Field(100, ge=1)
    """Evaluate each N steps, and after the last."""
    batches: int | None = Field(None, ge=1)
    """At most so many micro-batches of each dp rank; default: all."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one(self) -> Evaluation:
        given = [name for name in ("path", "hub", "dataset", "fraction") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"one of path, hub, dataset and fraction is needed, {' and '.join(given) or 'none'} given")
        return self


class Data(Section):
    """Where the text is and what is learned from it."""

    path: tuple[str, ...] = Field((), json_schema_extra=one_or_many)
    """Files, folders or globs, relative to the current folder; or else ``hub``, ``sources`` or ``dataset``."""
    hub: str | None = None
    """A data set of the Hugging Face hub, or a local folder that is laid out as one."""
    subset: str | None = None
    """The configuration of a hub data set that has several."""
    split: str = "train"
    """Of a hub data set."""
    revision: str | None = None
    """Of a hub data set: a branch, a tag or a commit."""
    sources: tuple[Source, ...] = ()
    """Several sources, blended by their weights."""
    objective: Literal["causal", "masked", "seq2seq", "classification", "tagging"] = "causal"
    format: Format = "auto"
    """auto: by the file's ending."""
    documents: Literal["file", "line"] = "file"
    """What one document of a plain text file is. Each line of JSONL and each row of Parquet is one."""
    field: str | None = None
    """The key of the text: ``text``, or for tagging ``tokens``, a list of words. Dots go into nested keys."""
    target: str | None = None
    """The key of what is predicted: ``target`` (seq2seq), ``label`` (classification), ``tags`` (tagging). Causal: none;
    where it is set, it goes on from the text, which is then read only."""
    pair: str | None = None
    """For classification: the key of a second text, that the first is to be judged together with."""
    labels: tuple[str, ...] = ()
    """Names of the classes or tags, in the order of their numbers. Default: those in the model's configuration."""
    prefix: str = ""
    """Put before each text that has a target, as T5 likes it: ``"summarize: "``."""
    target_len: int | None = Field(None, ge=1)
    """Longest target of seq2seq. Default: training.seq_len."""
    tokenizer: str | None = None
    """A folder or hub name, or ``bytes``. Default: the tokenizer of the sharded folder."""
    pack: bool = True
    """Causal and masked: join documents and cut them into full sequences; otherwise one a sequence, padded or cut."""
    pad_to: Literal["seq_len", "longest"] = "seq_len"
    """How far sequences that are not packed are padded. longest: to the longest of the micro-batch, which saves work;
    seq_len: all to one length, which a compiled model likes."""
    boundaries: Literal["auto", "attention", "labels", "none"] = "auto"
    """Of packed documents. attention: no document sees another, and positions restart; labels: only no label is of the
    next document; auto: attention if the model can, else labels; none: text without ends."""
    mask_probability: float = Field(0.15, gt=0, lt=1)
    """For masked: how many tokens are asked for; of these 80 % masked, 10 % random, 10 % as they are."""
    whole_words: bool = False
    """For masked: hide all pieces of a word or none."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """What a line or row that cannot be used does: end the run, or be counted and left out."""
    dataset: str | None = None
    """``file.py:function`` that returns examples of one's own."""
    loss: str | None = None
    """``file.py:function`` that is given the model and a batch, and returns the mean loss of the batch."""
    workers: int = Field(0, ge=0)
    """Processes that prepare batches ahead; 0: none, for which tokenized text seldom needs one."""
    cache: str | None = None
    """Folder of the tokenized text. Default: OUTPUT/data."""
    eval: Evaluation | None = None
    """A held-out set."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Data:
        given = [name for name in ("path", "hub", "sources", "dataset") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"one of path, hub, sources and dataset is needed, {' and '.join(given) or 'none'} given")
        if twice := [label for label in self.labels if self.labels.count(label) > 1]:
            raise ValueError(f"labels has {twice[0]!r} twice")
        if self.pair is not None and self.objective != "classification":
            raise ValueError(f"pair is for objective classification, not {self.objective}; seq2seq has target")
        return self
