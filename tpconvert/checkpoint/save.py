"""A folder of rank files written by live ranks, each its own part: how a training run keeps ``step-N/``.

::

    rank 0                                          the others
    with NewFolder(out) as new:
        carry(base, new.path)
        ---------------- barrier ----------------
        write_rank(new.path, 0, tp, local)          write_rank(partial_path(out), rank, tp, local)
        ---------------- barrier ----------------
        finish(new, manifest, plan)
        ---------------- barrier ----------------

What else lies in the folder by then (random states, progress) is listed in the manifest as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from tpconvert.checkpoint.files.digest import hash_file
from tpconvert.checkpoint.files.header import dtype_name
from tpconvert.checkpoint.files.tensorfile import full_disk
from tpconvert.checkpoint.folder import EXTRA, NewFolder, rank_folder, write_manifest, write_text
from tpconvert.checkpoint.reshard import rank_metadata
from tpconvert.checkpoint.tensors.store import Store
from tpconvert.checkpoint.write import MAX_FILE, Target, copy_files, split_targets, write_index_file, write_targets
from tpconvert.errors import CheckpointError
from tpconvert.spec.manifest import Entry, File, Manifest
from tpconvert.spec.plan import NAME as PLAN
from tpconvert.spec.plan import Plan
from tpconvert.spec.recipe import Take

_HASHES = "hashes.json"


def write_rank(
    folder: Path,
    rank: int,
    tp: int,
    tensors: Mapping[str, Tensor],
    groups: Mapping[str, Mapping[str, Tensor]] | None = None,
    *,
    max_file: int = MAX_FILE,
) -> None:
    """Write one rank's local tensors, and those of each group beside them, into an unfinished folder.

    Tied names are given once.  Sizes and hashes are left beside the files for :func:`finish`, which may run elsewhere.
    """
    where = rank_folder(rank, tp)
    files: dict[str, File] = {}
    try:
        for group, held in (("", tensors), *(groups or {}).items()):
            recipes = {name: Take(name, tuple(tensor.shape)) for name, tensor in held.items()}
            dtypes = {name: tensor.dtype for name, tensor in held.items()}
            stem = group or "model"
            targets: list[Target] = split_targets(where, stem, recipes, dtypes, rank_metadata(rank, tp), max_file)
            files |= write_targets(folder, targets, Store({stem: held}))
            files |= write_index_file(folder, targets, stem)
        write_text(folder / where / _HASHES, json.dumps({p: [f.size, f.digest] for p, f in files.items()}))
    except OSError as error:
        reason = "the disk is full" if full_disk(error) else error.strerror
        raise CheckpointError(f"{folder / where}: cannot be written: {reason}.") from None


def carry(base: Path, held: Manifest, folder: Path) -> None:
    """Copy what goes along unchanged from one folder of rank files into an unfinished one."""
    extra = f"{rank_folder(0, held.tp)}/{EXTRA}"
    names = [*held.original.copied.values(), *([extra] if extra in held.files else [])]
    copy_files((base / name, folder / name) for name in names)


def finish(new: NewFolder, held: Manifest, plan: Plan) -> Manifest:
    """Write the plan and the manifest of a folder that every rank has filled, and put it in its place.

    ``held`` says what is stored, with the groups and dtypes of this folder; its list of files is made here.
    """
    write_text(new.path / PLAN, plan.dumps())
    files: dict[str, File] = {}
    for rank in range(held.tp):
        path = new.path / rank_folder(rank, held.tp) / _HASHES
        if not path.is_file():
            raise CheckpointError(f"{new.out}: rank {rank} has written nothing. The folder is not finished.")
        files |= {name: File(*file) for name, file in json.loads(path.read_text("utf-8")).items()}
        path.unlink()
    for path in sorted(new.path.rglob("*")):
        if path.is_file() and (name := path.relative_to(new.path).as_posix()) not in files:
            files[name] = hash_file(path)
    made = replace(held, files=files)
    write_manifest(new.path, made)
    new.commit()
    return made


def entries_like(held: Mapping[str, Entry], local: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Entries for tensors cut like the module's of the same names; a scalar is whole.

    This is what an optimizer's state needs: its moments have the shape of their parameter, its step count has none.
    """
    out = {}
    for name, tensor in local.items():
        if name not in held:
            raise CheckpointError(f"The optimizer has state for {name}, which the manifest does not have.")
        entry = held[name]
        scalar = tensor.dim() == 0 and entry.shape != ()
        out[name] = Entry((), dtype_name(tensor.dtype)) if scalar else replace(entry, dtype=dtype_name(tensor.dtype))
    return out
