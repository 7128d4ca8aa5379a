"""The manifest of a folder of rank files: what is stored, how it is cut, and how the source's own files are made of it.

It is written last, so a folder that has one is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from tpconvert.errors import CheckpointError, PlanError
from tpconvert.spec import recipe
from tpconvert.spec.layout import Layout
from tpconvert.spec.recipe import Recipe, Shape

FORMAT = 2
READ = (1, FORMAT)
"""Format 1 had sha256 alone, without its name."""
SHA256 = "sha256"
NAME = "manifest.json"

LONGEST = 1 << 30
"""Bytes of a manifest, or a plan: some hundred a tensor."""

AGAIN = "Copy it again from where it was made, or make the folder again."

_DIGEST = re.compile("[a-z0-9]+:[0-9a-f]+")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the module, or one of the optimizer that is cut like it."""

    shape: Shape
    """Of the whole tensor."""
    dtype: str
    """As torch spells it: ``bfloat16``."""
    layout: Layout = Layout()


@dataclass(frozen=True, slots=True)
class File:
    """One file of the folder."""

    size: int
    digest: str
    """The hash of its bytes after the kind of hash: ``blake3:...``, ``sha256:...``."""

    @property
    def kind(self) -> str:
        """The kind of hash."""
        return self.digest.partition(":")[0]


@dataclass(frozen=True, slots=True)
class OriginalFile:
    """One safetensors file of the source: its name and the exact text of its header."""

    name: str
    header: str


@dataclass(frozen=True, slots=True)
class Original:
    """The files a source was stored in, and how each tensor in them is made of the module's."""

    files: tuple[OriginalFile, ...] = ()
    recipes: dict[str, Recipe] = field(default_factory=dict)
    """Stored name -> how it is made of module tensors."""
    extra: tuple[str, ...] = ()
    """Stored names the module has no use for; kept as they are."""
    copied: dict[str, str] = field(default_factory=dict)
    """Every other file of the source: its path there -> its path in this folder."""
    left_out: tuple[str, ...] = ()
    """Files of the source that were not taken along, such as the same weights in another format."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything needed to read, check, reshard and give back a folder of rank files."""

    tp: int
    tensors: dict[str, Entry]
    """By the module's own names."""
    tied: dict[str, str] = field(default_factory=dict)
    """Later names of a tensor -> the name it is stored under."""
    groups: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """Tensors that travel along, such as ``optimizer.exp_avg`` -> by parameter name."""
    files: dict[str, File] = field(default_factory=dict)
    original: Original = Original()
    source: dict[str, Any] = field(default_factory=dict)
    """Name, revision, fingerprint."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        original = self.original
        return {
            "format": FORMAT,
            "tp": self.tp,
            "source": self.source,
            "tensors": {name: _entry_json(entry) for name, entry in self.tensors.items()},
            "tied": self.tied,
            "groups": {g: {name: _entry_json(e) for name, e in group.items()} for g, group in self.groups.items()},
            "files": {name: [file.size, file.digest] for name, file in sorted(self.files.items())},
            "original": {
                "files": {file.name: file.header for file in original.files},
                "recipes": {name: recipe.to_json(r) for name, r in original.recipes.items()},
                "extra": list(original.extra),
                "copied": original.copied,
                "left_out": list(original.left_out),
            },
        }

    def dumps(self) -> str:
        """The text of ``manifest.json``: one line a tensor and a file."""
        return _dumps(self.to_json()) + "\n"

    @classmethod
    def from_json(cls, data: Any, where: str = NAME) -> Manifest:
        """The inverse of :meth:`to_json`; anything else is a :class:`CheckpointError` that names ``where``."""
        if not isinstance(data, dict) or "format" not in data:
            raise CheckpointError(f"{where}: not a manifest of tpconvert.", hint=AGAIN)
        if data["format"] not in READ:
            raise CheckpointError(
                f"{where}: format {data['format']!r}; this version of tpconvert reads format {FORMAT}.",
                hint="Use the version of tpconvert that wrote it, or a newer one.",
            )
        try:
            return _read(data)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error.message}", hint=error.hint or AGAIN) from None
        except (KeyError, TypeError, ValueError, AttributeError, PlanError, RecursionError) as error:
            raise CheckpointError(f"{where}: damaged ({_told(error)}).", hint=AGAIN) from None

    @classmethod
    def loads(cls, text: str, where: str = NAME) -> Manifest:
        """A manifest from the text of ``manifest.json``."""
        try:
            data = json.loads(text, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where}: damaged: not JSON ({error}).", hint=AGAIN) from None
        return cls.from_json(data, where)


def _told(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def safe_path(path: str, where: str = NAME) -> str:
    """The path, if it is a plain relative one that stays inside its folder."""
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or "\0" in path or {"", ".", ".."} & set(parts):
        raise CheckpointError(f"{where}: names the file {path!r}, which is outside its folder: refused.")
    return path


def _read(data: Mapping[str, Any]) -> Manifest:
    tp = data["tp"]
    if type(tp) is not int or tp < 1:
        raise ValueError(f"tp is {tp!r}")
    if data["tensors"] and tp > len(data["files"]):
        raise ValueError(f"tp is {tp}, but only {len(data['files'])} files are named")
    tensors = _map(data["tensors"], _entry)
    groups = {str(name): _map(group, _entry) for name, group in data.get("groups", {}).items()}
    tied = _map(data.get("tied", {}), str)
    for name, first in tied.items():
        if first not in tensors:
            raise CheckpointError(f"{name} is tied to {first}, which is not stored.")
        if name in tensors:
            raise CheckpointError(f"{name} is tied to {first}, and stored itself.")
    if unknown := sorted(set(data) - {"format", *(f.name for f in fields(Manifest))}):
        raise ValueError(f"the unknown key {unknown[0]!r}")
    return Manifest(
        tp=tp,
        tensors=tensors,
        tied=tied,
        groups=groups,
        files={safe_path(name): _file(file, data["format"]) for name, file in data["files"].items()},
        original=_original(data["original"], {name: entry.shape for name, entry in tensors.items()}),
        source=dict(data.get("source", {})),
    )


def _original(data: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Original:
    return Original(
        files=tuple(OriginalFile(safe_path(name), str(header)) for name, header in data["files"].items()),
        recipes={name: recipe.from_json(r, shapes) for name, r in data["recipes"].items()},
        extra=tuple(map(str, data["extra"])),
        copied={safe_path(path): safe_path(at) for path, at in data["copied"].items()},
        left_out=tuple(map(str, data["left_out"])),
    )


def _entry_json(entry: Entry) -> dict[str, Any]:
    out: dict[str, Any] = {"shape": list(entry.shape), "dtype": entry.dtype}
    return out | ({"layout": entry.layout.to_json()} if entry.layout.cut else {})


def _entry(data: Mapping[str, Any]) -> Entry:
    shape = tuple(data["shape"])
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"the shape {data['shape']!r}")
    layout = Layout.from_json(data.get("layout", {}))
    if not layout.fits(shape):
        raise ValueError(f"the layout {layout.to_json()} for the shape {list(shape)}")
    return Entry(shape, str(data["dtype"]), layout)


def _file(data: list[Any], form: int) -> File:
    size, digest = data
    if type(size) is not int or size < 0 or not isinstance(digest, str):
        raise ValueError(f"the file entry {data!r}")
    digest = f"{SHA256}:{digest}" if form == 1 else digest
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"the file entry {data!r}")
    return File(size, digest)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _map(data: Mapping[str, Any], read: Callable[[Any], T]) -> dict[str, T]:
    return {str(name): read(value) for name, value in data.items()}


def _dumps(data: Any, depth: int = 0) -> str:
    """JSON with one line an item down to the third level."""
    if not isinstance(data, dict) or not data or depth == 3 or set(data) & {"shape"}:
        return json.dumps(data)
    pad = " " * (depth + 1)
    lines = (f"{pad}{json.dumps(key)}: {_dumps(value, depth + 1)}" for key, value in data.items())
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
