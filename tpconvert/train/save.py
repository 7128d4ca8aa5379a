"""A live model as a sharded folder again, written by all ranks: for the trainer's steps and for loops of one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpconvert.checkpoint import (
    NewFolder,
    carry,
    entries_like,
    finish,
    partial_path,
    read_manifest,
    read_plan,
    write_rank,
)
from tpconvert.errors import CheckpointError
from tpconvert.parallel import Mesh
from tpconvert.parallel.convert import planned_tensors
from tpconvert.spec.manifest import Manifest
from tpconvert.train.ranks import together

MASTER = "master"
"""The group of tensors in the dtype of training, where that is not the source's."""


def save(
    module: nn.Module,
    base: Path | str,
    out: Path | str,
    mesh: Mesh,
    *,
    groups: Mapping[str, Mapping[str, Tensor]] | None = None,
    beside: Mapping[str, str] | None = None,
    force: bool = False,
) -> None:
    """Write OUT, a sharded folder like ``base`` with the values of ``module``; every rank of the mesh must call it.

    Tensors are stored in the dtypes of the source; where the module's differ, its own go into the group ``master``.
    ``groups`` are more tensors by the names of their parameters, ``beside`` texts of further files.  OUT appears
    complete or not at all.
    """
    base, out = Path(base), Path(out)
    held, plan = read_manifest(base), read_plan(base)
    tensors, every = _to_store(module, held, groups or {})
    made = replace(held, tp=mesh.degree, groups={g: entries_like(held.tensors, t) for g, t in every.items()})
    first = mesh.rank == 0 and mesh.dp_rank == 0

    def write() -> None:
        if mesh.dp_rank == 0:
            write_rank(partial_path(out), mesh.rank, mesh.degree, tensors, every)

    with contextlib.ExitStack() as stack:
        new = together(mesh, lambda: _begin(stack, base, out, held, beside or {}, force) if first else None)
        together(mesh, write)
        together(mesh, lambda: finish(new, made, plan) if new is not None else None)


def _begin(
    stack: contextlib.ExitStack, base: Path, out: Path, held: Manifest, beside: Mapping[str, str], force: bool
) -> NewFolder:
    """The unfinished folder, with all that belongs to no rank."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        new = stack.enter_context(NewFolder(out, force=force, keep=(base,)))
        carry(base, held, new.path)
        for name, text in beside.items():
            (new.path / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({error.strerror}).") from None
    return new


def _to_store(
    module: nn.Module, held: Manifest, groups: Mapping[str, Mapping[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """``(tensors in the dtypes of the source, groups)``."""
    live = {name: _whole(tensor) for name, tensor in planned_tensors(module, held.tensors) if name in held.tensors}
    if missing := held.tensors.keys() - live.keys():
        raise CheckpointError(f"{min(missing)}: the module has no parameter or buffer of that name to save.")
    stored = {name: live[name].to(getattr(torch, entry.dtype)) for name, entry in held.tensors.items()}
    masters = {name: tensor for name, tensor in live.items() if tensor.dtype != stored[name].dtype}
    given = {g: {name: _whole(tensor) for name, tensor in t.items()} for g, t in groups.items()}
    return stored, given | ({MASTER: masters} if masters else {})


def _whole(tensor: Tensor) -> Tensor:
    """All of what this tp rank holds, of which FSDP may have left it a shard."""
    return tensor.full_tensor() if isinstance(tensor := tensor.detach(), DTensor) else tensor
