"""The raw examples of a source, one after another, each with the place it is from.

Plain text, JSONL and Parquet files are read here, gzipped or not; a data set of the hub by ``datasets``.  What cannot
be used is named by file and line, and ends the run or is counted.
"""

from __future__ import annotations

import glob
import gzip
import json
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tpconvert.errors import ConfigError
from tpconvert.train.settings.data import Data, Source

_TEXT, _JSON, _PARQUET = (".txt",), (".jsonl", ".json"), (".parquet",)
_OTHER = (".csv", ".tsv", ".arrow", ".zst", ".bz2", ".xz", ".zip", ".tar", ".pdf", ".docx", ".safetensors", ".bin")
"""Endings of what would be read as text and is none."""
_SHOWN = 3
"""Bad lines that are named."""


@dataclass(frozen=True, slots=True)
class Record:
    """One raw example."""

    where: str
    """``corpus.jsonl, line 7``."""
    item: Any
    """Its keys and values."""


@dataclass(slots=True)
class Tally:
    """The lines that could not be used, where they do not end the run."""

    stop: bool
    count: int = 0
    first: list[str] = field(default_factory=list)

    def bad(self, where: str, why: str, hint: str = "") -> None:
        """Note one; raise if it is not to be left out."""
        if self.stop:
            way = "leave such lines out with data.on_bad_line: skip"
            told = f"{hint}, or {way}." if hint else f"{way.capitalize()}."
            raise ConfigError(f"{where}: {why}.", hint=told) from None
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(f"{where}: {why}")


def sources_of(data: Data) -> tuple[Source, ...]:
    """The sources of the configuration, with what they leave to the section filled in."""
    one = Source(
        path=data.path, hub=data.hub, subset=data.subset, split=data.split, revision=data.revision
    ) if data.path or data.hub else None  # fmt: skip
    return tuple(filled(source, data) for source in ((one,) if one else data.sources))


def filled(source: Source, data: Data) -> Source:
    """The source with the section's format and field where it names none."""
    usual = data.field or ("tokens" if data.objective == "tagging" else "text")
    return source.model_copy(update={"format": source.format or data.format, "field": source.field or usual})


def find_files(paths: Sequence[str]) -> list[Path]:
    """Every file that a path names, sorted; an entry that names none is an error."""
    out: list[Path] = []
    for entry in paths:
        path = Path(entry).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if _ending(p) in _TEXT + _JSON + _PARQUET)
            if not found:
                raise ConfigError(f"data.path: the folder {path} has no .txt, .jsonl or .parquet file.")
        else:
            found = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - of any root
            if not found:
                raise ConfigError(
                    f"data.path: there is no file {path} (looked in {Path.cwd()}).",
                    hint="A data set of the hub is named by data.hub.",
                )
        out += found
    return out


def target_key(data: Data) -> str | None:
    """Where what is predicted is; None for what is the text itself."""
    usual = {"seq2seq": "target", "classification": "label", "tagging": "tags"}
    return data.target or usual.get(data.objective)


def records(source: Source, data: Data, tally: Tally) -> Iterator[Record]:
    """All examples of a source, in order."""
    if source.hub is not None:
        yield from _hub(source)
        return
    for path in find_files(source.path):
        kind = source.format if source.format != "auto" else _kind(path)
        try:
            if kind == "parquet":
                yield from _parquet(path, [k for k in (source.field, data.pair, target_key(data)) if k is not None])
            else:
                with _open(path) as file:
                    yield from _lines(path, file, kind == "jsonl", data, tally)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{path}: damaged gzip file ({error}).") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error}).") from None


def _ending(path: Path) -> str:
    """``.jsonl`` of ``a.jsonl`` and of ``A.JSONL.GZ``."""
    return (path.with_suffix("") if _is_zipped(path) else path).suffix.lower()


def _is_zipped(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _kind(path: Path) -> str:
    """How a file is read by its ending; tables and archives, which are no text, only if that is said."""
    ending = _ending(path)
    if ending in _OTHER:
        raise ConfigError(
            f"{path}: {ending} files are not read.",
            hint="Make it JSONL or Parquet, or set data.format: text to take it for plain text.",
        )
    return "jsonl" if ending in _JSON else "parquet" if ending in _PARQUET else "text"


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if _is_zipped(path) else path.open("rb")


def _lines(path: Path, file: IO[bytes], is_json: bool, data: Data, tally: Tally) -> Iterator[Record]:
    """The records of a text or JSONL file; blank lines are none, nor is the mark that Windows begins a file with."""
    if not is_json and data.documents == "file":
        text = _decoded(str(path), file.read().removeprefix(BOM_UTF8), tally)
        if text:
            yield Record(str(path), {"text": text})
        return
    for number, raw in enumerate(file, 1):
        where = f"{path}, line {number}"
        line = _decoded(where, raw.removeprefix(BOM_UTF8) if number == 1 else raw, tally)
        if line is None or not line.strip():
            continue
        if not is_json:
            yield Record(where, {"text": line.rstrip("\r\n")})
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            many = number == 1 and line.strip() in ("[", "{")
            tally.bad(where, f"not JSON ({error})", "Write each example on a line of its own" if many else "")
        else:
            yield Record(where, item)


def _decoded(where: str, raw: bytes, tally: Tally) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        tally.bad(where, f"not UTF-8 text (byte {error.start}: {error.reason})")
        return None


def _parquet(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    """The rows of a Parquet file; of its columns only those of the ``keys``, if it has them."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        held = file.schema_arrow.names
        found = [key if key in held else key.partition(".")[0] for key in keys]
        columns = list(dict.fromkeys(found)) if all(name in held and "." not in name for name in found) else None
        for batch in file.iter_batches(1024, columns=columns):
            for item in batch.to_pylist():
                number += 1
                yield Record(f"{path}, row {number}", item)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise ConfigError(f"{path}: not a Parquet file ({str(error).splitlines()[0]}).") from None


def _hub(source: Source) -> Iterator[Record]:
    import datasets

    assert source.hub is not None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(source.hub, source.subset, split=source.split, revision=source.revision)
    except Exception as error:
        told = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"data.hub: {source.hub} cannot be opened ({type(error).__name__}: {told}).") from None
    for number, item in enumerate(found, 1):
        yield Record(f"{source.hub} ({source.split}), row {number}", item)
