"""What lies where a folder of rank files was looked for, and what may have been meant."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tpconvert.errors import CheckpointError
from tpconvert.spec.manifest import NAME

_NUMBER = re.compile(r"(\d+)$")


def not_a_folder(path: Path) -> CheckpointError:
    """Of a path at which no folder is."""
    if path.exists():
        return CheckpointError(f"{path}: is a file, not a folder.", hint=_of_file(path))
    if path.with_name(f".{path.name}.partial").is_dir():
        return CheckpointError(
            f"{path}: half-written: the run that was to write it was stopped.", hint="Run the command again."
        )
    beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, 1)
    return CheckpointError(
        f"{path}: no such folder.",
        hint=f"Did you mean {path.with_name(near[0])}?" if near else "Make one with: tpconvert shard SOURCE -o DIR.",
    )


def no_manifest(folder: Path) -> CheckpointError:
    """Of a folder that has none."""
    if any(folder.glob("rank-*-of-*")):
        return CheckpointError(
            f"{folder}: half-written: it has rank folders but no {NAME}, which is written last.",
            hint="Remove it and run the command again.",
        )
    source = folder if (folder / "config.json").is_file() else "SOURCE"
    return CheckpointError(
        f"{folder}: not a sharded folder (no {NAME}).",
        hint=_within(folder) or f"Make one with: tpconvert shard {source} --tp N -o DIR.",
    )


def _of_file(path: Path) -> str:
    inside = (path.parent / NAME).is_file() or path.parent.name.startswith("rank-")
    whole = path.parent if (path.parent / NAME).is_file() else path.parent.parent
    return f"Did you mean {whole}?" if inside else "Give the folder that tpconvert shard wrote."


def _within(folder: Path) -> str:
    """The sharded folder in a folder: the newest step of a run, or the one that there is."""
    found = [path.parent for path in folder.glob(f"*/{NAME}") if not path.parent.name.startswith(".")]
    steps = [path for path in found if path.name.startswith("step-") and _NUMBER.search(path.name)]
    if steps:
        return f"It is a training run; did you mean its newest step, {max(steps, key=_number)}?"
    return f"Did you mean {min(found)}?" if found else ""


def _number(path: Path) -> int:
    match = _NUMBER.search(path.name)
    return int(match[1]) if match else -1
