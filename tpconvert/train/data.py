"""Batches: which sequences, in which order, on which rank, and what is to be predicted in them.

The order is a function of seed and epoch, the masking one of seed, epoch and sequence. So a position is two
integers, and training goes on exactly from there, on any number of ranks::

    epoch 0   | step 0          | step 1          | ... the rest of a last, incomplete step is left out
              | dp 0   | dp 1   | dp 0   | dp 1   |
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tpconvert.errors import ConfigError
from tpconvert.train.config import Config
from tpconvert.train.text import Tokenizer, Tokens

IGNORE = -100
"""The label of a position that is not to be predicted."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next step begins: sequences of ``epoch`` used so far."""

    epoch: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch; each ``[B, T]``.  A label stands at the position whose output predicts it."""

    ids: Tensor
    labels: Tensor
    attention: Tensor
    """1 where there is a token, 0 where there is padding."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(*(t.to(device, non_blocking=True) for t in (self.ids, self.labels, self.attention)))


class Sequences(Protocol):
    """A numbered set of sequences: what :class:`Batches` draws from."""

    def __len__(self) -> int: ...

    def __call__(self, index: int, epoch: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
        """``(ids, labels, tokens that are not padding)`` of one sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Causal:
    """Sequences whose every token predicts the next one."""

    tokens: Tokens
    seq_len: int
    pack: bool
    pad: int

    def __len__(self) -> int:
        if self.pack:
            return max(0, (len(self.tokens.ids) - 1) // self.seq_len)
        return len(self.tokens.starts) - 1

    def __call__(self, index: int, epoch: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
        """Inputs, and the same moved by one as labels."""
        start = index * self.seq_len if self.pack else int(self.tokens.starts[index])
        end = len(self.tokens.ids) if self.pack else int(self.tokens.starts[index + 1])
        text = self.tokens.ids[start : min(start + self.seq_len + 1, end)].astype(np.int64)
        ids, labels = np.full(self.seq_len, self.pad), np.full(self.seq_len, IGNORE)
        used = min(len(text), self.seq_len)
        ids[:used], labels[: max(len(text) - 1, 0)] = text[:used], text[1:]
        return ids, labels, used


@dataclass(frozen=True, slots=True)
class Masked:
    """Sequences some tokens of which are hidden and asked for."""

    tokens: Tokens
    seq_len: int
    pack: bool
    tokenizer: Tokenizer
    probability: float
    seed: int

    @property
    def _room(self) -> int:
        return self.seq_len - (2 if self.tokenizer.wrap else 0)

    def __len__(self) -> int:
        return len(self.tokens.ids) // self._room if self.pack else len(self.tokens.starts) - 1

    def __call__(self, index: int, epoch: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
        """Inputs with masks, and the hidden tokens as labels."""
        start = index * self._room if self.pack else int(self.tokens.starts[index])
        end = len(self.tokens.ids) if self.pack else int(self.tokens.starts[index + 1])
        text = self.tokens.ids[start : min(start + self._room, end)].astype(np.int64)
        if self.tokenizer.wrap:
            text = np.concatenate([self.tokenizer.wrap[:1], text, self.tokenizer.wrap[1:]])
        ids, labels = np.full(self.seq_len, self.tokenizer.pad), np.full(self.seq_len, IGNORE)
        ids[: len(text)], labels[: len(text)] = self._hide(text, np.random.default_rng([self.seed, epoch, index]))
        return ids, labels, len(text)

    def _hide(self, text: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Any, Any]:
        """80 % of the chosen tokens become the mask, 10 % any token, 10 % stay."""
        ordinary = ~np.isin(text, list(self.tokenizer.special))
        chosen = ordinary & (random.random(len(text)) < self.probability)
        draw = random.random(len(text))
        anything = random.integers(0, self.tokenizer.size, len(text))
        ids = np.where(chosen & (draw < 0.8), self.tokenizer.mask, text)
        ids = np.where(chosen & (draw >= 0.9), anything, ids)
        return ids, np.where(chosen, text, IGNORE)


def make_sequences(config: Config, tokens: Tokens, tokenizer: Tokenizer) -> Sequences:
    """The sequences that the configuration asks for; too little text is an error with the numbers."""
    data, training = config.data, config.training
    if data.objective == "masked":
        if tokenizer.mask is None:
            raise ConfigError(
                "data.objective is masked, but the tokenizer has no mask token.", hint="Use data.objective: causal."
            )
        sequences: Sequences = Masked(
            tokens, training.seq_len, data.pack, tokenizer, data.mask_probability, training.seed
        )
    else:
        sequences = Causal(tokens, training.seq_len, data.pack, tokenizer.pad)
    if len(sequences) == 0:
        raise ConfigError(
            f"data.path: the text has {len(tokens.ids)} tokens, too few for one sequence of training.seq_len "
            f"{training.seq_len}.",
            hint="Use more text or a smaller seq_len.",
        )
    return sequences


def check_fits(config: Config, tokens: Tokens, tokenizer: Tokenizer, words: int | None, places: int | None) -> None:
    """Raise where the model has too few words or places for the text; None is a number that is not known."""
    largest = max(tokens.largest, tokenizer.size - 1 if config.data.objective == "masked" else 0)
    if words is not None and largest >= words:
        raise ConfigError(
            f"The tokens go up to {largest}, but the model has {words} words (0 to {words - 1}).",
            hint="Set data.tokenizer to the one the model was made with.",
        )
    if places is not None and config.training.seq_len > places:
        raise ConfigError(
            f"training.seq_len {config.training.seq_len} is more than the {places} positions of the model "
            "(max_position_embeddings in its config.json)."
        )


@dataclass(frozen=True, slots=True)
class Batches:
    """What each dp rank gets at each step."""

    sequences: Sequences
    seed: int
    micro: int
    accumulation: int
    dp_rank: int
    dp_degree: int

    def __post_init__(self) -> None:
        if len(self.sequences) < self.step_size:
            raise ConfigError(
                f"data.path: the text gives {len(self.sequences)} sequences, but one step needs {self.step_size} "
                f"(global_batch_size).",
                hint="Use more text, a smaller seq_len or a smaller global_batch_size.",
            )

    @property
    def step_size(self) -> int:
        """Sequences of one step, over all dp ranks."""
        return self.micro * self.accumulation * self.dp_degree

    def steps(self, position: Position) -> Iterator[tuple[list[Batch], Position]]:
        """``(micro-batches of this dp rank, position after them)`` for each step from ``position``, without end."""
        epoch, used = position.epoch, position.used
        order = self._order(epoch)
        mine = self.micro * self.accumulation
        while True:
            if used + self.step_size > len(order):
                epoch, used = epoch + 1, 0
                order = self._order(epoch)
            first = used + self.dp_rank * mine
            used += self.step_size
            micros = [order[i : i + self.micro] for i in range(first, first + mine, self.micro)]
            yield [self._batch(numbers, epoch) for numbers in micros], Position(epoch, used)

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.sequences))

    def _batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        rows = [self.sequences(int(i), epoch) for i in numbers]
        ids = torch.from_numpy(np.stack([r[0] for r in rows]))
        labels = torch.from_numpy(np.stack([r[1] for r in rows]))
        length = torch.tensor([r[2] for r in rows])
        return Batch(ids, labels, (torch.arange(ids.shape[1]) < length[:, None]).long())


def count_labels(batches: Sequence[Batch]) -> int:
    """Positions that are to be predicted."""
    return sum(int((b.labels != IGNORE).sum()) for b in batches)


def fingerprint(batches: Sequence[Batch]) -> str:
    """A hash that is equal exactly when the batches are."""
    digest = hashlib.sha256()
    for batch in batches:
        for tensor in (batch.ids, batch.labels, batch.attention):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_fingerprints(prints: Sequence[str], tp: int) -> None:
    """Raise unless the tp ranks of each dp rank have one batch and no two dp ranks have the same; by world rank."""
    for rank, text in enumerate(prints):
        first = rank // tp * tp
        if text != prints[first]:
            raise ConfigError(
                f"Ranks {first} and {rank} are tp ranks of one dp rank, but their first batches differ.",
                hint="Give every node the same files.",
            )
    owners: dict[str, int] = {}
    for rank in range(0, len(prints), tp):
        other = owners.setdefault(prints[rank], rank)
        if other != rank:
            raise ConfigError(
                f"Ranks {other} and {rank} are different dp ranks, but their first batches are the same.",
                hint="Does the text repeat itself?",
            )
