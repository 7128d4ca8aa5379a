"""What a step costs: time, memory, collectives, and how much of their time nothing else hides."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Span = tuple[float, float]
WIRE = re.compile("nccl|PtoP|wait_signal|barrier_kernel", re.IGNORECASE)
"""Kernels and copies of collectives: NCCL's, and those of GPUs that copy into each other's memory."""


def milliseconds(step: Callable[[], Any], device: torch.device, steps: int, seconds: float) -> list[float]:
    """The time of each of up to ``steps`` steps, which end after ``seconds``."""
    found: list[float] = []
    ends = time.monotonic() + seconds
    while len(found) < steps and (len(found) < 4 or time.monotonic() < ends):
        found.append(_once(step, device))
    return found


def _once(step: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - began)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    stop.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(stop)


def summary(times: list[float]) -> dict[str, float]:
    """The median, and the spread of the middle half."""
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {"ms": statistics.median(times), "ms_low": quarters[0], "ms_high": quarters[2]}


def peak_gib(device: torch.device) -> float:
    """The most that torch has held since the last reset; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


class Counting(TorchDispatchMode):
    """Counts collectives and their bytes as they are called in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not re.search("wait|wrap", func.name()):
            name = re.sub(r"_+", " ", func.name().split("::")[1].split(".")[0]).strip()
            sizes = [t.nbytes for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.calls[name] += 1
            self.bytes[name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def profiled(step: Callable[[], Any], device: torch.device, steps: int = 3) -> dict[str, Any]:
    """Of ``steps`` steps on this GPU: kernels of communication by kind, their time, and what of it is exposed.

    A kernel of a collective runs from when this rank is ready, so it holds the wait for the others as well.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize(device)
    kernels = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end > e.time_range.start
    ]
    if not kernels:
        return {}
    wire = [(s, e) for n, s, e in kernels if WIRE.search(n)]
    work = [(s, e) for n, s, e in kernels if not WIRE.search(n)]
    span = max(e for _, _, e in kernels) - min(s for _, s, _ in kernels)
    both, busy = covered([*wire, *work]), covered(work)
    kinds = Counter(m.group(1) for n, _, _ in kernels if (m := re.search(r"ncclDevKernel_([A-Za-z]+)", n)))
    kinds += Counter("exchange" for n, _, _ in kernels if "wait_signal" in n)
    return {
        "communication_ms": covered(wire) / steps / 1000,
        "exposed_ms": (both - busy) / steps / 1000,
        "busy_ms": busy / steps / 1000,
        "idle_ms": (span - both) / steps / 1000,
        "exposed_share": (both - busy) / span,
        "nccl_kernels": {k: n / steps for k, n in kinds.items()},
        "longest": _longest(kernels, steps),
        "gaps": _gaps(kernels, steps),
    }


def _longest(kernels: Iterable[tuple[str, float, float]], steps: int) -> list[list[Any]]:
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, start, end in kernels:
        times[name[:80]] += end - start
        calls[name[:80]] += 1
    return [[name, t / steps / 1000, calls[name] / steps] for name, t in times.most_common(16)]


def _gaps(kernels: list[tuple[str, float, float]], steps: int) -> list[list[Any]]:
    """Where no kernel ran: milliseconds a step before kernels of a name, and how often; the longest first."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    end, last = kernels[0][2], ""
    for name, start, stop in sorted(kernels, key=lambda k: k[1]):
        if start > end:
            told = f"{last[:60]} > {name[:60]}"
            times[told] += start - end
            calls[told] += 1
        if stop > end:
            end, last = stop, name
    return [[name, t / steps / 1000, calls[name] / steps] for name, t in times.most_common(24)]


def covered(spans: Iterable[Span]) -> float:
    """The length of the union of spans.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total
