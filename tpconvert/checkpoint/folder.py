"""A folder of rank files: written whole or not at all, opened lazily, checked against its manifest.

A new folder is filled under a hidden name beside its place and renamed when complete; the manifest is written last.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from tpconvert.checkpoint.files.digest import hash_file
from tpconvert.checkpoint.files.header import NAMES, dtype_name
from tpconvert.checkpoint.files.missing import no_manifest, not_a_folder
from tpconvert.checkpoint.files.tensorfile import TensorFile, full_disk
from tpconvert.checkpoint.plans import plan_of_folder
from tpconvert.checkpoint.tensors.store import inside
from tpconvert.errors import CheckpointError
from tpconvert.spec import manifest
from tpconvert.spec.manifest import LONGEST, Manifest
from tpconvert.spec.plan import Plan

EXTRA_GROUP = "extra"
EXTRA = f"{EXTRA_GROUP}.safetensors"
"""In the first rank's folder: tensors of the source that the module has no use for."""
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_EXCHANGE = 2


def rank_folder(rank: int, degree: int) -> str:
    """``rank-00000-of-00004``."""
    return f"rank-{rank:05d}-of-{degree:05d}"


def partial_path(out: Path) -> Path:
    """The hidden folder in which ``out`` is prepared."""
    out = absolute(out)
    return out.with_name(f".{out.name}.partial")


def absolute(path: Path) -> Path:
    """The path with its links resolved, so that it has a name and a parent."""
    return Path(path).expanduser().resolve()


class NewFolder:
    """A folder that appears at ``out`` complete, on :meth:`commit`, or not at all.

    ``keep`` are folders that are being read: ``out`` may not replace or contain them.
    """

    def __init__(self, out: Path, *, force: bool = False, keep: tuple[Path, ...] = ()) -> None:
        self.out = absolute(out)
        self._force = force
        self._lock = -1
        _check_target(self.out, force, tuple(map(absolute, keep)))
        self.path = partial_path(out)

    def __enter__(self) -> NewFolder:
        try:
            self._lock = _claim(self.path, self.out)
        except OSError as error:
            raise CheckpointError(f"{self.out}: cannot be written here ({error.strerror}).") from None
        return self

    def require(self, size: int) -> None:
        """Refuse at once what the disk has no room for."""
        free = shutil.disk_usage(self.path).free
        if size > free:
            raise CheckpointError(
                f"{self.out}: {size:,} bytes are to be written, but the disk has {free:,} left.",
                hint="Free some space, or write elsewhere.",
            )

    def commit(self) -> None:
        """Put the finished folder in its place, in one step; the one it replaces is removed after."""
        for folder, _, _ in os.walk(self.path):
            sync_folder(Path(folder))
        try:
            if not (self.out.exists() and any(self.out.iterdir())):
                self.path.rename(self.out)
            elif self._force:
                _replace(self.path, self.out)
            else:
                raise CheckpointError(f"{self.out}: another process has written it meanwhile. Nothing was changed.")
        except OSError as error:
            raise CheckpointError(f"{self.out}: cannot be put in place ({error.strerror}).") from None
        sync_folder(self.out.parent)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        if isinstance(error, OSError):
            if full_disk(error):
                raise CheckpointError(
                    f"{self.out}: the disk is full. Nothing was written.", hint="Free some space, or write elsewhere."
                ) from None
            where = f" at {error.filename}" if error.filename else ""
            raise CheckpointError(f"{self.out}: not written: {error.strerror or error}{where}.") from None


class RankFolder:
    """An opened folder of rank files: its manifest, and every tensor of every rank as a view of its file."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self._files: dict[tuple[int, str], list[TensorFile]] = {}

    def tensor(self, rank: int, group: str, name: str) -> Tensor:
        """The local tensor; ``group`` is empty for the module's own."""
        return self.file(rank, group, name).tensor(name)

    def file(self, rank: int, group: str, name: str) -> TensorFile:
        """The open file that holds a tensor."""
        for file in self.files(rank, group):
            if name in file.header.tensors:
                return file
        raise CheckpointError(f"{self.path / rank_folder(rank, self.manifest.tp)}: holds no tensor named {name}.")

    def files(self, rank: int, group: str) -> list[TensorFile]:
        """The open files of one rank and group, their headers checked against the manifest."""
        if (rank, group) not in self._files:
            paths = [inside(self.path, name) for name in group_files(self.manifest, rank, group)]
            opened = [TensorFile(path) for path in paths]
            for file in opened:
                self._check(file, rank, group)
            self._files[rank, group] = opened
        return self._files[rank, group]

    def check_unchanged(self) -> None:
        """Raise if a file was written to or replaced since it was opened."""
        for file in (file for files in self._files.values() for file in files):
            file.check_unchanged()

    def release(self) -> None:
        """Give back what is held for reading."""
        for files in list(self._files.values()):
            for file in files:
                file.release()

    def _check(self, file: TensorFile, rank: int, group: str) -> None:
        tp, listed = self.manifest.tp, self.manifest.files[file.path.relative_to(self.path).as_posix()]
        found = file.header.metadata.get("rank"), file.header.metadata.get("tp")
        if found != (str(rank), str(tp)):
            raise CheckpointError(f"{file.path}: holds rank {found[0]} of {found[1]}, not {rank} of {tp}: swapped.")
        if file.header.size != listed.size:
            raise CheckpointError(
                f"{file.path}: {file.header.size} bytes, but the manifest says {listed.size}: damaged."
            )
        if group == EXTRA_GROUP:
            return
        entries = self.manifest.groups[group] if group else self.manifest.tensors
        for name, stored in file.header.tensors.items():
            entry = entries.get(name)
            if entry is None:
                raise CheckpointError(f"{file.path}: holds the tensor {name}, which the manifest does not have.")
            shape = entry.layout.local_shape(entry.shape, rank, tp)
            if (stored.shape, dtype_name(stored.dtype)) != (shape, entry.dtype):
                raise CheckpointError(
                    f"{file.path}: {name} is {dtype_name(stored.dtype)} {list(stored.shape)}, "
                    f"but the manifest says {entry.dtype} {list(shape)}: from another folder?"
                )


def group_files(held: Manifest, rank: int, group: str) -> list[str]:
    """The files of one rank that hold a group's tensors."""
    start, stem = f"{rank_folder(rank, held.tp)}/", group or "model"
    names = (name for name in held.files if name.startswith(start) and name.endswith(".safetensors"))
    return [n for n in names if _SPLIT.sub("", n.removeprefix(start).removesuffix(".safetensors")) == stem]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder of rank files; otherwise an error that says what the folder is."""
    folder = Path(folder)
    path = folder / manifest.NAME
    if not folder.is_dir():
        raise not_a_folder(folder)
    try:
        if (size := path.stat().st_size) > LONGEST:
            raise CheckpointError(f"{path}: {size:,} bytes, which no manifest has: refused.", hint=manifest.AGAIN)
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise no_manifest(folder) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).", hint=manifest.AGAIN) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: damaged: not JSON (byte {error.start} is no UTF-8).", hint=manifest.AGAIN
        ) from None
    made = Manifest.loads(text, str(path))
    for entries in (made.tensors, *made.groups.values()):
        for name, entry in entries.items():
            if getattr(torch, entry.dtype, None) not in NAMES:
                raise CheckpointError(
                    f"{path}: {name} has the unknown dtype {entry.dtype!r}: damaged.", hint=manifest.AGAIN
                )
    return made


def read_plan(folder: Path, held: Manifest | None = None) -> Plan:
    """The plan kept in a folder of rank files, whose manifest is ``held`` where it was read already."""
    return plan_of_folder(Path(folder), held or read_manifest(folder))


def check_folder(folder: Path) -> list[str]:
    """The faults of a folder of rank files, each one line that names the file; empty when every byte is as written."""
    folder = Path(folder)
    held = read_manifest(folder)
    faults = [fault for name in held.files for fault in check_file(folder, held, name)]
    found = {path.relative_to(folder).as_posix() for path in _rank_files(folder)}
    faults += [f"{name}: not in the manifest." for name in sorted(found - set(held.files))]
    if faults:
        return faults
    try:
        opened = RankFolder(folder)
        for rank in range(held.tp):
            for group, entries in (("", held.tensors), *held.groups.items()):
                stored = {name for file in opened.files(rank, group) for name in file.header.tensors}
                faults += [f"{rank_folder(rank, held.tp)}: {n} is missing." for n in sorted(set(entries) - stored)]
    except CheckpointError as error:
        faults.append(str(error))
    return faults


def check_file(folder: Path, held: Manifest, name: str, *, sizes_only: bool = False) -> list[str]:
    """What is wrong with one file of the folder: nothing, or one line."""
    path, listed = folder / name, held.files[name]
    if not path.is_file():
        return [f"{name}: missing."]
    if (size := path.stat().st_size) != listed.size:
        return [f"{name}: {size} bytes, but {listed.size} were written: cut short or replaced."]
    if not sizes_only and hash_file(path, listed.kind).digest != listed.digest:
        return [f"{name}: its {listed.kind} is not the one written: a byte has changed."]
    return []


def raise_fault(folder: Path, held: Manifest, names: Iterable[str], *, sizes_only: bool = False) -> None:
    """Raise for the first of the named files that is not as it was written."""
    for name in names:
        for fault in check_file(folder, held, name, sizes_only=sizes_only):
            raise CheckpointError(f"{folder}: {fault}", hint="Restore the file, or make the folder again.")


def read_complete(folder: Path) -> tuple[Manifest, Plan]:
    """Manifest and plan of a folder whose files are all there, and as long as they were."""
    held = read_manifest(folder)
    plan = read_plan(folder, held)
    raise_fault(Path(folder), held, held.files, sizes_only=True)
    return held, plan


def write_text(path: Path, text: str) -> None:
    """Write a small file and force it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(folder: Path, made: Manifest) -> None:
    """Write the manifest, which is there whole or not at all."""
    half = folder / f".{manifest.NAME}"
    write_text(half, made.dumps())
    half.rename(folder / manifest.NAME)


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rank_files(folder: Path) -> Iterator[Path]:
    for rank in folder.glob("rank-*-of-*"):
        yield from (path for path in rank.rglob("*") if path.is_file())


def _check_target(out: Path, force: bool, keep: tuple[Path, ...]) -> None:
    for held in keep:
        if out == held or held.is_relative_to(out):
            raise CheckpointError(f"{out}: is being read, so it cannot be written to.", hint="Choose another output.")
    if not out.name:
        raise CheckpointError(f"{out}: is no name for a folder.", hint="Choose another output.")
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"{out}: exists and is a file.", hint="Choose another output.")
    if not any(out.iterdir()):
        return
    if not force:
        raise CheckpointError(f"{out}: exists already.", hint="Use --force to replace it, or choose another output.")
    if not any(any(out.glob(sign)) for sign in (manifest.NAME, "config.json", "*.safetensors", "rank-*-of-*")):
        raise CheckpointError(f"{out}: is no checkpoint, so it is not replaced.", hint="Choose another output.")


def _claim(partial: Path, out: Path) -> int:
    """The partial folder, empty and locked; what a killed run left in it is removed."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        fd = os.open(partial, os.O_RDONLY)
        with contextlib.suppress(OSError):  # of a file system without locks
            if not _lock(fd):
                os.close(fd)
                raise CheckpointError(f"{out}: another process is writing it now.", hint="Wait for it to end.")
        if partial.exists() and partial.stat().st_ino == os.fstat(fd).st_ino:
            break
        os.close(fd)  # its owner renamed or removed it between our two steps
    for item in partial.iterdir():
        shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
    return fd


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _replace(new: Path, old: Path) -> None:
    """Swap two folders, in one step where the system can: the old one is then at ``new``, and there is never none."""
    libc = ctypes.CDLL(None, use_errno=True)
    swap = getattr(libc, "renameat2", None)
    if swap is not None and swap(-100, os.fsencode(new), -100, os.fsencode(old), _EXCHANGE) == 0:
        return
    aside = new.with_name(f".{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)
