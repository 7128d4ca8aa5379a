"""What is learned from a row of tokens: one class each for inputs and labels of one kind.

A sequence is a set of arrays of equal names in every row, so that rows can be stacked: ``ids`` and ``labels``, the
number of ids that are ``used``, and for packed documents the number of the ``documents`` that each position is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tpconvert.errors import ConfigError
from tpconvert.train.examples.rows import IGNORE
from tpconvert.train.examples.text import Tokens
from tpconvert.train.examples.tokenizer import Frame, Joint, Tokenizer
from tpconvert.train.settings.config import Config

Array = np.ndarray[Any, Any]
Example = Mapping[str, Any]


class Sequences(Protocol):
    """A numbered set of sequences: what batches are drawn from."""

    def __len__(self) -> int: ...

    def __call__(self, index: int, epoch: int) -> Any:
        """One sequence, which may be another in each epoch."""
        ...


@dataclass(frozen=True, slots=True)
class Causal:
    """Sequences whose every token predicts the next one."""

    tokens: Tokens
    seq_len: int
    pack: bool
    pad: int
    boundaries: bool = False
    """Whether the last token of a packed document predicts nothing, and positions know their document."""

    def __len__(self) -> int:
        if self.pack:
            return max(0, (len(self.tokens.ids) - 1) // self.seq_len)
        return len(self.tokens.starts) - 1

    def __call__(self, index: int, epoch: int) -> Example:
        """Inputs, and the same moved by one as labels."""
        start = index * self.seq_len if self.pack else int(self.tokens.starts[index])
        end = len(self.tokens.ids) if self.pack else int(self.tokens.starts[index + 1])
        text = self.tokens.ids[start : min(start + self.seq_len + 1, end)].astype(np.int64)
        ids, labels = np.full(self.seq_len, self.pad), np.full(self.seq_len, IGNORE)
        used = min(len(text), self.seq_len)
        ids[:used], labels[: max(len(text) - 1, 0)] = text[:used], text[1:]
        if "asked" in self.tokens.more:
            asked = self.tokens.more["asked"].values[start + 1 : start + len(text)]
            labels[: len(asked)][asked == 0] = IGNORE
        example = {"ids": ids, "labels": labels, "used": used}
        if not (self.pack and self.boundaries):
            return example
        documents = np.searchsorted(self.tokens.starts, np.arange(start, start + self.seq_len + 1), side="right")
        labels[documents[1:] != documents[:-1]] = IGNORE
        return example | {"documents": documents[:-1] - documents[0]}


@dataclass(frozen=True, slots=True)
class Masked:
    """Sequences some tokens of which are hidden and asked for."""

    tokens: Tokens
    seq_len: int
    pack: bool
    tokenizer: Tokenizer
    probability: float
    seed: int
    begins: Array
    """Where in the text each packed sequence begins."""
    boundaries: bool

    def __len__(self) -> int:
        return len(self.begins) if self.pack else len(self.tokens.starts) - 1

    def __call__(self, index: int, epoch: int) -> Example:
        """Inputs with masks, and the hidden tokens as labels."""
        spans = self._spans(index)
        prefix, suffix = self.tokenizer.frame
        text = np.concatenate([np.concatenate([prefix, self.tokens.ids[a:b], suffix]) for a, b in spans])
        text = text.astype(np.int64)
        words = self._words(spans)
        ids, labels = np.full(self.seq_len, self.tokenizer.pad), np.full(self.seq_len, IGNORE)
        hidden = self._hide(text, words, np.random.default_rng([self.seed, epoch, index]))
        ids[: len(text)], labels[: len(text)] = hidden
        example = {"ids": ids, "labels": labels, "used": len(text)}
        if not (self.pack and self.boundaries):
            return example
        documents = np.full(self.seq_len, len(spans))  # padding is a document of its own
        documents[: len(text)] = np.repeat(np.arange(len(spans)), [b - a + self._around for a, b in spans])
        return example | {"documents": documents}

    @property
    def _around(self) -> int:
        return sum(map(len, self.tokenizer.frame))

    def _spans(self, index: int) -> list[tuple[int, int]]:
        """The stretches of text of a sequence; each is framed."""
        room, starts = self.seq_len - self._around, self.tokens.starts
        if not self.pack:
            start = int(starts[index])
            return [(start, min(start + room, int(starts[index + 1])))]
        start = int(self.begins[index])
        if not self.boundaries:
            return [(start, min(start + room, len(self.tokens.ids)))]
        return _fill(starts, start, self.seq_len, self._around)

    def _words(self, spans: list[tuple[int, int]]) -> Array | None:
        """For whole words: the number of each position's word."""
        if "begins" not in self.tokens.more:
            return None
        flags = self.tokens.more["begins"].values
        prefix, suffix = self.tokenizer.frame
        parts = [
            np.concatenate([np.ones(len(prefix), np.int64), flags[a:b], np.ones(len(suffix), np.int64)])
            for a, b in spans
        ]
        for part in parts:
            part[len(prefix)] = 1
        return np.cumsum(np.concatenate(parts)) - 1

    def _hide(self, text: Array, words: Array | None, random: np.random.Generator) -> tuple[Array, Array]:
        """80 % of the chosen tokens become the mask, 10 % any token, 10 % stay."""
        ordinary = ~np.isin(text, list(self.tokenizer.special))
        picked = random.random(len(text)) < self.probability
        chosen = ordinary & (picked if words is None else picked[words])
        draw = random.random(len(text))
        anything = random.integers(0, self.tokenizer.size, len(text))
        ids = np.where(chosen & (draw < 0.8), self.tokenizer.mask, text)
        ids = np.where(chosen & (draw >= 0.9), anything, ids)
        return ids, np.where(chosen, text, IGNORE)


def lay_out(tokens: Tokens, seq_len: int, around: int, boundaries: bool) -> Array:
    """Where each packed sequence begins: one after another, each with as many framed stretches as it has room for."""
    if not boundaries or not around:
        return np.arange(0, len(tokens.ids), seq_len - around)
    begins, at, end = [], 0, len(tokens.ids)
    while at < end:
        begins.append(at)
        at = _fill(tokens.starts, at, seq_len, around)[-1][1]
    return np.asarray(begins)


def _fill(starts: Array, at: int, room: int, around: int) -> list[tuple[int, int]]:
    """Stretches of documents from ``at`` on that fill a sequence, with ``around`` more tokens for each."""
    spans, document = [], int(np.searchsorted(starts, at, side="right"))
    while document < len(starts) and room > around:
        stop = min(int(starts[document]), at + room - around)
        if stop > at:
            spans.append((at, stop))
            room -= stop - at + around
        at = stop
        document += at == int(starts[document])
    return spans


@dataclass(frozen=True, slots=True)
class Pairs:
    """A source text and the target text that it is to become."""

    tokens: Tokens
    seq_len: int
    target_len: int
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.tokens.starts) - 1

    def __call__(self, index: int, epoch: int) -> Example:
        """Source ids, and target ids as labels; the decoder's inputs are made of these by the model."""
        prefix, suffix = self.tokenizer.frame
        if not suffix and self.tokenizer.end is not None:
            suffix = (self.tokenizer.end,)
        source = framed(self.tokens.row(index), self.seq_len, self.tokenizer.frame)
        target = framed(self.tokens.more["target"].row(index), self.target_len, (prefix, suffix))
        ids, labels = np.full(self.seq_len, self.tokenizer.pad), np.full(self.target_len, IGNORE)
        ids[: len(source)], labels[: len(target)] = source, target
        return {"ids": ids, "labels": labels, "used": len(source)}


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text and its class, or words and the tag of each."""

    tokens: Tokens
    seq_len: int
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.tokens.starts) - 1

    def __call__(self, index: int, epoch: int) -> Example:
        """Ids, and one label for all of them or one for each."""
        frame, types = self.tokenizer.frame, None
        if "pair" in self.tokens.more:
            both = self.tokens.row(index), self.tokens.more["pair"].row(index)
            text, types = joined(*both, self.seq_len, self.tokenizer.joint)
        else:
            text = framed(self.tokens.row(index), self.seq_len, frame)
        ids = np.full(self.seq_len, self.tokenizer.pad)
        ids[: len(text)] = text
        if "label" in self.tokens.more:
            labels: Any = self.tokens.more["label"].row(index)[0]
        else:
            around = tuple((IGNORE,) * len(part) for part in frame)
            tags = framed(self.tokens.more["tags"].row(index), self.seq_len, (around[0], around[1]))
            labels = np.full(self.seq_len, IGNORE)
            labels[: len(tags)] = tags
        example = {"ids": ids, "labels": labels, "used": len(text)}
        return example if types is None else example | {"types": types}


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the sequences of a set."""

    of: Sequences
    numbers: Array | range

    def __len__(self) -> int:
        return len(self.numbers)

    def __call__(self, index: int, epoch: int) -> Any:
        """One of them."""
        return self.of(int(self.numbers[index]), epoch)


def split(of: Sequences, fraction: float, *, packed: bool, seed: int) -> tuple[Part, Part]:
    """``(to train on, held out)``: the last packed sequences, or examples chosen by the seed."""
    held = max(1, round(len(of) * fraction))
    if held >= len(of):
        raise ConfigError(
            f"data.eval.fraction {fraction} of {len(of)} sequences leaves none to train on.",
            hint="Use more text, a smaller seq_len or data.eval.path.",
        )
    rest = len(of) - held
    if packed:
        return Part(of, range(rest)), Part(of, range(rest, len(of)))
    order = np.random.default_rng([seed, len(of)]).permutation(len(of))
    return Part(of, np.sort(order[:rest])), Part(of, np.sort(order[rest:]))


def framed(ids: Array, room: int, frame: Frame) -> Array:
    """The ids with the tokenizer's own around them, cut so that these stay."""
    prefix, suffix = frame
    return np.concatenate([prefix, ids[: max(0, room - len(prefix) - len(suffix))], suffix]).astype(np.int64)[:room]


def joined(first: Array, second: Array, room: int, joint: Joint) -> tuple[Array, Array | None]:
    """Two texts with the tokenizer's own around them, the longer cut until both have room; and each token's type."""
    left = max(0, room - sum(map(len, joint.around)))
    first, second = first[: max(left - len(second), left - left // 2)], second[: max(left - len(first), left // 2)]
    parts = joint.around[0], first, joint.around[1], second, joint.around[2]
    ids = np.concatenate(parts).astype(np.int64)[:room]
    if joint.types is None:
        return ids, None
    types = np.zeros(room, np.int64)
    types[: len(ids)] = np.repeat(joint.types, [len(part) for part in parts])[:room]
    return ids, types


def make_sequences(config: Config, tokens: Tokens, tokenizer: Tokenizer) -> Sequences:
    """The sequences that the configuration asks for; too little text is an error with the numbers."""
    data, seq_len = config.data, config.training.seq_len
    ends = data.boundaries != "none"
    if data.objective == "masked":
        around = sum(map(len, tokenizer.frame))
        if tokenizer.mask is None:
            raise ConfigError(
                "data.objective is masked, but the tokenizer has no mask token.", hint="Use data.objective: causal."
            )
        if seq_len <= around:
            raise ConfigError(f"training.seq_len {seq_len} has no room beside {around} special tokens.")
        begins = lay_out(tokens, seq_len, around, ends)
        sequences: Sequences = Masked(
            tokens, seq_len, data.pack, tokenizer, data.mask_probability, config.training.seed, begins, ends
        )
    elif data.objective == "seq2seq":
        sequences = Pairs(tokens, seq_len, data.target_len or seq_len, tokenizer)
    elif data.objective == "causal":
        sequences = Causal(tokens, seq_len, data.pack, tokenizer.pad, ends)
    else:
        sequences = Labelled(tokens, seq_len, tokenizer)
    if len(sequences) == 0:
        raise ConfigError(
            f"data.path: the text has {len(tokens.ids)} tokens, too few for one sequence of training.seq_len "
            f"{seq_len}.",
            hint="Use more text or a smaller seq_len.",
        )
    return sequences
