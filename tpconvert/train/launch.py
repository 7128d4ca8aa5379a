"""From a process that torchrun started to a rank of a run, and to an exit code with at most one message."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpconvert.errors import ConfigError, TPConvertError, TrainError
from tpconvert.train.together.meeting import meet
from tpconvert.train.together.watch import PATIENCE, Watch

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""How often this machine has started its ranks again; another's may count otherwise."""
BEGUN = "TPCONVERT_BEGUN"
"""The file by which ranks tell who launched them that they can be told to stop, and save then."""
_QUIET = {"KINETO_LOG_LEVEL": "5", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""What torch would else say: of each start and stop of its profiler, and for pages of a store that is gone."""


def main(
    folder: Path,
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    output: Path | None = None,
    resume: str | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Run this rank; the exit code.  Whoever fails first says why, in one line, and nobody else says anything."""
    parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # a shell may well go, torchrun should not
    for name, level in _QUIET.items():
        os.environ.setdefault(name, level)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        config = configured(config_path, overrides, resume)
        degree = _degree(folder)
        rank, world = _world(degree, folder)
    except TPConvertError as error:
        if first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(PATIENCE)  # torchrun ends all ranks when one exits: let the one that speaks be that one
        return error.exit_code
    store = _store(rank, world)
    try:
        name, again = meet(_within(store, "meeting"), rank, world, os.environ.get(_RESTARTS, "0") != "0")
    except TPConvertError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    config = going_on(config, output or folder) if again else config
    if rank == 0:
        print(f"# {config_path}, with defaults and overrides\n{config.to_yaml()}", flush=True)
    place = _within(store, name), (rank, world, parent)
    return _run(folder, config, degree, place, output or folder, trust_remote_code, again)


def configured(path: Path, overrides: Sequence[str], resume: str | None) -> Any:
    """The configuration of a file with what the command line says."""
    from tpconvert.train.settings.config import load_config

    if resume and "=" in resume:  # --resume without a value, before an override
        overrides, resume = [resume, *overrides], "auto"
    return load_config(path, [*overrides, *([f"checkpoint.resume={resume}"] if resume else [])])


def going_on(config: Any, output: Path) -> Any:
    """The configuration of a run that torchrun has started again: what it left is what to go on from."""
    from tpconvert.train.saving.state import complete_steps

    if not complete_steps(output):
        return config
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})


def _degree(folder: Path) -> int:
    from tpconvert.checkpoint import read_complete

    return read_complete(folder)[0].tp


def _world(degree: int, folder: Path) -> tuple[int, int]:
    """``(rank, ranks in all)`` as torchrun says, if the folder's tp degree fits."""
    try:
        rank, world, _ = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except (KeyError, ValueError):
        raise ConfigError(
            "The trainer was not started by torchrun (RANK, WORLD_SIZE and LOCAL_RANK are not set).",
            hint=f"Use torchrun --nproc-per-node {degree} -m tpconvert.train {folder} ..., or tpconvert train.",
        ) from None
    if world % degree:
        raise ConfigError(
            f"{folder} is cut for tp={degree}, which does not divide {world} ranks "
            f"({world} % {degree} = {world % degree}).",
            hint=f"Start {degree} ranks or a multiple, or reshard the folder.",
        )
    return rank, world


def _run(
    folder: Path,
    config: Any,
    degree: int,
    place: tuple[Any, tuple[int, int, int | None]],
    output: Path,
    trust_remote_code: bool,
    again: bool,
) -> int:
    import torch
    import torch.distributed as dist

    from tpconvert.parallel import make_mesh
    from tpconvert.train.loop import train
    from tpconvert.train.saving.state import begin_in, complete_steps
    from tpconvert.train.together.ranks import gathered, together

    store, (rank, world, parent) = place
    watch, new = Watch(store.clone(), rank, world, parent), rank == 0 and not output.exists()
    try:
        device = _device(torch)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(hours=1))
        if rank == 0 and BEGUN in os.environ:
            Path(os.environ[BEGUN]).touch()
        mesh = make_mesh(degree, device=device, collectives=config.parallelism.collectives)
        together(mesh, lambda: begin_in(output, again) if rank == 0 else None)
        prepares = os.environ["LOCAL_RANK"] == "0"
        train(
            folder, config, mesh, output=output, trust_remote_code=trust_remote_code, prepares=prepares,
            stopped=watch.signalled,
        )  # fmt: skip
        check_launchers(gathered(mesh, watch.orphan))  # which waits for all
        if rank == 0 and BEGUN in os.environ and not complete_steps(output):
            Path(os.environ[BEGUN]).unlink(missing_ok=True)  # told to stop before the first step
    except TPConvertError as error:
        if new:
            with contextlib.suppress(OSError):  # unless there is something in it
                output.rmdir()
        watch.fail(f"error: {error}", error.exit_code)
    except Exception as error:
        watch.fail(_told(error, rank, output), 1, peer=isinstance(error, RuntimeError))
    watch.done()
    dist.destroy_process_group()
    return 0


def check_launchers(orphans: Sequence[str]) -> None:
    """Raise where ranks have lost the process that started them; by world rank, where each is that has."""
    lost = [rank for rank, where in enumerate(orphans) if where]
    if lost:
        raise TrainError(
            f"The process that started rank{'s' if lost[1:] else ''} {', '.join(map(str, lost))} "
            f"({orphans[lost[0]]}) is gone; what the ranks had done is saved."
        )


def _store(rank: int, world: int) -> Any:
    """The store at which torchrun's ranks meet."""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timedelta(minutes=10)))
    return store


def _within(store: Any, name: str) -> Any:
    """A part of the store."""
    import torch.distributed as dist

    return dist.PrefixStore(f"tpconvert/{name}", store)


def _device(torch: Any) -> Any:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= count:
        raise ConfigError(
            f"This machine has {count} GPUs, but torchrun started more ranks here.",
            hint=f"Use --nproc-per-node {count}.",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _told(error: Exception, rank: int, output: Path) -> str:
    """One line for an error that nobody foresaw; all of it goes to a file."""
    from tpconvert.train.saving.state import FAILED

    path = output / f"{FAILED}-{rank}.txt"
    lines = str(error).strip().splitlines() or [""]
    text = f"error: rank {rank}: {type(error).__name__}: {lines[0]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        traceback.print_exception(error)
        return text
    return f"{text} (the traceback is in {path})"


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Start ``ranks`` ranks on this machine, as torchrun does; the exit code of the run."""
    import logging
    import uuid

    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("", ".agent.server.api", ".multiprocessing.api"):  # the ranks speak for themselves
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    with tempfile.TemporaryDirectory(prefix="tpconvert-") as folder:
        begun = Path(folder) / "begun"
        os.environ[BEGUN] = str(begun)
        try:
            elastic_launch(config, sys.executable)("-m", "tpconvert.train", *arguments)
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            return max(codes) if max(codes) > 0 else 1
        except SignalException as signal:
            if not begun.is_file():
                print("error: told to stop before the first step; nothing is saved.", file=sys.stderr, flush=True)
                return 128 + signal.sigval
            # else the ranks were told too, and have saved
        finally:
            del os.environ[BEGUN]
    return 0
