"""shard, merge and reshard: one function that reads pieces at one degree and writes them at another.

Each file to write is a list of recipes over files that are there, found by substitution::

    shard     rank piece  <- module tensor <- stored tensors of the source
    reshard   rank piece  <- module tensor <- pieces of the other degree
    merge     stored tensor <- module tensor <- rank pieces
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tpconvert.checkpoint.files.digest import hash_file
from tpconvert.checkpoint.files.header import dtype_name, make_header, parse_header
from tpconvert.checkpoint.files.pipe import Progress
from tpconvert.checkpoint.files.tensorfile import Buffers, TensorFile
from tpconvert.checkpoint.folder import (
    EXTRA,
    EXTRA_GROUP,
    NewFolder,
    RankFolder,
    absolute,
    raise_fault,
    rank_folder,
    read_complete,
    write_manifest,
    write_text,
)
from tpconvert.checkpoint.tensors.compose import Box, Leaf
from tpconvert.checkpoint.tensors.pieces import first_holders
from tpconvert.checkpoint.tensors.store import INDEX, inside
from tpconvert.checkpoint.tensors.weights import Weights, tie
from tpconvert.checkpoint.write import (
    MAX_FILE,
    Target,
    copy_files,
    index_of,
    split_targets,
    write_index_file,
    write_targets,
)
from tpconvert.errors import CheckpointError, PlanError
from tpconvert.spec import manifest
from tpconvert.spec.manifest import Entry, File, Manifest
from tpconvert.spec.plan import NAME as PLAN
from tpconvert.spec.plan import Plan
from tpconvert.spec.recipe import Join, Narrow, Recipe, Shape, Take, substitute

_AT = "\0"


def shard(
    source: Weights,
    plan: Plan,
    out: Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
    max_file: int = MAX_FILE,
) -> Manifest:
    """Write OUT: one folder of safetensors a rank, plan.json, the source's other files, and manifest.json last."""
    source = tie(source, {v.name: v.tied_to for v in plan.verdicts if v.tied_to and v.persistent})
    entries = plan_entries(source, plan)
    original = source.original()
    known = source.source | {key: plan.source[key] for key in ("name", "revision") if plan.source.get(key)}
    made = Manifest(tp=plan.tp, tensors=entries, tied=source.tied, original=original, source=known)
    targets = rank_targets(entries, {n: source.recipes[n] for n in entries}, plan.tp, max_file=max_file)
    if original.extra:
        targets.append(_extra_target({n: source.store.info(n) for n in original.extra}, plan.tp))
    root = source.store.root
    with NewFolder(out, force=force, keep=() if root is None else (root,)) as new:
        new.require(sum(t.header.size for t in targets))
        files = write_targets(new.path, targets, source.store, progress=progress)
        source.store.check_unchanged()
        files |= _write_indexes(new.path, targets)
        if root is not None:
            copy_files((root / path, new.path / at) for path, at in original.copied.items())
        return _finish(new, made, plan, files, original.copied.values())


def merge(
    folder: Path, out: Path, *, force: bool = False, progress: Progress | None = None, check: bool = False
) -> None:
    """Write OUT: one ordinary checkpoint with the source's names, dtypes, file split and header bytes.

    ``check`` compares every file read with its hash in the manifest, too: OUT appears only if all are as written.
    """
    held = _open(folder)
    original = held.manifest.original
    if held.manifest.tensors and not original.files:
        raise CheckpointError(
            f"{held.path / manifest.NAME}: names no file of a source, so there is nothing to give back.",
            hint="Copy it again from where it was made, or shard the source again.",
        )
    targets = []
    for file in original.files:
        header = parse_header(file.header, None, f"{held.path / manifest.NAME}: {file.name}")
        recipes = {name: _stored_recipe(held, name) for name in header.tensors}
        for name, stored in header.tensors.items():
            if recipes[name].shape != stored.shape:
                raise CheckpointError(
                    f"{held.path}: {name} is {list(recipes[name].shape)} here, but the source's file says "
                    f"{list(stored.shape)}: the manifest is damaged or foreign."
                )
        targets.append(Target(file.name, header, recipes, file.name))
    with NewFolder(out, force=force, keep=(held.path,)) as new:
        new.require(sum(t.header.size for t in targets))
        write_targets(new.path, targets, Pieces(held), progress=progress, digest=False, beside=_checks(held, check))
        held.check_unchanged()
        if len(targets) > 1 and not any(path.endswith(f".safetensors{INDEX}") for path in original.copied):
            write_text(new.path / f"model.safetensors{INDEX}", index_of(targets))
        copy_files((inside(held.path, at), new.path / path) for path, at in original.copied.items())
        new.commit()


def reshard(
    folder: Path,
    out: Path,
    *,
    tp: int,
    force: bool = False,
    progress: Progress | None = None,
    check: bool = False,
    max_file: int = MAX_FILE,
) -> Manifest:
    """Write OUT: the same tensors, optimizer state included, at degree ``tp``."""
    old, plan = read_complete(folder)
    held = RankFolder(absolute(folder))
    if tp < 1:
        raise CheckpointError(f"{folder}: cannot be cut for {tp} ranks.", hint="Use --tp 1 or more.")
    targets = []
    for group, entries in (("", old.tensors), *old.groups.items()):
        check_degree(entries, tp)
        recipes = {name: whole_recipe(entry, name, old.tp, group) for name, entry in entries.items()}
        targets += rank_targets(entries, recipes, tp, group=group, max_file=max_file)
    if old.original.extra:
        stored = held.files(0, EXTRA_GROUP)[0].header.tensors
        targets.append(_extra_target({n: (t.shape, t.dtype) for n, t in stored.items()}, tp, _extra_key))
    with NewFolder(out, force=force, keep=(held.path,)) as new:
        new.require(sum(t.header.size for t in targets))
        files = write_targets(new.path, targets, Pieces(held), progress=progress, beside=_checks(held, check))
        held.check_unchanged()
        files |= _write_indexes(new.path, targets)
        copy_files((inside(held.path, name), new.path / name) for name in carried(old))
        return _finish(new, replace(old, tp=tp), replace(plan, tp=tp), files, carried(old))


def plan_entries(source: Weights, plan: Plan) -> dict[str, Entry]:
    """What is stored for each module tensor: the source's shape and dtype, the plan's layout."""
    wanted = {v.name: v for v in plan.verdicts if v.persistent and v.name not in source.tied}
    if missing := [name for name in wanted if name not in source.recipes]:
        raise CheckpointError(
            f"The source lacks {_some(missing)}, which the plan names.", hint="Is it the plan of another model or task?"
        )
    if unknown := [name for name in source.names() if name not in wanted]:
        raise CheckpointError(
            f"The plan has no verdict for {_some(unknown)} of the source.", hint="Is it the plan of another model?"
        )
    entries = {}
    for name, verdict in wanted.items():
        shape, dtype = source.info(name)
        if shape != verdict.shape:
            raise CheckpointError(
                f"{name}: {list(shape)} in the source, but {list(verdict.shape)} in the plan.",
                hint="Is it the plan of another model?",
            )
        entries[name] = Entry(shape, dtype_name(dtype), verdict.layout)
    check_degree(entries, plan.tp)
    return entries


def check_degree(entries: Mapping[str, Entry], tp: int) -> None:
    """Raise for the first tensor whose layout cannot be dealt to ``tp`` ranks."""
    for name, entry in entries.items():
        try:
            for rank in range(tp):
                entry.layout.pieces(rank, tp)
        except PlanError as error:
            raise CheckpointError(f"{name}: {error.message}", hint=error.hint) from None


def whole_recipe(entry: Entry, name: str, tp: int, group: str = "") -> Recipe:
    """A whole tensor as the join of the ranks' pieces, the first holder's where several hold them."""
    if entry.layout.dim is None:
        return Take(rank_key(0, group, name), entry.shape)
    dim, parts = entry.layout.dim, []
    for rank, (start, stop), at in first_holders(entry.layout, tp):
        take = Take(rank_key(rank, group, name), entry.layout.local_shape(entry.shape, rank, tp))
        whole = take.shape[dim] == stop - start
        parts.append(take if whole else Narrow(take, dim, at, at + stop - start))
    if not parts:
        return Take(rank_key(0, group, name), entry.shape)
    return parts[0] if len(parts) == 1 else Join(dim, tuple(parts))


def local_of(entry: Entry, whole: Recipe, rank: int, tp: int) -> Recipe:
    """What one rank holds of a whole tensor."""
    dim = entry.layout.dim
    if dim is None:
        return whole
    parts = tuple(Narrow(whole, dim, start, stop) for start, stop in entry.layout.pieces(rank, tp))
    parts = parts or (Narrow(whole, dim, 0, 0),)
    return parts[0] if len(parts) == 1 else Join(dim, parts)


def rank_targets(
    entries: Mapping[str, Entry],
    recipes: Mapping[str, Recipe],
    tp: int,
    *,
    group: str = "",
    max_file: int = MAX_FILE,
) -> list[Target]:
    """The files of every rank, given how each whole tensor is made."""
    dtypes = {name: getattr(torch, entry.dtype) for name, entry in entries.items()}
    targets = []
    for rank in range(tp):
        local: dict[str, Recipe] = {}
        for name, entry in entries.items():
            local[name] = local_of(entry, recipes[name], rank, tp)
        folder = rank_folder(rank, tp)
        targets += split_targets(folder, group or "model", local, dtypes, rank_metadata(rank, tp), max_file)
    return targets


def rank_metadata(rank: int, tp: int) -> dict[str, str]:
    """What a rank file says about itself, so that a swapped one is noticed."""
    return {"format": "pt", "rank": str(rank), "tp": str(tp)}


def rank_key(rank: int, group: str, name: str) -> str:
    """How a recipe names a rank's tensor."""
    return f"{rank}{_AT}{group}{_AT}{name}"


def leaf_of(held: RankFolder) -> Leaf:
    """Finds the tensors that :func:`rank_key` names."""

    def leaf(key: str) -> Tensor:
        rank, group, name = key.split(_AT, 2)
        return held.tensor(int(rank), group, name)

    return leaf


class Pieces:
    """The tensors that :func:`rank_key` names, to be read."""

    def __init__(self, held: RankFolder) -> None:
        self._held = held

    def info(self, key: str) -> tuple[Shape, torch.dtype]:
        """Shape and dtype."""
        stored = self._file(key).header.tensors[key.rpartition(_AT)[2]]
        return stored.shape, stored.dtype

    def box(self, key: str, box: Box, buffers: Buffers | None = None) -> Tensor:
        """The elements of a box."""
        return self._file(key).read(key.rpartition(_AT)[2], box, buffers)

    def release(self) -> None:
        """Give back what is held for reading."""
        self._held.release()

    def _file(self, key: str) -> TensorFile:
        rank, group, name = key.split(_AT, 2)
        return self._held.file(int(rank), group, name)


def carried(held: Manifest) -> list[str]:
    """The files that belong to no rank and go along unchanged to another degree: the source's, the training state."""
    return [name for name in held.files if name != PLAN and not name.startswith("rank-")]


def _extra_key(name: str) -> str:
    return rank_key(0, EXTRA_GROUP, name)


def _extra_target(infos: Mapping[str, tuple[Shape, torch.dtype]], tp: int, key: Callable[[str], str] = str) -> Target:
    recipes = {name: Take(key(name), shape) for name, (shape, _) in infos.items()}
    return Target(f"{rank_folder(0, tp)}/{EXTRA}", make_header(infos, rank_metadata(0, tp)), recipes, EXTRA_GROUP)


def _stored_recipe(held: RankFolder, name: str) -> Recipe:
    made = held.manifest
    if name in made.original.recipes:
        return substitute(
            made.original.recipes[name], lambda take: whole_recipe(made.tensors[take.name], take.name, made.tp)
        )
    if name in made.original.extra:
        for file in held.files(0, EXTRA_GROUP):
            if name in file.header.tensors:
                return Take(_extra_key(name), file.header.tensors[name].shape)
    raise CheckpointError(f"{held.path}: the manifest does not say how {name} is made: damaged.")


def _write_indexes(folder: Path, targets: Sequence[Target]) -> dict[str, File]:
    groups: dict[tuple[str, str], list[Target]] = {}
    for target in targets:
        parent, _, file = target.path.rpartition("/")
        stem = file.removesuffix(".safetensors")
        groups.setdefault((parent, stem.rsplit("-", 3)[0] if "-of-" in stem else stem), []).append(target)
    files: dict[str, File] = {}
    for (_, stem), group in groups.items():
        files |= write_index_file(folder, group, stem)
    return files


def _finish(new: NewFolder, made: Manifest, plan: Plan, files: Mapping[str, File], beside: Iterable[str]) -> Manifest:
    write_text(new.path / PLAN, plan.dumps())
    made = replace(made, files=dict(files) | {path: hash_file(new.path / path) for path in (PLAN, *beside)})
    write_manifest(new.path, made)
    new.commit()
    return made


def _open(folder: Path) -> RankFolder:
    """The folder, all of its files there and as long as they were."""
    held = RankFolder(absolute(folder))
    raise_fault(held.path, held.manifest, held.manifest.files, sizes_only=True)
    return held


def _checks(held: RankFolder, wanted: bool) -> list[Callable[[], None]]:
    """What compares each file with its hash, to go on beside the reading."""
    return [partial(raise_fault, held.path, held.manifest, [name]) for name in held.manifest.files] if wanted else []


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
