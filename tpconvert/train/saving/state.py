"""``step-N/``: everything a run needs to go on as if it had never stopped, in the format of any sharded folder.

::

    step-40/ manifest.json plan.json config.json ...       as tpconvert shard writes them, so merge and reshard work
             trainer.json                                  step, position in the data, updates of each parameter
             rank-00000-of-00002/ model.safetensors        in the dtypes of the source
                                  master.safetensors       the same in the dtype of training, where that is another
                                  optimizer.exp_avg.safetensors  optimizer.exp_avg_sq.safetensors

Learning rate and random numbers are functions of the step, so they need no room here.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.checkpoint import (
    load_rank,
    read_manifest,
)
from tpconvert.errors import CheckpointError, ConfigError
from tpconvert.parallel import Mesh
from tpconvert.parallel.convert import is_parameter, planned_tensors
from tpconvert.spec.manifest import NAME, Manifest
from tpconvert.spec.plan import Plan
from tpconvert.train.data.order import Position
from tpconvert.train.saving.best import Best
from tpconvert.train.saving.save import MASTER, Save
from tpconvert.train.settings.config import Config
from tpconvert.train.steps.optimizer import load_optimizer_tensors, optimizer_tensors
from tpconvert.train.steps.scaling import Scale

TRAINER = "trainer.json"
FAILED, BAD = "error-rank", "bad-step"
"""What the files are called that tell of a failure: a rank's traceback, a batch whose loss is no number."""
_OPTIMIZER = "optimizer."
_FORMAT = 1
_STEP = re.compile(r"step-(\d+)$")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    """Steps done."""
    position: Position = field(default_factory=Position)
    updates: dict[str, float] = field(default_factory=dict)
    """Updates of each parameter by the optimizer."""
    scale: Scale | None = None
    """The loss scale; None before the first step."""
    best: Best | None = None
    """The best step so far, of those that are saved."""


@dataclass(frozen=True, slots=True)
class Run:
    """What stays the same from the first step to the last."""

    base: Path
    """The sharded folder."""
    output: Path
    """Where steps and metrics go."""
    plan: Plan
    config: Config
    mesh: Mesh

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return self.mesh.rank == 0 and self.mesh.dp_rank == 0


def find_start(folder: Path, output: Path, resume: str) -> Path:
    """The folder to load: the sharded one, or the step to go on from."""
    if resume == "none":
        if steps := complete_steps(output):
            raise ConfigError(
                f"{output}: has {steps[-1].name} of an earlier run.", hint="Add --resume, or choose another --output."
            )
        return folder
    if resume == "auto":
        return (complete_steps(output) or [folder])[-1]
    path = Path(resume)
    path = path.parent / path.readlink() if path.is_symlink() else path
    if not (path / TRAINER).is_file() or not (path / NAME).is_file():
        within = complete_steps(path)
        raise ConfigError(
            f"{path}: there is no complete step of a training run to resume from.",
            hint=f"Did you mean {within[-1]}?" if within else "Give auto, none, or a folder step-N.",
        )
    steps = complete_steps(output)
    if steps and _STEP.search(path.name) and number_of(steps[-1]) > number_of(path):
        raise ConfigError(
            f"{output}: has {steps[-1].name}, which is later than the {path.name} to go on from.",
            hint="Remove it, or choose another --output.",
        )
    return path


def not_resumed(output: Path, resume: str, progress: Progress) -> str:
    """What to say of a run that was to go on from the newest step and has none; nothing of any other.

    Scripts that are started again and again ask for it each time, the first one too, so it is no error.
    """
    if resume != "auto" or progress.step:
        return ""
    half = sorted((p for p in output.glob("step-*") if _STEP.search(p.name)), key=number_of)
    besides = f" ({half[-1].name} is half-written)" if half else ""
    return f"nothing to resume: no complete step in {output}{besides}, so training begins at step 0"


def clear(output: Path, *, again: bool) -> None:
    """Remove what a run that failed left half-written, and what it said of it unless this is the same run ``again``.

    Only who has claimed the folder may.
    """
    for path in output.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    for pattern in () if again else (f"{FAILED}-*.txt", f"{BAD}-*.safetensors"):
        for path in output.glob(pattern):
            path.unlink(missing_ok=True)


def check_output(output: Path) -> None:
    """Raise unless steps can be written there: the time to say so is before the first step."""
    if output.is_file():
        raise ConfigError(f"{output}: is a file, not a folder.", hint="Choose another --output.")
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ConfigError(
            f"{output}: nothing can be written there ({error.strerror}).", hint="Choose another --output."
        ) from None


def claim(output: Path, patience: float = 15.0) -> int:
    """Keep other runs out of the folder for as long as this process lives, or as the file that is returned is open.

    What a rank that was killed has left running may keep the folder a while longer.
    """
    check_output(output)
    folder, until = os.open(output, os.O_RDONLY), time.monotonic() + patience
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.2)
                continue
            os.close(folder)
            raise ConfigError(
                f"{output}: another run is writing there.", hint="Wait for its end, or choose another --output."
            ) from None
        except OSError:  # a file system that knows no locks
            return folder


def begin_in(output: Path, again: bool) -> None:
    """Claim the folder for as long as this process lives, and clear it of what a run that failed left in it."""
    claim(output)
    clear(output, again=again)


def complete_steps(output: Path) -> list[Path]:
    """The finished ``step-N`` folders, in ascending order."""
    found = [p for p in output.glob("step-*") if _STEP.search(p.name)]
    whole = [p for p in found if (p / NAME).is_file() and (p / TRAINER).is_file()]
    return sorted(whole, key=number_of)


def read_progress(folder: Path, resume: str) -> Progress:
    """How far the run in a folder had come; a folder that is no step, or is not to be resumed, begins at 0."""
    path = folder / TRAINER
    if resume == "none" or not path.is_file():
        return Progress()
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != _FORMAT:
            raise CheckpointError(
                f"{path}: format {data['format']!r}; this version of tpconvert reads format {_FORMAT}."
            )
        usual = data["updates"]
        names = read_manifest(folder).groups
        every = {name: usual["all"] for group in names for name in names[group] if group.startswith(_OPTIMIZER)}
        scale = Scale(**data["loss_scale"]) if data.get("loss_scale") else None
        best = Best(**data["best"]) if data.get("best") else None
        position, updates = Position(**data["position"]), every | usual["but"]
        whole = [data["step"] - 1, position.epoch, *position.used]
        if not all(isinstance(n, int) and n >= 0 for n in whole):
            raise ValueError("a step or position that is no number of steps or sequences")
        if not all(isinstance(n, int | float) for n in updates.values()):
            raise ValueError("updates that are no numbers")
        return Progress(data["step"], position, updates, scale, best)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({type(error).__name__}: {error}).",
            hint=f"Remove {folder} and --resume the step before it, or begin anew in another --output.",
        ) from None


def changes(start: Path, config: Config, dp: int) -> str:
    """What of the configuration is not as it was when a step was saved; an optimizer of another kind is refused.

    On another dp a step has other sequences, where their number is not set.
    """
    try:
        then, now = json.loads((start / TRAINER).read_text("utf-8")), config.model_dump(mode="json")
        before, after = dict(_flat(then["config"])), dict(_flat(now))
        sizes = _step_size(before, then["dp"]), _step_size(after, dp)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # of another version: nothing to compare
        return ""
    kind = "training.optimizer"
    if before.get(kind, after[kind]) != after[kind]:
        raise ConfigError(
            f"{start.name} was trained with {kind} {before[kind]}, whose state {after[kind]} cannot go on from.",
            hint=f"Set {kind}={before[kind]}, or merge and shard the step to begin anew from its weights.",
        )
    told = [f"{key} {json.dumps(before.get(key))} -> {json.dumps(after[key])}" for key in after if key in before
            and before[key] != after[key] and key.startswith(("training.", "data."))]  # fmt: skip
    if sizes[0] != sizes[1] and then["dp"] != dp:
        told.append(f"{sizes[0]} -> {sizes[1]} sequences a step on dp {then['dp']} -> {dp} "
                    f"(training.global_batch_size={sizes[0]} keeps them)")  # fmt: skip
    return f"changed since {start.name}: {', '.join(told)}" if told else ""


def _step_size(flat: Mapping[str, Any], dp: int) -> int:
    return int(flat["training.global_batch_size"] or flat["training.micro_batch_size"] * dp)


def _flat(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """``("training.lr", 0.1)`` for each value in nested sections."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def check_same_model(base: Manifest, start: Manifest, where: Path) -> None:
    """Raise where a step is not one of the model in the sharded folder."""
    if base.source.get("fingerprint") != start.source.get("fingerprint") or base.tensors.keys() != start.tensors.keys():
        raise ConfigError(f"{where}: is a step of another model than the sharded folder holds.")


def load_tensors(folder: Path, mesh: Mesh, dtype: torch.dtype, *, masters: bool) -> dict[str, Tensor]:
    """This rank's tensors for training: floating ones in ``dtype``, exactly as they were when they were saved.

    All files of a step (``masters``) are compared with their hashes: a run that goes on from other bytes is no use.
    """
    held = read_manifest(folder)
    tensors = load_rank(folder, mesh.rank, device=mesh.device, tp=mesh.degree, check=masters)
    if masters and MASTER in held.groups:
        tensors |= load_rank(folder, mesh.rank, device=mesh.device, tp=mesh.degree, group=MASTER)
    own = {
        name: tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in tensors.items()
    }
    return own | {name: own[first] for name, first in held.tied.items()}


def load_optimizer(
    folder: Path, mesh: Mesh, optimizer: torch.optim.Optimizer, module: nn.Module, updates: Mapping[str, float]
) -> None:
    """Give the optimizer the state in a step folder."""
    held = read_manifest(folder)
    kinds = {
        group.removeprefix(_OPTIMIZER): {
            name: tensor.clone()
            for name, tensor in load_rank(folder, mesh.rank, device=mesh.device, tp=mesh.degree, group=group).items()
        }
        for group in held.groups
        if group.startswith(_OPTIMIZER)
    }
    load_optimizer_tensors(optimizer, stored_parameters(module, held), kinds, updates)


def begin_step(
    run: Run, module: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, *, background: bool
) -> Save:
    """Begin to write ``step-N``, by all ranks: it will be complete under its name, or not there."""
    kinds, updates = optimizer_tensors(optimizer, stored_parameters(module, read_manifest(run.base)))
    trainer = json.dumps(_trainer(run, replace(progress, updates=updates)), indent=1) + "\n"
    return Save(
        module,
        run.base,
        run.output / f"step-{progress.step}",
        run.mesh,
        groups={_OPTIMIZER + kind: tensors for kind, tensors in kinds.items()},
        beside={TRAINER: trainer},
        force=True,
        background=background,
    )


def stored_parameters(module: nn.Module, held: Manifest) -> dict[str, nn.Parameter]:
    """The parameters by the names they are stored under, each once."""
    return {n: p for n, p in planned_tensors(module, held.tensors) if n in held.tensors and is_parameter(p)}


def _trainer(run: Run, progress: Progress) -> dict[str, Any]:
    counts = Counter(progress.updates.values())
    usual = counts.most_common(1)[0][0] if counts else 0.0
    return {
        "format": _FORMAT,
        "step": progress.step,
        "position": asdict(progress.position),
        "loss_scale": progress.scale and asdict(progress.scale),
        "best": progress.best and asdict(progress.best),
        "updates": {"all": usual, "but": {n: u for n, u in progress.updates.items() if u != usual}},
        "tp": run.mesh.degree,
        "dp": run.mesh.dp_degree,
        "config": run.config.model_dump(mode="json"),
    }


def number_of(path: Path) -> int:
    """The N of a ``step-N``."""
    match = _STEP.search(path.name)
    assert match is not None
    return int(match[1])
