"""One safetensors file: its tensors as views of a map or read in pieces, and a streaming writer."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import warnings
import weakref
import zipfile
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor

from tpconvert.checkpoint.files.digest import Digest, best_kind
from tpconvert.checkpoint.files.header import Header, read_header
from tpconvert.checkpoint.tensors.compose import Box, flat_range, part_of, run_around
from tpconvert.errors import CheckpointError
from tpconvert.spec.manifest import File

LARGEST_BUFFER = 16 << 20
"""Larger ones come fresh, so that what is kept for use again stays small."""
START_EVERY = 64 << 20
"""Bytes after which the disk is told to begin."""
_SYNC_FILE_RANGE_WRITE = 2
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class TensorFile:
    """A safetensors file: tensors are views of a map, which cost no memory until they are touched, or are read.

    What is read costs memory of its own, but a file that is cut short meanwhile is an error then, not a crash.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = stamp(path)
        self.header = read_header(path)
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._open: _Descriptor | None = None

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, as a view of the file."""
        stored = self.header.tensors[name]
        if stored.start == stored.stop:
            return torch.empty(stored.shape, dtype=stored.dtype)
        if self._map is None:
            with self.path.open("rb") as file:
                # Copy-on-write, so that torch gets a writable buffer; nothing here writes to it, so none is reserved.
                flags = mmap.MAP_PRIVATE | _NO_RESERVE
                self._map = mmap.mmap(file.fileno(), self.header.size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        raw = self._bytes[self.header.data + stored.start : self.header.data + stored.stop]
        if raw.data_ptr() % stored.dtype.itemsize:
            raw = raw.clone()  # a header padded oddly by another writer
        return raw.view(stored.dtype).reshape(stored.shape)

    def read(self, name: str, box: Box, buffers: Buffers | None = None) -> Tensor:
        """A box of a tensor, read into memory; best one run of elements, since all between its ends is read."""
        stored = self.header.tensors[name]
        around = run_around(stored.shape, box)
        start, stop = (n * stored.dtype.itemsize for n in flat_range(stored.shape, around))
        into = (buffers or Buffers()).take(stop - start)
        self._fill(into, self.header.data + stored.start + start)
        whole = into.view(stored.dtype).reshape([high - low for low, high in around])
        return whole if around == box else part_of(whole, box, around)

    def check_unchanged(self) -> None:
        """Raise if the file at the path is another one than was opened, or was written to."""
        check_stamp(self.path, self._stamp)

    def release(self) -> None:
        """Give back the memory of pages seen so far and the open file; they are taken again when needed."""
        self._open = None
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _fill(self, into: Tensor, at: int) -> None:
        view, got = into.numpy().data, 0
        try:
            held = self._open = self._open or _Descriptor(self.path)
            while got < len(view):
                count = os.preadv(held.number, [view[got:]], at + got)
                if not count:
                    raise CheckpointError(
                        f"{self.path}: was cut short while it was read.", hint="Run the command again."
                    )
                got += count
        except OSError as error:
            self.check_unchanged()
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror}).") from None


class Buffers:
    """Memory that is used again once nothing refers to it: fresh pages cost as much as reading into them."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}

    def take(self, size: int) -> Tensor:
        """That many bytes of any value."""
        if not 4096 <= size <= LARGEST_BUFFER:
            return torch.empty(size, dtype=torch.uint8)
        free = self._free.setdefault(1 << (size - 1).bit_length(), [])
        try:
            whole = free.pop()
        except IndexError:
            whole = numpy.empty(1 << (size - 1).bit_length(), dtype=numpy.uint8)
        part = whole[:size]
        weakref.finalize(part, free.append, whole).atexit = False  # a tensor of it, and each view, keeps it alive
        return torch.from_numpy(part)

    def packed(self, tensor: Tensor) -> Tensor:
        """The same elements, lying together."""
        if tensor.is_contiguous():
            return tensor
        into = self.take(tensor.nbytes).view(tensor.dtype).reshape(tensor.shape)
        try:  # by numpy, which copies in this thread alone: torch would wake others, which wait by spinning
            numpy.copyto(into.numpy(), tensor.numpy())
        except TypeError:  # a dtype that numpy has not
            into.copy_(tensor)
        return into


class _Descriptor:
    """An open file that is closed when its last user, in whichever thread, is done with it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class TensorFileWriter:
    """Writes a file tensor by tensor in the order of its header, and hashes it on the way."""

    def __init__(self, path: Path, header: Header, *, digest: bool = True) -> None:
        self.path = path
        self.header = header
        self.digest = digest
        self._hash = Digest(best_kind())
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._done = self._started = 0
        self._begin()

    def write(self, tensor: Tensor) -> int:
        """Append the bytes of a tensor, or of a run of its first dim; the number of bytes written."""
        return self._put(flat_bytes(tensor))

    def _begin(self) -> None:
        try:
            allocate(self._file.fileno(), self.header.size)
            self._put(memoryview(self.header.encoded))
        except BaseException:
            self.abandon()  # nobody has the writer yet who could
            raise

    def _put(self, data: memoryview) -> int:
        if self.digest:
            self._hash.update(data)
        at = 0
        while at < len(data):
            at += self._write(data[at:])
        self._done += at
        if self._done - self._started >= START_EVERY:
            start_writing(self._file.fileno(), self._started, self._done - self._started)
            self._started = self._done
        return at

    def close(self) -> File:
        """Force the file to the disk; its size and hash."""
        if self._done != self.header.size:
            raise AssertionError(f"{self.path}: {self._done} of {self.header.size} bytes written")
        os.fsync(self._file.fileno())
        self._file.close()
        return File(self._done, self._hash.text if self.digest else "")

    def abandon(self) -> None:
        """Close the file as it is; no harm after :meth:`close`."""
        self._file.close()

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.abandon()

    def _write(self, data: memoryview) -> int:
        return self._file.write(data)


def flat_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; a copy of them where they do not lie together."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def allocate(descriptor: int, size: int) -> None:
    """Have the file system set the room aside, where it can: writing costs less then, and a full disk is known now."""
    begin = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if begin is not None and size and begin(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if full_disk(error):
            raise error


def start_writing(descriptor: int, start: int, count: int) -> None:
    """Have the disk begin to write a range of a file, where the system can: forcing it out at the end takes less."""
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(descriptor, ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def full_disk(error: OSError) -> bool:
    """Whether the system had no room left for a write."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def load_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``.bin`` or ``.pt`` file, unpickled with ``weights_only``, mapped where the format allows it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check_unpacked(path)
            try:
                data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the format before zip files cannot be mapped
                data = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file.") from None
    except Exception as error:
        lines = [line for line in str(error).strip().splitlines() if not line.startswith("Weights only load failed")]
        first = lines[0].strip() if lines else type(error).__name__
        raise CheckpointError(
            f"{path}: refused: it is damaged, or holds more than tensors ({first[:160]}).",
            hint="Save it as safetensors, or as a plain dict of tensors.",
        ) from None
    if isinstance(data, dict) and isinstance(data.get("state_dict"), dict):
        data = data["state_dict"]
    if not isinstance(data, dict) or not all(_is_plain(v) for v in data.values()):
        raise CheckpointError(f"{path}: not a dict of tensors.", hint="Save it as a plain state_dict.")
    return {str(name): tensor.detach() for name, tensor in data.items()}


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_meta)


def _check_unpacked(path: Path) -> None:
    """Raise for a zip whose entries are compressed: torch writes none, and a few bytes could become any number."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as held:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in held.infolist()):
            raise ValueError("a zip of compressed entries")


def check_stamp(path: Path, before: tuple[int, ...]) -> None:
    """Raise if a file is no longer what it was."""
    if stamp(path) != before:
        what = "changed" if path.exists() else "vanished"
        raise CheckpointError(f"{path}: {what} while it was read.", hint="Run the command again.")


def stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file is written to or replaced; empty where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
