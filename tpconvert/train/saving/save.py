"""A live model as a sharded folder again, written by all ranks: for the trainer's steps and for loops of one's own."""

from __future__ import annotations

import contextlib
import functools
import threading
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
from tpconvert.train.together.ranks import together

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
    Save(module, Path(base), Path(out), mesh, groups=groups, beside=beside, force=force).finish()


class Save:
    """OUT on its way: begun when this is made, complete when :meth:`finish` returns; every rank must call both.

    In the background a thread writes a copy of the values, which may change meanwhile; else :meth:`finish` writes.
    Threads say nothing to one another: what the ranks agree on, they agree on in these two calls.
    """

    def __init__(
        self,
        module: nn.Module,
        base: Path,
        out: Path,
        mesh: Mesh,
        *,
        groups: Mapping[str, Mapping[str, Tensor]] | None = None,
        beside: Mapping[str, str] | None = None,
        force: bool = False,
        background: bool = False,
    ) -> None:
        held = read_manifest(base)
        self._plan = read_plan(base, held)
        self.out, self._mesh, self._error = out, mesh, None
        first = mesh.rank == 0 and mesh.dp_rank == 0
        with contextlib.ExitStack() as stack:
            self._new = together(mesh, lambda: _begin(stack, base, out, held, beside or {}, force) if first else None)
            self._tensors, self._groups = _to_store(module, held, groups or {}, mesh, copied=background)
            made = {g: entries_like(held.tensors, t) for g, t in self._groups.items()}
            self._made = replace(held, tp=mesh.degree, groups=made)
            self._stack = stack.pop_all()
        self._thread = threading.Thread(target=self._write_alone, daemon=True) if background else None
        if self._thread is not None:
            self._thread.start()

    _error: Exception | None

    @property
    def running(self) -> bool:
        """Whether this rank still writes in the background."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for all ranks and put OUT in its place; on an error of any, all raise it and nothing is left."""
        with self._stack:
            if self._thread is not None:
                self._thread.join()
            together(self._mesh, self._write if self._thread is None else self._raise)
            together(self._mesh, lambda: finish(self._new, self._made, self._plan) if self._new is not None else None)

    def _write(self) -> None:
        if self._mesh.dp_rank == 0:
            write_rank(partial_path(self.out), self._mesh.rank, self._mesh.degree, self._tensors, self._groups)
        self._tensors, self._groups = {}, {}

    def _write_alone(self) -> None:
        try:
            self._write()
        except Exception as error:  # told by finish, on the thread that trains
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


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
    module: nn.Module, held: Manifest, groups: Mapping[str, Mapping[str, Tensor]], mesh: Mesh, *, copied: bool
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """``(tensors in the dtypes of the source, groups)``; but for those of the first dp rank, meta tensors."""
    live = {n: t.detach() for n, t in planned_tensors(module, held.tensors) if n in held.tensors}
    if missing := held.tensors.keys() - live.keys():
        raise CheckpointError(f"{min(missing)}: the module has no parameter or buffer of that name to save.")
    take = functools.partial(_taken, keep=mesh.dp_rank == 0, copied=copied)
    stored, masters = {}, {}
    for name, entry in held.tensors.items():
        dtype, value = getattr(torch, entry.dtype), take(live[name])
        stored[name] = value.to(dtype)
        if value.dtype != dtype:
            masters[name] = value
    given = {g: {name: take(tensor.detach()) for name, tensor in t.items()} for g, t in groups.items()}
    return stored, given | ({MASTER: masters} if masters else {})


def _taken(tensor: Tensor, *, keep: bool, copied: bool) -> Tensor:
    """All of what this tp rank holds, of which FSDP may have left it a shard; where not to ``keep``, its shape."""
    shared = isinstance(tensor, DTensor)
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if not keep:
        return whole.to("meta")
    if shared or (copied and whole.device.type != "cpu"):  # the whole is nobody's but ours: off the GPU with it
        return whole.to("cpu")
    return whole.clone() if copied else whole
