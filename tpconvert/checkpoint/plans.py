"""Plans in files: a plan.json that somebody names, or the one that a folder of rank files was made by."""

from __future__ import annotations

from pathlib import Path

import torch

from tpconvert.checkpoint.files.digest import can_hash, hash_file
from tpconvert.errors import CheckpointError, PlanError
from tpconvert.spec.manifest import LONGEST, Manifest
from tpconvert.spec.plan import AGAIN, MEND, NAME, Plan
from tpconvert.spec.reading.consistent import at
from tpconvert.spec.reading.typed import WrongError


def read_plan_file(path: Path) -> Plan:
    """A plan from a file; whatever is wrong with it is a PlanError that names the file and the entry."""
    try:
        with path.open("rb") as file:
            data = file.read(LONGEST + 1)
        if len(data) > LONGEST:
            raise PlanError(f"{path}: more than {LONGEST:,} bytes, which no plan has: refused.", hint=AGAIN)
        made = Plan.loads(data.decode("utf-8"), str(path))
    except FileNotFoundError:
        raise PlanError(f"There is no file {path}.", hint=AGAIN) from None
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}).", hint=AGAIN) from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not JSON (byte {error.start} is no UTF-8).", hint=AGAIN) from None
    try:
        for i, verdict in enumerate(made.verdicts):
            with at("verdicts", i, verdict):
                _dtype(verdict.dtype)
        for i, boundary in enumerate(made.boundaries):
            with at("boundaries", i, boundary):
                _dtype(boundary.dtype or "float32")
    except WrongError as error:
        raise PlanError(f"{path}: {error.sentence}", hint=MEND) from None
    return made


def plan_of_folder(folder: Path, held: Manifest) -> Plan:
    """The plan kept in a folder of rank files, which must be the one that its files were cut by.

    Nobody mends a folder by editing its plan: what the files hold would stay as it is.
    """
    path = folder / NAME
    try:
        made = read_plan_file(path)
    except PlanError as error:
        raise CheckpointError(error.message, hint=f"Restore {path}, or shard the source again.") from None
    if made.tp != held.tp:
        raise CheckpointError(
            f"{path}: is a plan for tp={made.tp}, and the files are cut for {held.tp} ranks.",
            hint=f"Restore {path}, or shard the source again.",
        )
    listed = held.files.get(NAME)
    if listed is not None and can_hash(listed.kind) and hash_file(path, listed.kind) != listed:
        raise CheckpointError(
            f"{path}: its {listed.kind} is not the one written, so it is not the plan that the files were cut by.",
            hint="Restore it, or shard the source again with --plan and the changed one.",
        )
    return made


def _dtype(name: str) -> None:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise WrongError(f"torch has no dtype {name!r}")
