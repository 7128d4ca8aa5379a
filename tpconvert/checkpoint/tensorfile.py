"""One safetensors file: its header checked before it is believed, its tensors as views of a map, a streaming writer.

::

    8 bytes   length of the header, little-endian
    header    {"__metadata__": {...}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    data      the tensors, without gaps
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tpconvert.errors import CheckpointError
from tpconvert.spec.manifest import File

LONGEST_HEADER = 100_000_000
"""The limit of the safetensors format."""

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

    @property
    def data(self) -> int:
        """Where the tensors begin."""
        return 8 + len(self.text.encode())

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.data + max((t.stop for t in self.tensors.values()), default=0)

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
        data = json.loads(text, object_pairs_hook=_no_duplicates)
        metadata = data.pop("__metadata__", None) or {}
        tensors = {name: _read_entry(name, entry) for name, entry in data.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: the header is damaged ({type(error).__name__}: {error}).") from None
    if not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{where}: the header is damaged (its metadata are not text).")
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 0
    for name, tensor in ordered.items():
        if tensor.start != end:
            raise CheckpointError(f"{where}: the bytes of {name} begin at {tensor.start}, not at {end}: damaged.")
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
                raise CheckpointError(f"{path}: not a safetensors file, or cut short ({size} bytes).")
            text = file.read(length).decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not a safetensors file: its header is not UTF-8.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    return parse_header(text, size, str(path))


class TensorFile:
    """A safetensors file, mapped: tensors are views of it and cost no memory until they are touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = _stamp(path)
        self.header = read_header(path)
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self.header.size > self.header.data:
            with path.open("rb") as file:
                # Copy-on-write, so that torch gets a writable buffer; nothing here writes to it.
                self._map = mmap.mmap(file.fileno(), self.header.size, access=mmap.ACCESS_COPY)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, as a view of the file."""
        stored = self.header.tensors[name]
        raw = self._bytes[self.header.data + stored.start : self.header.data + stored.stop]
        if raw.numel() == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        if raw.data_ptr() % stored.dtype.itemsize:
            raw = raw.clone()  # a header padded oddly by another writer
        return raw.view(stored.dtype).reshape(stored.shape)

    def changed(self) -> bool:
        """Whether the file at the path is another one than was opened, or was written to."""
        return _stamp(self.path) != self._stamp

    def release(self) -> None:
        """Give back the memory of the pages read so far; they are read again when touched again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class TensorFileWriter:
    """Writes a file tensor by tensor in the order of its header, and hashes it on the way."""

    def __init__(self, path: Path, header: Header, *, digest: bool = True) -> None:
        self.path = path
        self.header = header
        self._hash = hashlib.sha256() if digest else None
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._done = 0
        self._write(memoryview(header.encoded))

    def write(self, tensor: Tensor) -> int:
        """Append the bytes of a tensor, or of a run of its first dim; the number of bytes written."""
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel() == 0:
            return 0
        return self._write(flat.view(torch.uint8).numpy().data)

    def close(self) -> File:
        """Force the file to the disk; its size and hash."""
        if self._done != self.header.size:
            raise AssertionError(f"{self.path}: {self._done} of {self.header.size} bytes written")
        os.fsync(self._file.fileno())
        self._file.close()
        return File(self._done, self._hash.hexdigest() if self._hash else "")

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()

    def _write(self, data: memoryview) -> int:
        if self._hash is not None:
            self._hash.update(data)
        at = 0
        while at < len(data):
            at += self._file.write(data[at:])
        self._done += at
        return at


def hash_file(path: Path, step: Callable[[int], None] | None = None) -> File:
    """The size and sha256 of a file, read in pieces; ``step`` gets the bytes of each piece."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(4 << 20):
                digest.update(chunk)
                size += len(chunk)
                if step is not None:
                    step(len(chunk))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    return File(size, digest.hexdigest())


def full_disk(error: OSError) -> bool:
    """Whether the system had no room left for a write."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def load_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``.bin`` or ``.pt`` file, unpickled with ``weights_only``, mapped where the format allows it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the format before zip files cannot be mapped
                data = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file.") from None
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path}: refused: it is damaged, or holds more than tensors ({first[:160]}).",
            hint="Save it as safetensors, or as a plain dict of tensors.",
        ) from None
    if isinstance(data, dict) and isinstance(data.get("state_dict"), dict):
        data = data["state_dict"]
    if not isinstance(data, dict) or not all(isinstance(v, Tensor) for v in data.values()):
        raise CheckpointError(f"{path}: not a dict of tensors.", hint="Save it as a plain state_dict.")
    return {str(name): tensor.detach() for name, tensor in data.items()}


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
    return Stored(dtype, shape, start, stop)
