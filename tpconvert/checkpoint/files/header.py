"""The header of a safetensors file: made, and read with distrust.

::

    8 bytes   length of the header, little-endian
    header    {"__metadata__": {...}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    data      the tensors, without gaps
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tpconvert.errors import CheckpointError

AGAIN = "Copy or download it again."
_LFS = b"version https://git-lfs"
LONGEST_HEADER = 100_000_000
"""The limit of the safetensors format."""
LARGEST = 1 << 60
"""Elements of a tensor, dims of no rows left out of the product: more cannot be counted in bytes."""
MOST_DIMS = 64

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""In the order in which the format sorts tensors, last first, so that each is aligned."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SORTED = {name: i for i, name in enumerate(reversed(DTYPES))}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file: what it is, and which bytes of the data it has."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: its exact text, and what it says."""

    text: str
    tensors: dict[str, Stored]
    """In the order of their bytes."""
    metadata: dict[str, str]
    data: int = field(init=False)
    """Where the tensors begin."""
    size: int = field(init=False)
    """Bytes of the whole file."""

    def __post_init__(self) -> None:
        data = 8 + len(self.text.encode())
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "size", data + max((t.stop for t in self.tensors.values()), default=0))

    @property
    def encoded(self) -> bytes:
        """The bytes before the tensors."""
        raw = self.text.encode()
        return len(raw).to_bytes(8, "little") + raw


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def nbytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def sort_key(name: str, dtype: torch.dtype) -> tuple[int, bytes]:
    """The place of a tensor in a file as the safetensors library writes it: wide dtypes first, then by name."""
    if dtype not in NAMES:
        raise CheckpointError(f"{name}: safetensors cannot store {dtype_name(dtype)}.")
    return _SORTED[NAMES[dtype]], name.encode()


def make_header(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str] | None = None
) -> Header:
    """The header that the safetensors library writes for tensors given as name -> (shape, dtype)."""
    data: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    stored, at = {}, 0
    for name in sorted(tensors, key=lambda n: sort_key(n, tensors[n][1])):
        shape, dtype = tensors[name]
        stored[name] = Stored(dtype, tuple(shape), at, at + nbytes(shape, dtype))
        at = stored[name].stop
        offsets = [stored[name].start, stored[name].stop]
        data[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    text += " " * (-len(text.encode()) % 8)
    return Header(text, stored, dict(metadata or {}))


def parse_header(text: str, size: int | None, where: str) -> Header:
    """The header in ``text``, refused where it lies about itself or about a file of ``size`` bytes."""
    try:
        data = json.loads(text, object_pairs_hook=no_duplicates)
        metadata = data.pop("__metadata__", None) or {}
        tensors = {name: _read_entry(name, entry) for name, entry in data.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        told = one_line(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{where}: the header is damaged ({told}).") from None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{where}: the header is damaged (its metadata are not text).")
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 0
    for name, tensor in ordered.items():
        if tensor.start != end:
            begin = f"the bytes of {one_line(name)} begin at {tensor.start}, not at {end}"
            raise CheckpointError(f"{where}: {begin}: damaged.")
        end = tensor.stop
    header = Header(text, ordered, metadata)
    if size is not None and header.size != size:
        raise CheckpointError(f"{where}: {size} bytes long, but its header says {header.size}: cut short or damaged.")
    return header


def read_header(path: Path) -> Header:
    """The checked header of a file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise _no_tensors(path, size)
            text = file.read(length).decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not a safetensors file: its header is not UTF-8.", hint=AGAIN) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    try:
        return parse_header(text, size, str(path))
    except CheckpointError as error:
        raise CheckpointError(error.message, hint=error.hint or AGAIN) from None


def _no_tensors(path: Path, size: int) -> CheckpointError:
    """Of a file that does not begin as one of safetensors does."""
    with path.open("rb") as file:
        begin = file.read(len(_LFS))
    if begin == _LFS:
        return CheckpointError(f"{path}: only a pointer of Git LFS, not the file itself.", hint="Run: git lfs pull.")
    return CheckpointError(f"{path}: not a safetensors file, or cut short ({size} bytes).", hint=AGAIN)


def one_line(text: str) -> str:
    """A text that a file holds as a message may show it: short, and without what moves the cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:300])


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose names differ."""
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _read_entry(name: str, entry: Mapping[str, Any]) -> Stored:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"{name} has a shape or an offset that is no number of rows or bytes")
    if stop - start != nbytes(shape, dtype):
        raise ValueError(f"{name} has {stop - start} bytes for a {dtype_name(dtype)} tensor of {list(shape)}")
    if math.prod(max(n, 1) for n in shape) > LARGEST or len(shape) > MOST_DIMS:
        raise ValueError(f"{name} has the shape {str(shape)[:80]}, which no tensor has")
    return Stored(dtype, shape, start, stop)
