"""Hashes of files, each written with its kind before it: ``blake3:5f70...``.

BLAKE3 is as hard to forge as sha256 and several times as fast, so that hashing is not what a copy waits for.  Without
its package sha256 is used, and read it is in either case: folders of before have nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpconvert.errors import CheckpointError
from tpconvert.spec.manifest import SHA256, File

BLAKE3 = "blake3"
PIECE = 1 << 20


class Digest:
    """A hash in the making."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._hash = _maker(kind)()

    def update(self, data: memoryview) -> None:
        """Take more bytes."""
        self._hash.update(data)

    @property
    def text(self) -> str:
        """The kind and the hash of all bytes taken."""
        return f"{self.kind}:{self._hash.hexdigest()}"


def best_kind() -> str:
    """The kind that new files are hashed with."""
    return SHA256 if _blake3() is None else BLAKE3


def can_hash(kind: str) -> bool:
    """Whether hashes of a kind can be made here."""
    return kind != BLAKE3 or _blake3() is not None


def hash_file(path: Path, kind: str = "") -> File:
    """The size and hash of a file, read in pieces."""
    digest, size, piece = Digest(kind or best_kind()), 0, memoryview(bytearray(PIECE))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                digest.update(piece[:count])
                size += count
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    return File(size, digest.text)


def _maker(kind: str) -> Callable[[], Any]:
    if kind == SHA256:
        return hashlib.sha256
    if kind != BLAKE3:
        raise CheckpointError(f"The manifest has hashes of the kind {kind!r}, which this version does not know.")
    maker = _blake3()
    if maker is None:
        raise CheckpointError("The files are hashed with BLAKE3, whose package is missing.", hint="pip install blake3")
    return maker


def _blake3() -> Callable[[], Any] | None:
    try:
        from blake3 import blake3
    except ImportError:  # no wheel for this machine
        return None
    made: Callable[[], Any] = blake3
    return made
