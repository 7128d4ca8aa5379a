"""A sharded folder as this rank's module, ready to run or to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from tpconvert.checkpoint import load_rank, read_manifest, read_plan
from tpconvert.errors import CheckpointError
from tpconvert.parallel.convert import load_local, parallelize
from tpconvert.parallel.fits import check_plan
from tpconvert.source import open_skeleton
from tpconvert.spec.plan import NAME as PLAN


def load(
    folder: Path | str,
    mesh: Any,
    *,
    module: nn.Module | None = None,
    gather_output: bool = True,
    sequence_parallel: bool = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """This rank's part of the model in ``folder``, on the mesh's device, in evaluation mode.

    The module's class is the one the folder was made of.  Give ``module``, its parameters whole or on meta, where it
    cannot be built from the folder: a model of a function that has moved.  ``gather_output`` and ``sequence_parallel``
    are those of :func:`tpconvert.parallelize`.
    """
    folder = Path(folder)
    held = read_manifest(folder)
    degree = held.tp
    if degree != mesh.degree:
        raise CheckpointError(
            f"{folder} is cut for {degree} ranks, the mesh has {mesh.degree}.",
            hint=f"Start {degree} ranks, or use tpconvert reshard {folder} --tp {mesh.degree}.",
        )
    plan = read_plan(folder, held)
    if module is None:
        stored = (folder / "config.json").is_file()
        name = str(folder) if stored else str(plan.source.get("name", ""))
        task = plan.source.get("task") if stored else None
        module = open_skeleton(name, task=task, trust_remote_code=trust_remote_code and stored)
    check_plan(module, plan, str(folder / PLAN))
    parallelize(module, plan, mesh, gather_output=gather_output, sequence_parallel=sequence_parallel)
    load_local(module, load_rank(folder, mesh.rank, device=mesh.device))
    return module.to(mesh.device).eval()
