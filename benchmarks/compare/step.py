"""One case in the processes of its ranks: prepared, warmed up, and measured when it is its turn."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.compare import measure
from benchmarks.compare.case import Case
from benchmarks.compare.processes import Turn
from benchmarks.compare.ways import Step, prepare

WARM = 3


def run_case(rank: int, turn: Turn, case: Case, plan: str | None, gpus: tuple[int, ...], store: Path, toy: bool) -> Any:
    """What one rank does; rank 0 returns the figures."""
    warnings.simplefilter("ignore")
    device = place(gpus[rank], toy)
    with group(case, rank, device, store):
        began = time.monotonic()
        with turn.preparing():
            meet(case)
            step = prepare(case, plan, device, toy)
            found = first(case, step)
            optimizer = adam(step) if case.optimizer else None
            for _ in range(WARM):
                step.run(optimizer)
            synchronize(device)
        found["prepared_s"] = time.monotonic() - began
        with turn.measuring(lambda: meet(case)):
            found |= figures(case, step, optimizer, device, toy)
        return case.to_json() | found


def place(gpu: int, toy: bool) -> torch.device:
    """This rank's device."""
    torch.set_num_threads(1)
    if toy:
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


@contextmanager
def group(case: Case, rank: int, device: torch.device, store: Path | None) -> Iterator[None]:
    """The ranks of a case: NCCL (gloo on CPUs), or a group in which nobody else is."""
    if case.way == "whole":
        yield
        return
    if case.network:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        method = f"file://{store}" if store else "env://"  # torchrun says where
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=case.tp)
    else:
        from benchmarks.compare.alone import join_alone

        held = join_alone(case.tp, device)  # noqa: F841
    yield


def meet(case: Case) -> None:
    """Wait for the other ranks, without a GPU."""
    if case.network:
        dist.all_reduce(torch.zeros(1))


def first(case: Case, step: Step) -> dict[str, Any]:
    """The loss and the gradient norm of the first step, by which ways can be compared; and its collectives."""
    found: dict[str, Any] = {}
    counting = measure.Counting()
    if case.compiled or dict(case.options).get(
        "graphed"
    ):  # which count by the kernels of a step, if there is a network
        loss = backward(step)
    else:
        with counting:
            loss = backward(step)
        found |= {"collectives": dict(counting.calls), "collective_bytes": dict(counting.bytes)}
    found["loss"] = float(loss)
    if step.norm is not None and (case.network or case.way == "whole"):
        found["grad_norm"] = step.norm()
    step.module.zero_grad()
    return found


def backward(step: Step) -> torch.Tensor:
    """A step that leaves its gradients."""
    kept: Callable[..., None] = step.module.zero_grad
    step.module.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    try:
        return step.run().detach()
    finally:
        step.module.zero_grad = kept  # type: ignore[method-assign]


def adam(step: Step) -> torch.optim.Optimizer:
    """AdamW over what this rank holds."""
    return torch.optim.AdamW([p for p in step.module.parameters() if p.requires_grad], lr=1e-5, fused=True)


def figures(case: Case, step: Step, optimizer: Any, device: torch.device, toy: bool) -> dict[str, Any]:
    """Time, memory, and the share of the network."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        step.run(optimizer)
        torch.cuda.synchronize(device)
        if not dict(case.options).get("graphed"):  # whose memory is taken when it is recorded
            torch.cuda.reset_peak_memory_stats(device)

    def one() -> None:
        step.run(optimizer)

    steps = 2 if toy else 20
    times = measure.milliseconds(one, device, steps, seconds=1e9 if case.network else 3.0)
    found: dict[str, Any] = measure.summary(times) | {"peak_gib": measure.peak_gib(device), "times": times}
    found["tokens_per_s"] = case.tokens / found["ms"] * 1000 * (case.tp if case.way == "fsdp" else 1)
    if case.network and device.type == "cuda":
        found |= measure.profiled(one, device)
    return found


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
