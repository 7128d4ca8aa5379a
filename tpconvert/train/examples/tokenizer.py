"""Tokenizers: the sharded folder's own, another by name, or plain bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tpconvert.errors import ConfigError
from tpconvert.train.settings.data import Data

Frame = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Joint:
    """What stands before, between and after two texts that belong together."""

    around: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    types: tuple[int, int, int, int, int] | None = None
    """The kind of each of the five stretches, for a model that is told (``token_type_ids``)."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The tokens of one text, and where they are in it."""

    ids: Sequence[int]
    spans: Sequence[tuple[int, int]]
    """The characters of each token, which may begin with a space."""
    words: Sequence[int | None]
    """The number of each token's word, as the tokenizer divides words."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    size: int
    start: int | None
    """Put before each document of causal text."""
    end: int | None
    """Put after each document, and after a target."""
    pad: int
    mask: int | None
    frame: Frame
    """What the tokenizer itself puts before and after one text, as ``[CLS]`` and ``[SEP]``."""
    joint: Joint
    special: frozenset[int]
    identity: str
    """Changes whenever its ids do."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special ones."""
        ...

    def pieces(self, texts: Sequence[str]) -> list[Pieces]:
        """The same with the place of each token."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then end, mask and pad."""

    size, start, end, mask, pad = 259, None, 256, 257, 258
    frame: Frame = ((), ())
    joint = Joint(((), (256,), ()))
    special = frozenset({256, 257, 258})
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text."""
        return [list(text.encode("utf-8")) for text in texts]

    def pieces(self, texts: Sequence[str]) -> list[Pieces]:
        """The bytes of each text; words are what spaces divide."""
        return [_byte_pieces(text) for text in texts]


def _byte_pieces(text: str) -> Pieces:
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    words: list[int | None] = []
    word, before = -1, " "
    for at, letter in enumerate(text):
        word += before.isspace() != letter.isspace() or at == 0
        before = letter
        for byte in letter.encode("utf-8"):
            ids.append(byte)
            spans.append((at, at + 1))
            words.append(word)
    return Pieces(ids, spans, words)


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder or of the hub."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        try:
            inner = AutoTokenizer.from_pretrained(name)
        except Exception as error:
            raise ConfigError(
                f"{name}: no tokenizer can be opened ({_first_line(error)}).",
                hint="Set data.tokenizer to a folder with tokenizer files, or to bytes.",
            ) from None
        self._inner, self._name = inner, name
        empty = inner("")["input_ids"]
        self.size = len(inner)
        self.start = inner.bos_token_id if inner.bos_token_id in empty and inner.cls_token_id is None else None
        self.end = inner.eos_token_id if inner.eos_token_id is not None else inner.sep_token_id
        first = [i for i in (inner.pad_token_id, inner.eos_token_id, 0) if i is not None]
        self.pad = first[0]
        self.mask = inner.mask_token_id
        self.frame = _frame(inner)
        self.joint = _joint(inner)
        self.special = frozenset(inner.all_special_ids)
        backend = getattr(inner, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else json.dumps(sorted(inner.get_vocab().items()))
        self.identity = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special ones."""
        ids: list[list[int]] = self._inner(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def pieces(self, texts: Sequence[str]) -> list[Pieces]:
        """The ids of each text and their places, which only a fast tokenizer knows."""
        if not self._inner.is_fast:
            raise ConfigError(
                f"{self._name}: this tokenizer does not say where in the text a token is.",
                hint="Use one with a tokenizer.json (whole_words and tagging need it).",
            )
        found = self._inner(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, spans = found["input_ids"], found["offset_mapping"]
        return [Pieces(ids[i], spans[i], found.word_ids(i)) for i in range(len(ids))]


def open_tokenizer(data: Data, folder: Path) -> Tokenizer:
    """The tokenizer that the configuration names, or the one in the sharded folder."""
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer is not None:
        return FolderTokenizer(data.tokenizer)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ConfigError(
            f"{folder}: there is no tokenizer in this folder.",
            hint="Set data.tokenizer to a folder with tokenizer files, or to bytes.",
        )
    return FolderTokenizer(str(folder))


def _frame(inner: Any) -> Frame:
    """What special tokens stand before and after a text: seen by encoding one with and without them."""
    bare = inner("a", add_special_tokens=False)["input_ids"]
    full = inner("a")["input_ids"]
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return tuple(full[:at]), tuple(full[at + len(bare) :])
    return (), ()


def _joint(inner: Any) -> Joint:
    """What stands around two texts: seen by encoding two of one word."""
    bare = inner("a", add_special_tokens=False)["input_ids"]
    full = inner("a", "a", return_token_type_ids=True)
    ids, size = full["input_ids"], len(bare)
    places = [at for at in range(len(ids) - size + 1) if size and ids[at : at + size] == bare]
    if len(places) < 2 or places[-1] < places[0] + size:
        return Joint(((), (), ()))
    first, second = places[0], places[-1]
    around = tuple(ids[:first]), tuple(ids[first + size : second]), tuple(ids[second + size :])
    if "token_type_ids" not in inner.model_input_names:
        return Joint(around)
    kinds = full["token_type_ids"]
    between = kinds[first + size] if around[1] else kinds[first]
    return Joint(around, (kinds[0], kinds[first], between, kinds[second], kinds[-1]))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
