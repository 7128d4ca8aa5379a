"""From raw examples to rows of token ids: one function for each thing that can be learned.

A row is a few columns of whole numbers.  Long documents come in several rows, of which only the first is ``new``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tpconvert.errors import ConfigError
from tpconvert.train.examples.sources import Record, Tally, target_key
from tpconvert.train.examples.tokenizer import Pieces, Tokenizer
from tpconvert.train.settings.data import Data

IGNORE = -100
"""The label of a position that is not to be predicted."""
CHUNK = 1 << 20
"""Characters tokenized at once; a document is only divided at the end of a line."""
T = TypeVar("T")
_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Row:
    """Some numbers of one example, by the column they belong to."""

    columns: Mapping[str, Sequence[int]]
    new: bool = True
    """Whether it begins an example, rather than going on with the one before."""


def rows(
    records: Iterator[Record], field: str, data: Data, tokenizer: Tokenizer, labels: Mapping[str, int], tally: Tally
) -> Iterator[Row]:
    """The rows of all records that the objective can use."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if data.objective == "causal" and data.target is not None:
        return _answers(records, field, data.target, data.prefix, tokenizer, tally)
    if data.objective in ("causal", "masked"):
        return _documents(_texts(records, field, tally), data, tokenizer)
    target = str(target_key(data))
    if data.objective == "seq2seq":
        return _pairs(records, field, target, data.prefix, tokenizer, tally)
    if data.objective == "classification":
        fields = [field] if data.pair is None else [field, data.pair]
        return _classified(records, fields, target, tokenizer, labels, tally)
    return _tagged(records, field, target, tokenizer, labels, tally)


def value_at(item: Any, key: str) -> Any:
    """What is under a key, or under a path of keys with dots between; None where there is nothing."""
    if isinstance(item, Mapping) and key in item:
        return item[key]
    first, dot, rest = key.partition(".")
    return value_at(item[first], rest) if dot and isinstance(item, Mapping) and first in item else None


# -- what a record has under its keys -----------------------------------------------------------------------------


class _UnusableError(Exception):
    """Why a record cannot be used, and what to do about it."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint


def _usable(records: Iterator[Record], read: Callable[[Any], T], tally: Tally) -> Iterator[T]:
    """What is read of each record; those that cannot be used are noted, or end the run."""
    for record in records:
        try:
            found = read(record.item)
        except _UnusableError as error:
            tally.bad(record.where, error.why, error.hint)
        else:
            yield found


def _text_of(item: Any, key: str, setting: str) -> str:
    """The text under a key, which that setting names."""
    text = value_at(item, key)
    if not _is_text(text):
        raise _UnusableError(_untold(item, key, "text"), f"Set data.{setting}")
    return str(text)


def _label_of(value: Any, labels: Mapping[str, int]) -> int:
    """The number of a label."""
    number = _number(value, labels)
    if number is None:
        raise _UnusableError(_unknown(value, labels), "Set data.labels")
    return number


def _is_text(value: Any) -> bool:
    """A text that can be written down: JSON may spell half a character."""
    return isinstance(value, str) and (value.isascii() or not _HALF.search(value))


def _untold(item: Any, key: str, wanted: str) -> str:
    """Why an item has not what is wanted under a key."""
    found = value_at(item, key)
    if found is not None:
        return f"under the key {key!r} is {json.dumps(found, default=str)[:60]}, which is no {wanted}"
    keys = f"; its keys are {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
    return f"there is no {wanted} under the key {key!r}{keys}"


# -- text ---------------------------------------------------------------------------------------------------------


def _texts(records: Iterator[Record], field: str, tally: Tally) -> Iterator[str]:
    return filter(None, _usable(records, lambda item: _text_of(item, field, "field"), tally))


Chunk = tuple[bool, bool, str]
"""Whether it begins a document, whether it ends one, and its text."""


def _documents(texts: Iterator[str], data: Data, tokenizer: Tokenizer) -> Iterator[Row]:
    """Documents with what the tokenizer puts around them, unless each sequence is to be framed anyway."""
    alone = data.boundaries != "none" or not data.pack
    framed = data.objective == "masked" and tokenizer.frame != ((), ()) and alone
    start = [] if framed or tokenizer.start is None else [tokenizer.start]
    end = [] if framed or tokenizer.end is None else [tokenizer.end]
    for batch in _batches(texts):
        parts = [text for _, _, text in batch]
        if data.whole_words:
            encoded = [(p.ids, _begins(p, text)) for p, text in zip(tokenizer.pieces(parts), parts, strict=True)]
        else:
            encoded = [(ids, []) for ids in tokenizer.encode(parts)]
        for (opens, closes, _), (ids, begins) in zip(batch, encoded, strict=True):
            before, after = (start if opens else []), (end if closes else [])
            columns = {"ids": [*before, *ids, *after]}
            if data.whole_words:
                columns["begins"] = [*(1 for _ in before), *begins, *(1 for _ in after)]
            yield Row(columns, opens)


def _begins(pieces: Pieces, text: str) -> list[int]:
    """1 where a token begins a word: the tokenizer says so, or there is a space before or in front of it."""
    out, before = [], -1
    for (first, last), word in zip(pieces.spans, pieces.words, strict=True):
        spaced = text[first:last][:1].isspace() or (first > 0 and text[first - 1].isspace())
        out.append(int(not out or word != before or (spaced and first != last)))
        before = -1 if word is None else word
    return out


def _batches(texts: Iterator[str]) -> Iterator[list[Chunk]]:
    """Chunks of documents, some megabytes at a time."""
    batch: list[Chunk] = []
    size = 0
    for text in texts:
        at = 0
        while at < len(text):
            stop = len(text) if len(text) - at <= CHUNK else (text.rfind("\n", at, at + CHUNK) + 1 or at + CHUNK)
            batch.append((at == 0, stop == len(text), text[at:stop]))
            size += stop - at
            at = stop
            if size >= CHUNK:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


# -- examples with something to predict ------------------------------------------------------------------------------

_TOGETHER = 1000
"""Examples tokenized at once."""


def _answers(
    records: Iterator[Record], field: str, target: str, prefix: str, tokenizer: Tokenizer, tally: Tally
) -> Iterator[Row]:
    """Documents of a text that is read and a text that is asked for, with what stands around them."""
    start = [] if tokenizer.start is None else [tokenizer.start]
    end = [] if tokenizer.end is None else [tokenizer.end]
    for row in _pairs(records, field, target, prefix, tokenizer, tally):
        read, asked = [*start, *row.columns["ids"]], [*row.columns["target"], *end]
        yield Row({"ids": [*read, *asked], "asked": [0] * len(read) + [1] * len(asked)})


def _pairs(
    records: Iterator[Record], field: str, target: str, prefix: str, tokenizer: Tokenizer, tally: Tally
) -> Iterator[Row]:
    """Source and target texts."""

    def read(item: Any) -> tuple[str, str]:
        return prefix + _text_of(item, field, "field"), _text_of(item, target, "target")

    for some in _some(_usable(records, read, tally)):
        sources, targets = tokenizer.encode([s for s, _ in some]), tokenizer.encode([t for _, t in some])
        yield from (Row({"ids": s, "target": t}) for s, t in zip(sources, targets, strict=True))


def _classified(
    records: Iterator[Record],
    fields: Sequence[str],
    target: str,
    tokenizer: Tokenizer,
    labels: Mapping[str, int],
    tally: Tally,
) -> Iterator[Row]:
    """Texts, or pairs of them, and the number of their class."""

    def read(item: Any) -> tuple[list[str], int]:
        texts = [_text_of(item, field, setting) for field, setting in zip(fields, ("field", "pair"), strict=False)]
        wanted = value_at(item, target)
        if wanted is None:
            raise _UnusableError(_untold(item, target, "label"), "Set data.target")
        return texts, _label_of(wanted, labels)

    for some in _some(_usable(records, read, tally)):
        encoded = [tokenizer.encode(list(texts)) for texts in zip(*(texts for texts, _ in some), strict=True)]
        for ids, (_, label) in zip(zip(*encoded, strict=True), some, strict=True):
            yield Row({**dict(zip(("ids", "pair"), ids, strict=False)), "label": [label]})


def _tagged(
    records: Iterator[Record], field: str, target: str, tokenizer: Tokenizer, labels: Mapping[str, int], tally: Tally
) -> Iterator[Row]:
    """Words, and a tag for the first token of each."""

    def read(item: Any) -> tuple[list[str], list[int]]:
        words, wanted = value_at(item, field), value_at(item, target)
        if not _is_list(words) or not all(map(_is_text, words)):
            raise _UnusableError(_untold(item, field, "list of words"), "Set data.field")
        if not _is_list(wanted):
            raise _UnusableError(_untold(item, target, "list of tags"), "Set data.target")
        if len(words) != len(wanted):
            raise _UnusableError(f"{len(words)} words, but {len(wanted)} tags")
        return words, [_label_of(tag, labels) for tag in wanted]

    for some in _some(_usable(records, read, tally)):
        encoded = tokenizer.pieces([" ".join(words) for words, _ in some])
        for pieces, (words, tags) in zip(encoded, some, strict=True):
            yield Row({"ids": pieces.ids, "tags": _aligned(pieces, words, tags)})


def _aligned(pieces: Pieces, words: Sequence[str], tags: Sequence[int]) -> list[int]:
    """The tag of each word at its first token; every other token has none."""
    ends = list(itertools.accumulate(len(word) + 1 for word in words))
    out, word, tagged = [], 0, -1
    for first, last in pieces.spans:
        while word < len(words) - 1 and last > ends[word]:
            word += 1
        fresh = last > first and word > tagged
        out.append(tags[word] if fresh else IGNORE)
        tagged = word if fresh else tagged
    return out


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value)


def _number(value: Any, labels: Mapping[str, int]) -> int | None:
    """The number of a label; None for what is none."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value if value >= 0 and (not labels or value in labels.values()) else None
    return labels.get(value) if isinstance(value, str) else None


def _unknown(value: Any, labels: Mapping[str, int]) -> str:
    known = f"the labels are {', '.join(list(labels)[:12])}" if labels else "no names of labels are known"
    return f"{json.dumps(value, default=str)[:60]} is no label; {known}"


def _some(items: Iterator[Any]) -> Iterator[list[Any]]:
    """The items, some at a time."""
    while some := list(itertools.islice(items, _TOGETHER)):
        yield some


def label_names(data: Data, config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of the labels: by ``data.labels``, else as the model's configuration names them."""
    if data.labels:
        if len(set(data.labels)) != len(data.labels):
            raise ConfigError("data.labels: a name is there twice.")
        return {name: number for number, name in enumerate(data.labels)}
    named = config.get("id2label") or {}
    return {str(name): int(number) for number, name in named.items()}
