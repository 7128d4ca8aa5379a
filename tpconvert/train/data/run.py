"""The data of a run: opened by all ranks, tokenized by one of each machine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tpconvert.errors import ConfigError
from tpconvert.parallel import Mesh
from tpconvert.spec.plan import Plan
from tpconvert.train.data.batch import (
    IGNORE,
    Batch,
    OwnBatch,
    Shortened,
    check_shares,
    collate,
    count_labels,
    fingerprint,
    origins_of,
)
from tpconvert.train.data.order import Batches, Micro, Position, Stack
from tpconvert.train.data.own import Numbered, Stream, collate_own, is_numbered, open_dataset
from tpconvert.train.examples.fits import Limits, check_fits, cut_off, limits, read_config
from tpconvert.train.examples.objectives import Sequences, make_sequences, split
from tpconvert.train.examples.rows import label_names
from tpconvert.train.examples.sources import filled, sources_of
from tpconvert.train.examples.text import Tokens, open_tokens, tokenize
from tpconvert.train.examples.tokenizer import Tokenizer, open_tokenizer
from tpconvert.train.settings.config import Config, accumulation
from tpconvert.train.settings.data import Source
from tpconvert.train.together.ranks import together

__all__ = [
    "IGNORE", "Batch", "Batches", "Data", "Held", "Micro", "OwnBatch", "Position", "Stream", "check_fits",
    "check_shares", "collate", "count_labels", "fingerprint", "limits", "make_sequences", "open_data", "origins_of",
]  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Held:
    """What is held out, for this dp rank."""

    sources: tuple[Sequences, ...]
    micro: int
    dp_rank: int
    dp_degree: int
    stack: Stack = collate

    def batches(self, most: int | None = None) -> Sequence[tuple[Micro, bool]]:
        """``(micro-batch, whether it counts)``, as many on each dp rank: some have one again that does not count."""
        rows = [(source, i) for source in self.sources for i in range(len(source))]
        parts = [rows[i : i + self.micro] for i in range(0, len(rows), self.micro)]
        mine = parts[self.dp_rank :: self.dp_degree]
        rounds = -(-len(parts) // self.dp_degree)
        chosen = [(part, True) for part in mine] + [(parts[0], False)] * (rounds - len(mine))
        return _Made(chosen[:most], self.stack)

    def __len__(self) -> int:
        return sum(map(len, self.sources))


class _Made(Sequence[tuple[Micro, bool]]):
    """Batches that are made when they are asked for."""

    def __init__(self, parts, make) -> None:
        self._parts, self._make = parts, make

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index):
        rows, counts = self._parts[index]
        return self._make([source(i, 0) for source, i in rows]), counts


@dataclass(frozen=True, slots=True)
class Data:
    """All that a run learns from and is judged by."""

    train: Batches | Stream
    held: Held | None = None
    notes: tuple[str, ...] = ()
    """What is to be said before the first step."""
    packed: bool = False
    """Whether several documents share a sequence, and their ends are to be respected."""
    full: bool = True
    """Whether all sequences are seq_len long, so that each step computes as much as any."""
    classes: bool = False
    """Whether what is predicted is one of a few classes, so that it can be told how many are right."""
    every: int = 1
    """Steps between two evaluations."""
    most: int | None = None
    """Micro-batches of an evaluation."""

    def told(self) -> str:
        """How much there is."""
        train = f"{len(self.train):,} sequences" if isinstance(self.train, Batches) else "a stream of examples"
        return f"{train}, {len(self.held):,} held out" if self.held is not None else train

    def resolved(self, config: Config) -> Config:
        """The configuration with steps in place of epochs."""
        if config.training.epochs is None:
            return config
        if not isinstance(self.train, Batches):
            raise ConfigError("training.epochs needs a dataset with a length.", hint="Set training.steps.")
        return config.with_steps(self.train.steps_of(config.training.epochs))

    def judged_after(self, step: int, last: int) -> bool:
        """Whether the model is evaluated after a step."""
        return self.held is not None and (step % self.every == 0 or step == last)


def open_data(folder: Path, output: Path, plan: Plan, config: Config, mesh: Mesh, prepares: bool) -> Data:
    """The data of this rank; one whose ``prepares`` is set tokenizes first, the others find the tokens in the cache."""
    if config.data.dataset is not None:
        return together(mesh, lambda: _own(config, mesh))
    tokenizer = together(mesh, lambda: open_tokenizer(config.data, folder))
    held = read_config(folder)
    cache = Path(config.data.cache or output / "data")

    def prepared() -> list[tuple[Source, Tokens]]:
        names = label_names(config.data, held)
        return [
            (source, _under(key, lambda s=source: open_tokens(tokenize(config.data, tokenizer, cache, s, names))))
            for key, source in _every_source(config)
        ]

    first = together(mesh, prepared if prepares else lambda: None)
    found = together(mesh, lambda: first if first is not None else prepared())
    return together(mesh, lambda: _text(config, mesh, found, tokenizer, limits(held, plan)))


def _every_source(config: Config) -> list[tuple[str, Source]]:
    """The sources to train on, then the held-out set's own if it has one, each with the section that names it."""
    data, held = config.data, config.data.eval
    every = [(f"data.sources.{i}" if data.sources else "data", s) for i, s in enumerate(sources_of(data))]
    if held is None or not (held.path or held.hub):
        return every
    one = Source(path=held.path, hub=held.hub, subset=held.subset, split=held.split, revision=held.revision)
    return [*every, ("data.eval", filled(one, data))]


def _under(section: str, act: Callable[[], T]) -> T:
    """What ``act`` returns; its errors speak of this section."""
    try:
        return act()
    except ConfigError as error:
        said = re.sub(r"\bdata\.(path|hub)\b", rf"{section}.\1", error.message, count=1)
        raise ConfigError(said, hint=error.hint) from None


def _text(
    config: Config, mesh: Mesh, found: Sequence[tuple[Source, Tokens]], tokenizer: Tokenizer, has: Limits
) -> Data:
    training, data = config.training, config.data
    for _, tokens in found:
        check_fits(config, tokens, tokenizer, has)
    keys = [key for key, _ in _every_source(config)]
    sets: list[Sequences] = [
        _under(key, lambda t=tokens: make_sequences(config, t, tokenizer))
        for key, (_, tokens) in zip(keys, found, strict=True)
    ]
    count = len(sources_of(data))
    sources, held = sets[:count], sets[count:]
    packed = data.pack and data.objective in ("causal", "masked")
    if data.eval is not None and data.eval.fraction is not None:
        parts = [split(s, data.eval.fraction, packed=packed, seed=training.seed) for s in sources]
        sources, held = [p for p, _ in parts], [p for _, p in parts]
    weights = tuple(source.weight for source, _ in found[:count])
    notes = [
        f"{source.hub or ', '.join(source.path)}: {tokens.bad} bad lines left out; {'; '.join(tokens.named)}"
        for source, tokens in found
        if tokens.bad
    ]
    for _, tokens in found[:count]:
        notes += cut_off(config, tokens, tokenizer)
    stack: Stack = collate
    if data.pad_to == "longest" and not packed:
        stack = Shortened(math.lcm(8, mesh.degree), data.objective == "seq2seq")
    return Data(
        Batches(tuple(sources), *_share(config, mesh), weights, data.workers, stack),
        Held(tuple(held), training.micro_batch_size, mesh.dp_rank, mesh.dp_degree, stack) if held else None,
        tuple(notes),
        packed and data.boundaries != "none" and any(len(tokens.starts) > 2 for _, tokens in found),
        full=stack is collate,
        classes=data.objective in ("classification", "tagging"),
        **_how_often(config),
    )


def _how_often(config: Config) -> dict[str, int | None]:
    held = config.data.eval
    return {"every": held.every, "most": held.batches} if held is not None else {}


def _share(config: Config, mesh: Mesh) -> tuple[int, int, int, int, int]:
    """``(seed, micro-batch size, accumulation, dp rank, dp degree)``."""
    training = config.training
    micros = accumulation(training, mesh.dp_degree)
    return training.seed, training.micro_batch_size, micros, mesh.dp_rank, mesh.dp_degree


def _own(config: Config, mesh: Mesh) -> Data:
    """The data of the user's own datasets."""
    data = config.data
    assert data.dataset is not None
    dataset = open_dataset("data.dataset", data.dataset, config.training.seed)
    seed, micro, *rest = _share(config, mesh)
    held: Sequences | None = None
    if data.eval is not None and data.eval.dataset is not None:
        other = open_dataset("data.eval.dataset", data.eval.dataset, config.training.seed)
        if not is_numbered(other):
            raise ConfigError("data.eval.dataset: a dataset with __len__ and __getitem__ is needed.")
        held = Numbered(other)
    elif data.eval is not None and data.eval.fraction is None:
        raise ConfigError("data.eval: for a dataset of your own set data.eval.dataset or data.eval.fraction.")
    if not is_numbered(dataset):
        if data.eval is not None and held is None:
            raise ConfigError("data.eval.fraction needs a dataset with a length.", hint="Use data.eval.dataset.")
        train: Batches | Stream = Stream(dataset, micro, *rest, data.workers)
    else:
        examples: Sequences = Numbered(dataset)
        if data.eval is not None and data.eval.fraction is not None:
            examples, held = split(examples, data.eval.fraction, packed=False, seed=seed)
        train = Batches((examples,), seed, micro, *rest, (), data.workers, collate_own)
    kept = Held((held,), micro, mesh.dp_rank, mesh.dp_degree, collate_own) if held is not None else None
    return Data(train, kept, full=False, **_how_often(config))
