"""Text files to one long array of token ids, written once and mapped into memory by every rank."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpconvert.errors import ConfigError
from tpconvert.train.config import Data

_CHUNK = 1 << 20
"""Characters tokenized at once; a document is only divided at the end of a line."""
_VERSION = 1


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    size: int
    start: int | None
    """Put before each document."""
    end: int | None
    """Put after each document."""
    pad: int
    mask: int | None
    wrap: tuple[int, int] | None
    """What encloses a sequence of a masked LM."""
    special: frozenset[int]
    identity: str
    """Changes whenever its ids do."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special ones."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then end, mask and pad."""

    size, start, end, mask, pad, wrap = 259, None, 256, 257, 258, None
    special = frozenset({256, 257, 258})
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text."""
        return [list(text.encode("utf-8")) for text in texts]


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
        self._inner = inner
        empty = inner("")["input_ids"]
        self.size = len(inner)
        self.start = inner.bos_token_id if inner.bos_token_id in empty and inner.cls_token_id is None else None
        self.end = inner.eos_token_id if inner.eos_token_id is not None else inner.sep_token_id
        first = [i for i in (inner.pad_token_id, inner.eos_token_id, 0) if i is not None]
        self.pad = first[0]
        self.mask = inner.mask_token_id
        self.wrap = (empty[0], empty[-1]) if len(empty) == 2 else None
        self.special = frozenset(inner.all_special_ids)
        backend = getattr(inner, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else json.dumps(sorted(inner.get_vocab().items()))
        self.identity = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special ones."""
        ids: list[list[int]] = self._inner(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids


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


@dataclass(frozen=True, slots=True)
class Tokens:
    """All documents one after another, and where each begins."""

    ids: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    """One more than there are documents."""
    largest: int
    """The largest id."""


def find_files(data: Data) -> list[Path]:
    """The files that ``data.path`` names, sorted; an entry that names none is an error."""
    out: list[Path] = []
    for entry in data.path:
        path = Path(entry).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl", ".json"))
            if not found:
                raise ConfigError(f"data.path: the folder {path} has no .txt or .jsonl file.")
        else:
            found = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - of any root
            if not found:
                raise ConfigError(f"data.path: there is no file {path} (looked in {Path.cwd()}).")
        out += found
    return out


def documents(files: Sequence[Path], data: Data) -> Iterator[str]:
    """The texts of all documents, in order; a line that is not as it should be is named."""
    for path in files:
        jsonl = data.format == "jsonl" or (data.format == "auto" and path.suffix in (".jsonl", ".json"))
        try:
            with path.open(encoding="utf-8") as file:
                if jsonl:
                    yield from _json_lines(path, file, data.field)
                elif data.documents == "line":
                    yield from (line.rstrip("\n") for line in file if line.strip())
                elif text := file.read():
                    yield text
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}: {error.reason}).") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from None


def _json_lines(path: Path, lines: Iterator[str], key: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error}).") from None
        if not isinstance(item, dict) or not isinstance(item.get(key), str):
            raise ConfigError(f"{path}, line {number}: {_untold(item, key)}.", hint="Set data.field.")
        if item[key]:
            yield item[key]


def _untold(item: Any, key: str) -> str:
    """Why a line of JSONL has no text."""
    if isinstance(item, dict) and key in item:
        return f"under the key {key!r} is {json.dumps(item[key])[:60]}, which is no text"
    keys = f"; its keys are {', '.join(map(str, item))}" if isinstance(item, dict) else ""
    return f"there is no text under the key {key!r}{keys}"


def tokenize(data: Data, tokenizer: Tokenizer, cache: Path) -> Path:
    """The folder with the tokens of all files, made unless the cache has it already."""
    files = find_files(data)
    seen = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = json.dumps([_VERSION, tokenizer.identity, data.format, data.documents, data.field, seen])
    out = cache / hashlib.sha256(key.encode()).hexdigest()[:16]
    if out.exists():
        return out
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=cache, prefix=".making-"))
    except OSError as error:
        raise ConfigError(
            f"{cache}: tokens cannot be stored there ({error.strerror}).", hint="Set data.cache."
        ) from None
    try:
        if not _write(work, documents(files, data), tokenizer):
            raise ConfigError(f"data.path: there is no text in {', '.join(map(str, data.path))}.")
        try:
            work.rename(out)
        except OSError:  # another run made it in the meantime
            if not out.exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def open_tokens(folder: Path) -> Tokens:
    """The tokens of a folder that :func:`tokenize` made, mapped into memory."""
    about = json.loads((folder / "tokens.json").read_text())
    ids = np.memmap(folder / "tokens.bin", dtype=about["dtype"], mode="r")
    return Tokens(ids, np.load(folder / "starts.npy"), about["largest"])


def _write(folder: Path, texts: Iterator[str], tokenizer: Tokenizer) -> int:
    """Write the tokens of ``texts``; the number of documents that had any."""
    dtype = "uint16" if tokenizer.size <= 1 << 16 else "int32"
    starts, largest = [0], 0
    with (folder / "tokens.bin").open("wb") as file:
        for batch in _batches(texts):
            for chunks, ids in zip(batch, _encode(batch, tokenizer), strict=True):
                body = np.asarray(ids, dtype=np.int64)
                before = [tokenizer.start] if chunks[0] and tokenizer.start is not None else []
                after = [tokenizer.end] if chunks[1] and tokenizer.end is not None else []
                line = np.concatenate([np.asarray(before, np.int64), body, np.asarray(after, np.int64)])
                line.astype(dtype).tofile(file)
                largest = max(largest, int(line.max(initial=0)))
                if chunks[0]:
                    starts.append(starts[-1])
                starts[-1] += len(line)
    np.save(folder / "starts.npy", np.asarray(starts, dtype=np.int64))
    (folder / "tokens.json").write_text(json.dumps({"dtype": dtype, "largest": largest}))
    return len(starts) - 1


Chunk = tuple[bool, bool, str]
"""Whether it begins a document, whether it ends one, and its text."""


def _batches(texts: Iterator[str]) -> Iterator[list[Chunk]]:
    """Chunks of documents, some megabytes at a time."""
    batch: list[Chunk] = []
    size = 0
    for text in texts:
        at = 0
        while at < len(text):
            stop = len(text) if len(text) - at <= _CHUNK else (text.rfind("\n", at, at + _CHUNK) + 1 or at + _CHUNK)
            batch.append((at == 0, stop == len(text), text[at:stop]))
            size += stop - at
            at = stop
            if size >= _CHUNK:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: Sequence[Chunk], tokenizer: Tokenizer) -> list[list[int]]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    return tokenizer.encode([text for _, _, text in batch])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
