"""Work in forked processes, each with a limit of time, so that a hang or a crash of one costs nothing else.

What is imported before is not imported again.  The parent never touches a GPU: a forked process could not use it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("fork")
LONGEST = 60
"""Seconds that one may measure."""


@dataclass
class Job:
    """One function, run in ``ranks`` processes; rank 0 writes its result."""

    name: str
    run: Callable[..., Any]
    """Called with ``(rank, turn)`` and the arguments."""
    arguments: tuple[Any, ...] = ()
    ranks: int = 1
    gpus: tuple[int, ...] = (0,)
    """The GPU of each rank."""
    limit: float = 120.0
    processes: list[Any] = field(default_factory=list, repr=False)
    began: float = 0.0
    took: float = 0.0


class Turn:
    """Whose turn it is on some GPUs: many may prepare at once, one measures, and then nobody else does anything.

    Held by rank 0 for all ranks of its job, which meet before and after.
    """

    def __init__(self, folder: Path, gpus: Sequence[int], rank: int) -> None:
        self.folder = folder
        self.files = [(folder / f"gpu-{g}.lock").open("a") for g in sorted(set(gpus))] if rank == 0 else []

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """While others may prepare too."""
        with self._held(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def one_of(self, places: int) -> Iterator[None]:
        """While fewer than so many others do the same."""
        files = [(self.folder / f"place-{n}.lock").open("a") for n in range(places)]
        while True:
            for file in files:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield
                    return
            time.sleep(0.1)

    @contextlib.contextmanager
    def measuring(self, meet: Callable[[], None]) -> Iterator[None]:
        """While nobody else uses the GPUs; ``meet`` waits for all ranks."""
        with self._held(fcntl.LOCK_EX):
            meet()
            signal.alarm(LONGEST)  # a hang here would take the turns of all others
            yield
            meet()
            signal.alarm(0)

    @contextlib.contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        for file in self.files:
            fcntl.flock(file, kind)
        try:
            yield
        finally:
            for file in self.files:
                fcntl.flock(file, fcntl.LOCK_UN)


def run_all(jobs: Sequence[Job], folder: Path, until: float, done: Callable[[Job, dict[str, Any]], None]) -> None:
    """Run jobs at the same time, until each is done, over its limit, or the clock says ``until``."""
    for job in jobs:
        start(job, folder)
    waiting = list(jobs)
    while waiting:
        for job in list(waiting):
            now = time.monotonic()
            failed = any(p.exitcode not in (None, 0) for p in job.processes)
            if all(p.exitcode is not None for p in job.processes) or failed or now > min(job.began + job.limit, until):
                late = not failed and any(p.exitcode is None for p in job.processes)
                job.took = now - job.began
                stop(job)
                waiting.remove(job)
                done(job, result_of(job, folder, late))
        time.sleep(0.05)


def start(job: Job, folder: Path) -> None:
    """Fork its ranks."""
    job.began = time.monotonic()
    place = folder / slug(job.name)
    place.mkdir(parents=True, exist_ok=True)
    job.processes = [CONTEXT.Process(target=_rank, args=(job, rank, folder, place)) for rank in range(job.ranks)]
    for process in job.processes:
        process.start()


def stop(job: Job) -> None:
    """End what is left of it, with what its processes started."""
    for process in job.processes:
        if process.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join(5)


def result_of(job: Job, folder: Path, late: bool) -> dict[str, Any]:
    """What rank 0 wrote, or why it wrote nothing."""
    place = folder / slug(job.name)
    if (place / "result.json").is_file():
        return json.loads((place / "result.json").read_text())
    if late:
        return {"error": f"not done within {job.took:.0f} s"}
    logs = [(place / f"rank-{r}.log").read_text(errors="replace") for r in range(job.ranks)]
    told = [line for log in logs for line in log.strip().splitlines()[-1:]]
    return {"error": "; ".join(told)[:600] or "a rank died"}


def slug(name: str) -> str:
    """A name as part of a path."""
    return "".join(c if c.isalnum() or c in "=-." else "_" for c in name)


def _rank(job: Job, rank: int, folder: Path, place: Path) -> None:
    os.setsid()
    log = (place / f"rank-{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.dump_traceback_later(max(job.limit - 5, 1))
    try:
        result = job.run(rank, Turn(folder, job.gpus, rank), *job.arguments)
        if rank == 0:
            (place / "writing.json").write_text(json.dumps(result))
            (place / "writing.json").rename(place / "result.json")
        os._exit(0)  # no tear-down: it can hang, and everything is written
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
