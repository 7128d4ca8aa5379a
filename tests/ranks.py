"""Processes that wait for functions to run as the ranks of a mesh."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

START_LIMIT = 120.0


class RankFailedError(AssertionError):
    """A rank raised, died or hung."""


class Pool:
    """``size`` ranks, started at first use; after a failure all are replaced, since the others may wait for ever."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks: list[tuple[Any, Connection]] = []

    def run(self, fn: Callable[..., Any], degree: int, *args: Any, dp: int = 1, timeout: float = 60.0) -> list[Any]:
        """What ``fn(mesh, *args)`` returns on each of ``degree * dp`` ranks."""
        task = pickle.dumps((fn.__module__, fn.__qualname__, degree, dp, args))
        try:
            if not self.ranks:
                self.start()
            chosen = self.ranks[: degree * dp]
            for _, pipe in chosen:
                pipe.send_bytes(task)
            return self.collect([pipe for _, pipe in chosen], timeout)
        except RankFailedError:
            self.close()
            raise

    def collect(self, pipes: list[Connection], timeout: float) -> list[Any]:
        """One answer from each pipe, in order."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(pipes):
            waiting = {id(p): r for r, p in enumerate(pipes) if r not in answers}
            ready = wait([pipes[r] for r in waiting.values()], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailedError(f"Ranks {sorted(waiting.values())} gave no answer within {timeout:.0f} s.")
            for pipe in ready:
                rank = waiting[id(pipe)]
                try:
                    good, answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise RankFailedError(f"Rank {rank} died.") from None
                if not good:
                    raise RankFailedError(f"Rank {rank} failed:\n{answers[rank]}")
        return [answers[r] for r in range(len(pipes))]

    def start(self) -> None:
        """Start the ranks and wait until they know one another."""
        folder = tempfile.mkdtemp(prefix="ranks-")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, f"{folder}/store", theirs), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))
        self.collect([pipe for _, pipe in self.ranks], START_LIMIT)

    def close(self) -> None:
        """End the ranks."""
        for process, pipe in self.ranks:
            pipe.close()
            process.terminate()
        for process, _ in self.ranks:
            process.join(10)
        self.ranks = []


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", message=".*autograd.function.Function.* should not be instantiated"
    )  # dynamo does
    # It also asks tensors that come into a graph of their own, such as a root hook's, for their gradient.
    warnings.filterwarnings("ignore", message=".*grad attribute of a Tensor that is not a leaf")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=90)
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(2, size + 1)}
    sharers: dict[tuple[int, ...], Any] = {}
    pairs = {
        (tp, dp): [
            [dist.new_group([d * tp + t for t in range(tp)]) for d in range(dp)],
            [dist.new_group([d * tp + t for d in range(dp)]) for t in range(tp)],
        ]
        for tp, dp in [(2, 2), (1, 2), (1, 4)]
        if tp * dp <= size
    }
    for ranks in [(0, 1), (2, 3)] if size == 4 else []:
        sharers[ranks] = dist.new_group(ranks)
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            module, name, degree, dp, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            fn: Any = importlib.import_module(module)
            for part in name.split("."):
                fn = getattr(fn, part)
            torch.manual_seed(0)
            answer = (True, fn(_mesh(rank, degree, dp, groups, pairs, sharers), *args))
            data = pickle.dumps(answer)
        except BaseException:
            data = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(data)


def _mesh(rank: int, degree: int, dp: int, groups: Any, pairs: Any, sharers: Any) -> Any:
    import torch

    from tpconvert.parallel.comm.mesh import Mesh

    if dp == 1:
        mine = {ranks: group for ranks, group in sharers.items() if rank in ranks} if degree == 4 else {}
        group = groups[degree] if degree > 1 else None
        return Mesh(rank, degree, group, torch.device("cpu"), subgroups=mine, connected=set(sharers if mine else ()))
    tp_groups, dp_groups = pairs[degree, dp]
    tp_rank, dp_rank = rank % degree, rank // degree
    return Mesh(
        tp_rank,
        degree,
        tp_groups[dp_rank] if degree > 1 else None,
        torch.device("cpu"),
        dp_rank,
        dp,
        dp_groups[tp_rank],
    )
