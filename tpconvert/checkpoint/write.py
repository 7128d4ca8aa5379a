"""Writes the files of a folder from recipes, in bounded memory, several files at a time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tpconvert.checkpoint.files.digest import hash_file
from tpconvert.checkpoint.files.header import Header, make_header, nbytes, sort_key
from tpconvert.checkpoint.files.pipe import Meter, Outlet, Pipe, Progress
from tpconvert.checkpoint.files.tensorfile import Buffers, TensorFileWriter
from tpconvert.checkpoint.folder import write_text
from tpconvert.checkpoint.tensors.compose import Box, compose_runs, part_of, run_around, split_of
from tpconvert.checkpoint.tensors.store import INDEX, write_index
from tpconvert.spec.manifest import File
from tpconvert.spec.recipe import Recipe, Shape, takes

RUN = 1 << 20
"""Bytes of one file that are read at a time: few, so that they are still in the processor's cache when written."""
ROUND = 8 << 20
"""The same of all files together."""
LEAST_KEPT = 64 << 20
MAX_FILE = 5_000_000_000


class Source(Protocol):
    """What tensors are read from."""

    def info(self, name: str) -> tuple[Shape, torch.dtype]:
        """Shape and dtype."""

    def box(self, name: str, box: Box, buffers: Buffers | None = None) -> Tensor:
        """The elements of a box, in memory taken from ``buffers``."""

    def release(self) -> None:
        """Give back what is held for reading."""


@dataclass(frozen=True, slots=True)
class Target:
    """One file to write: its path in the folder, its header, and what each tensor in it is made of."""

    path: str
    header: Header
    recipes: Mapping[str, Recipe]
    group: str = ""
    """Targets of one group hold parts of the same tensors in the same order, and are written side by side."""


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
        out.append(Target(f"{folder}/{name}.safetensors", header, group, stem))
    return out


def index_of(targets: Sequence[Target]) -> str:
    """The text of the index of several files of one folder."""
    weight_map = {name: Path(t.path).name for t in targets for name in t.header.tensors}
    return write_index(weight_map, sum(t.header.size - t.header.data for t in targets))


def write_targets(
    folder: Path,
    targets: Sequence[Target],
    source: Source,
    *,
    progress: Progress | None = None,
    digest: bool = True,
    beside: Iterable[Callable[[], Any]] = (),
) -> dict[str, File]:
    """Write every target; path -> size and hash.  Nothing is read twice, written twice or hashed twice.

    What goes on ``beside`` has ended when this returns; it fails with the first error of either.
    """
    groups: dict[str, list[Target]] = {}
    for target in targets:
        groups.setdefault(target.group, []).append(target)
    for parent in {(folder / t.path).parent for t in targets}:
        parent.mkdir(parents=True, exist_ok=True)
    files: dict[str, Outlet] = {}
    with Pipe(Meter(sum(t.header.size for t in targets), progress, source.release)) as pipe:
        readers = (partial(_write_group, folder, group, source, pipe, digest, files) for group in groups.values())
        pipe.run(readers, beside)
    return {t.path: files[t.path].file for t in targets}


def _write_group(
    folder: Path, targets: Sequence[Target], source: Source, pipe: Pipe, digest: bool, files: dict[str, Outlet]
) -> None:
    """Read tensor by tensor, each for all the files that hold a part of it, which go side by side."""
    holders: dict[str, list[Target]] = {}
    for target in targets:
        for name in target.header.tensors:
            holders.setdefault(name, []).append(target)
    left = {target.path: len(target.header.tensors) for target in targets}

    def outlet(target: Target) -> Outlet:
        if target.path not in files:
            files[target.path] = pipe.open(lambda: TensorFileWriter(folder / target.path, target.header, digest=digest))
        return files[target.path]

    for target in targets:
        if not left[target.path]:
            outlet(target).end()
    buffers = Buffers()
    for name, those in holders.items():
        _write_tensor(name, those, Covers(source, buffers), [outlet(target) for target in those])
        for target in those:
            left[target.path] -= 1
            if not left[target.path]:
                files[target.path].end()


def _write_tensor(name: str, targets: Sequence[Target], covers: Covers, outlets: Sequence[Outlet]) -> None:
    """Read one tensor run by run, and hand each file its part; what several files hold alike is read once."""
    recipes = [t.recipes[name] for t in targets]
    stored = targets[0].header.tensors[name].dtype
    made = covers.source.info(takes(recipes[0])[0].name)[1]
    covers.start(sum(nbytes(r.shape, made) for r in recipes))
    limit = min(max(ROUND // len(targets), RUN // 2), RUN)
    split = split_of([r.shape for r in recipes], made.itemsize, limit)
    for boxes in zip_longest(*(split.boxes(r.shape) for r in recipes)):
        pieces: dict[tuple[int, Box], list[Tensor]] = {}
        for outlet, recipe, box in zip(outlets, recipes, boxes, strict=True):
            if box is None:
                continue
            key = id(recipe), box
            if key not in pieces:
                runs = compose_runs(recipe, box, covers.box)
                pieces[key] = [covers.buffers.packed(_cast(run, made, stored)) for run in runs]
            outlet.put(pieces[key])


class Covers:
    """Reads boxes; of one that lies scattered, all between its ends, which is kept for the others that lie there."""

    def __init__(self, source: Source, buffers: Buffers) -> None:
        self.source = source
        self.buffers = buffers
        self._limit = 0
        self._kept: OrderedDict[tuple[str, Box], Tensor] = OrderedDict()
        self._size = 0

    def start(self, size: int) -> None:
        """Forget what was kept, and keep up to ``size`` bytes or a few."""
        self._limit = max(size, LEAST_KEPT)
        self._kept.clear()
        self._size = 0

    def box(self, name: str, box: Box) -> Tensor:
        """The elements of a box, of a tensor that is read where it is stored."""
        around = run_around(self.source.info(name)[0], box)
        if around == box:
            return self.source.box(name, box, self.buffers)
        key = name, around
        if key not in self._kept:
            self._kept[key] = self.source.box(name, around, self.buffers)
            self._size += self._kept[key].nbytes
            while self._size > self._limit and len(self._kept) > 1:
                self._size -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(key)
        return part_of(self._kept[key], box, around)


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
