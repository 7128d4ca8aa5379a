"""Reads one rank's tensors from a folder of rank files, of the same degree or of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tpconvert.checkpoint.folder import (
    RankFolder,
    check_file,
    check_folder,
    raise_fault,
    rank_folder,
    read_manifest,
    read_plan,
)
from tpconvert.checkpoint.reshard import check_degree, leaf_of, local_of, whole_recipe
from tpconvert.checkpoint.tensors.compose import compose, full
from tpconvert.checkpoint.tensors.pieces import unequal_replicas
from tpconvert.errors import CheckpointError
from tpconvert.spec.manifest import Entry, Manifest
from tpconvert.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in a folder of rank files."""

    folder: Path
    manifest: Manifest
    plan: Plan
    rank_bytes: tuple[int, ...]
    """Bytes of each rank's files."""
    faults: tuple[str, ...]
    """One line each, naming the file; where the bytes were not checked, of files that are missing or cut short."""


def inspect(folder: Path, *, check: bool = False) -> Inspection:
    """What is in a folder of rank files; ``check`` compares files with their hashes, and ranks with one another."""
    made = read_manifest(folder)
    sizes = (
        sum(file.size for name, file in made.files.items() if name.startswith(f"{rank_folder(rank, made.tp)}/"))
        for rank in range(made.tp)
    )
    if check:
        faults = tuple(check_folder(folder) or check_replicas(folder))
    else:
        faults = tuple(f for name in made.files for f in check_file(Path(folder), made, name, sizes_only=True))
    return Inspection(Path(folder), made, read_plan(folder, made), tuple(sizes), faults)


def check_replicas(folder: Path) -> list[str]:
    """One line for each tensor of which several ranks hold the same rows with other bytes."""
    held = RankFolder(Path(folder))
    made, faults = held.manifest, []
    for group, entries in (("", made.tensors), *made.groups.items()):
        for name, entry in entries.items():
            parts = [held.tensor(rank, group, name) for rank in range(made.tp)]
            for first, other in unequal_replicas(parts, entry.layout)[:1]:
                what = f"{group}.{name}" if group else name
                faults.append(f"{what}: ranks {first} and {other} share rows of it, but hold other values.")
        held.release()
    return faults


def load_rank(
    folder: Path,
    rank: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    check: bool = False,
    group: str = "",
    tp: int | None = None,
) -> dict[str, Tensor]:
    """The local tensors of one rank by module name, tied names included, each on ``device``.

    ``dtype`` converts floating tensors; ``check`` compares the files read with their hashes first; ``group`` reads the
    optimizer's tensors instead; ``tp`` reads what the rank would hold at another degree.
    """
    held = RankFolder(Path(folder))
    made = held.manifest
    degree = made.tp if tp is None else tp
    if not 0 <= rank < degree:
        raise CheckpointError(
            f"{folder}: is cut for {degree} ranks, so there is no rank {rank}.",
            hint=f"Start {made.tp} ranks, or reshard it.",
        )
    if group and group not in made.groups:
        raise CheckpointError(f"{folder}: holds no {group}.")
    entries = made.groups[group] if group else made.tensors
    if check:
        ranks = [rank] if degree == made.tp else range(made.tp)
        starts = tuple(f"{rank_folder(r, made.tp)}/" for r in ranks)
        raise_fault(held.path, made, [name for name in made.files if name.startswith(starts)])
    local = _same(held, rank, group, entries) if degree == made.tp else _other(held, rank, group, entries, degree)
    found: dict[str, Tensor] = {}
    for name, tensor in local.items():
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        found[name] = tensor.to(device=device, dtype=wanted)
    return found | ({} if group else {name: found[first] for name, first in made.tied.items()})


def _same(held: RankFolder, rank: int, group: str, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Views of the rank's own files."""
    return {name: held.tensor(rank, group, name) for name in entries}


def _other(held: RankFolder, rank: int, group: str, entries: Mapping[str, Entry], degree: int) -> dict[str, Tensor]:
    """The pieces of a rank of another degree, put together from the files that hold them."""
    check_degree(entries, degree)
    leaf, out = leaf_of(held), {}
    for name, entry in entries.items():
        recipe = local_of(entry, whole_recipe(entry, name, held.manifest.tp, group), rank, degree)
        value = compose(recipe, full(recipe.shape), leaf).contiguous()
        out[name] = value.view(getattr(torch, entry.dtype))
    return out
