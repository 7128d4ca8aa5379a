"""Examples to columns of numbers, written once and mapped into memory by every rank.

A folder of tokens holds, for each column, its numbers one after another and where each example begins in them::

    1f3a.../ tokens.json  ids.bin  ids.starts.npy  [target.bin  target.starts.npy ...]
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from tpconvert.errors import ConfigError
from tpconvert.train.examples.rows import Row, rows
from tpconvert.train.examples.sources import Tally, find_files, records, sources_of
from tpconvert.train.examples.tokenizer import Tokenizer
from tpconvert.train.settings.data import Data, Source

_VERSION = 2
_MAKING, _MOMENT = ".making-", 60.0
_KEYS = (
    "objective", "documents", "target", "labels", "prefix", "whole_words", "on_bad_line", "boundaries", "pack",
    "pair",
)  # fmt: skip
"""Of the data section: what the tokens depend on besides their source."""


@dataclass(frozen=True, slots=True)
class Column:
    """Numbers of all examples one after another, and where each example begins."""

    values: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]

    def row(self, index: int) -> np.ndarray[Any, Any]:
        """The numbers of one example."""
        return self.values[int(self.starts[index]) : int(self.starts[index + 1])].astype(np.int64)


@dataclass(frozen=True, slots=True)
class Tokens:
    """All documents one after another, and where each begins."""

    ids: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    """Where document i begins; one more entry, the end of the last."""
    largest: int
    """The largest id of a word."""
    more: Mapping[str, Column] = field(default_factory=dict)
    """Further columns: begins, asked, target, pair, label, tags."""
    bad: int = 0
    """Lines that were left out."""
    named: tuple[str, ...] = ()
    """The first of them."""

    def row(self, index: int) -> np.ndarray[Any, Any]:
        """The ids of one example."""
        return Column(self.ids, self.starts).row(index)

    @property
    def largest_label(self) -> int:
        """The largest number of a class or tag; -1 where there are none."""
        columns = [self.more[name].values for name in ("label", "tags") if name in self.more]
        return max((int(values.max(initial=-1)) for values in columns), default=-1)


def tokenize(
    data: Data,
    tokenizer: Tokenizer,
    cache: Path,
    source: Source | None = None,
    labels: Mapping[str, int] | None = None,
) -> Path:
    """The folder with the tokens of a source (by default the only one), made unless the cache has it already."""
    source, labels = source or sources_of(data)[0], labels or {}
    out = cache / _key(data, tokenizer, source, labels)
    if _is_whole(out):
        return out
    shutil.rmtree(out, ignore_errors=True)  # harmed
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_left(cache)
        work = Path(tempfile.mkdtemp(dir=cache, prefix=_MAKING))
        lock = os.open(work, os.O_RDONLY)
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"{cache}: tokens cannot be stored there ({error.strerror}).", hint="Set data.cache."
        ) from None
    try:
        tally = Tally(stop=data.on_bad_line == "stop")
        raw = records(source, data, tally)
        _write(work, rows(raw, str(source.field), data, tokenizer, labels, tally), tokenizer.size, source, tally)
        try:
            work.rename(out)
        except OSError:  # another run made it in the meantime
            if not out.exists():
                raise
    except OSError as error:
        if error.filename is not None:  # of a file of the user's
            raise
        raise ConfigError(
            f"{cache}: the tokens cannot be stored there ({error.strerror or error}).",
            hint="Make room, or set data.cache.",
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # others are there
            cache.rmdir()
    return out


def _remove_left(cache: Path) -> None:
    """Remove what runs that were killed left half-made; what somebody is making is locked, but for its first moment."""
    for path in cache.glob(f"{_MAKING}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _MOMENT:
                continue
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


def open_tokens(folder: Path) -> Tokens:
    """The tokens of a folder that :func:`tokenize` made, mapped into memory."""
    about = json.loads((folder / "tokens.json").read_text())
    columns = {name: _column(folder, name, dtype) for name, dtype in about["columns"].items()}
    ids = columns.pop("ids")
    return Tokens(ids.values, ids.starts, about["largest"], columns, about["bad"], tuple(about["named"]))


def _is_whole(folder: Path) -> bool:
    """Whether a folder has all the tokens that were once written to it."""
    try:
        tokens = open_tokens(folder)
    except (OSError, EOFError, ValueError, KeyError):
        return False
    columns = (Column(tokens.ids, tokens.starts), *tokens.more.values())
    return all(len(column.values) == column.starts[-1] for column in columns)


def _key(data: Data, tokenizer: Tokenizer, source: Source, labels: Mapping[str, int]) -> str:
    """A name that changes with whatever the tokens depend on."""
    files = find_files(source.path) if source.path else []
    if source.hub and Path(source.hub).is_dir():
        files = sorted(path for path in Path(source.hub).rglob("*") if path.is_file())
    seen = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    settings = data.model_dump(mode="json", include=set(_KEYS))
    about = source.model_dump(mode="json", exclude={"path", "weight"})
    key = json.dumps([_VERSION, tokenizer.identity, settings, about, seen, labels], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _column(folder: Path, name: str, dtype: str) -> Column:
    path = folder / f"{name}.bin"
    empty = path.stat().st_size == 0  # which no map can be of
    values = np.zeros(0, dtype) if empty else np.memmap(path, dtype=dtype, mode="r")
    return Column(values, np.load(folder / f"{name}.starts.npy"))


def _write(folder: Path, made: Iterator[Row], words: int, source: Source, tally: Tally) -> None:
    """Write all columns; a source that gives no row is an error."""
    dtypes = {
        "ids": "uint16" if words <= 1 << 16 else "int32",
        "begins": "uint8",
        "asked": "uint8",
        "tags": "int32",
        "label": "int32",
    }
    dtypes["target"] = dtypes["pair"] = dtypes["ids"]
    starts: dict[str, list[int]] = {}
    files: dict[str, IO[bytes]] = {}
    largest = -1
    with contextlib.ExitStack() as stack:
        for row in made:
            for name, numbers in row.columns.items():
                if name not in files:
                    files[name] = stack.enter_context((folder / f"{name}.bin").open("wb"))
                    starts[name] = [0]
                values = np.asarray(numbers, dtype=np.int64)
                values.astype(dtypes[name]).tofile(files[name])
                if row.new:
                    starts[name].append(starts[name][-1])
                starts[name][-1] += len(values)
                if name in ("ids", "target", "pair"):
                    largest = max(largest, int(values.max(initial=-1)))
    if largest < 0:
        left_out = f" ({tally.count} bad lines were left out, the first: {tally.first[0]})" if tally.count else ""
        raise ConfigError(f"data.path: there is no text in {source.hub or ', '.join(source.path)}{left_out}.")
    for name, numbers in starts.items():
        np.save(folder / f"{name}.starts.npy", np.asarray(numbers, dtype=np.int64))
    about = {"columns": {name: dtypes[name] for name in starts}, "largest": largest}
    (folder / "tokens.json").write_text(json.dumps(about | {"bad": tally.count, "named": tally.first}))
