"""Writes the files of a folder from recipes, in bounded memory, several files at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from tpconvert.checkpoint.compose import Leaf, compose, runs
from tpconvert.checkpoint.folder import write_text
from tpconvert.checkpoint.store import INDEX, write_index
from tpconvert.checkpoint.tensorfile import Header, TensorFileWriter, hash_file, make_header, nbytes, sort_key
from tpconvert.spec.manifest import File
from tpconvert.spec.recipe import Recipe, takes

RUN = 16 << 20
"""Bytes composed and written at a time."""
RELEASE_EVERY = 32 << 20
"""Bytes written between two releases of the pages read."""
MAX_FILE = 5_000_000_000

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True, slots=True)
class Target:
    """One file to write: its path in the folder, its header, and what each tensor in it is made of."""

    path: str
    header: Header
    recipes: Mapping[str, Recipe]


def split_targets(
    folder: str,
    stem: str,
    recipes: Mapping[str, Recipe],
    dtypes: Mapping[str, torch.dtype],
    metadata: Mapping[str, str],
    max_file: int = MAX_FILE,
) -> list[Target]:
    """The files for a set of tensors: ``stem.safetensors``, or several numbered ones of up to ``max_file`` bytes."""
    groups: list[dict[str, Recipe]] = [{}]
    size = 0
    for name in sorted(recipes, key=lambda n: sort_key(n, dtypes[n])):
        more = nbytes(recipes[name].shape, dtypes[name])
        if groups[-1] and size + more > max_file:
            groups.append({})
            size = 0
        groups[-1][name] = recipes[name]
        size += more
    out = []
    for i, group in enumerate(groups, 1):
        name = stem if len(groups) == 1 else f"{stem}-{i:05d}-of-{len(groups):05d}"
        header = make_header({n: (r.shape, dtypes[n]) for n, r in group.items()}, metadata)
        out.append(Target(f"{folder}/{name}.safetensors", header, group))
    return out


def index_of(targets: Sequence[Target]) -> str:
    """The text of the index of several files of one folder."""
    weight_map = {name: Path(t.path).name for t in targets for name in t.header.tensors}
    return write_index(weight_map, sum(t.header.size - t.header.data for t in targets))


def write_targets(
    folder: Path,
    targets: Sequence[Target],
    leaf: Leaf,
    *,
    release: Callable[[], None],
    progress: Progress | None = None,
    digest: bool = True,
) -> dict[str, File]:
    """Write every target; path -> size and hash.  Two files at a time, since one waits while the other computes."""
    meter = Meter(sum(t.header.size for t in targets), progress, release)
    for parent in {(folder / t.path).parent for t in targets}:
        parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        jobs = {t.path: pool.submit(_write_target, folder, t, leaf, meter, digest) for t in targets}
        try:
            done, _ = wait(jobs.values(), return_when=FIRST_EXCEPTION)
            for job in done:
                job.result()
        except BaseException:
            meter.stopped = True
            pool.shutdown(cancel_futures=True)
            raise
    return {path: job.result() for path, job in jobs.items()}


class Meter:
    """Counts bytes for all threads, tells the caller, and frees pages now and then."""

    def __init__(self, total: int, progress: Progress | None, release: Callable[[], None]) -> None:
        self.total = total
        self.stopped = False
        self._progress = progress
        self._release = release
        self._lock = Lock()
        self._done = 0
        self._released = 0

    def add(self, count: int) -> None:
        """Count bytes as done."""
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self.total)
            if self._done - self._released >= RELEASE_EVERY:
                self._released = self._done
                self._release()


class Stopped(Exception):  # noqa: N818 - not an error: another thread has one
    """Ends a thread whose sibling failed."""


def _write_target(folder: Path, target: Target, leaf: Leaf, meter: Meter, digest: bool) -> File:
    with TensorFileWriter(folder / target.path, target.header, digest=digest) as writer:
        meter.add(target.header.data)
        for name, stored in target.header.tensors.items():
            recipe = target.recipes[name]
            made = leaf(takes(recipe)[0].name).dtype
            for box in runs(stored.shape, stored.dtype.itemsize, RUN):
                if meter.stopped:
                    raise Stopped
                meter.add(writer.write(_cast(compose(recipe, box, leaf), made, stored.dtype)))
        return writer.close()


def _cast(value: Tensor, made: torch.dtype, wanted: torch.dtype) -> Tensor:
    """The composed integers as bytes of the wanted dtype: the same bits, unless the tensor was trained in another."""
    return value if made == wanted else value.contiguous().view(made).to(wanted)


def write_index_file(folder: Path, targets: Sequence[Target], stem: str) -> dict[str, File]:
    """The index beside several files of one rank; nothing for one file."""
    if len(targets) < 2:
        return {}
    path = f"{Path(targets[0].path).parent.as_posix()}/{stem}.safetensors{INDEX}"
    write_text(folder / path, index_of(targets))
    return {path: hash_file(folder / path)}


def copy_files(pairs: Iterable[tuple[Path, Path]]) -> None:
    """Copy small files, each forced to the disk; a link becomes the file it leads to."""
    for source, target in pairs:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as read, target.open("xb") as write:
            while chunk := read.read(4 << 20):
                write.write(chunk)
            write.flush()
            os.fsync(write.fileno())
