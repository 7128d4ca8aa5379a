"""How fast the collectives are at the sizes a step uses."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.compare.case import Case
from benchmarks.compare.processes import Turn
from benchmarks.compare.step import group, meet, place
from tpconvert import make_mesh

MIB = (1, 8, 32, 64, 128, 256)


def bandwidth(rank: int, turn: Turn, gpus: tuple[int, ...], store: Path, toy: bool) -> list[dict[str, Any]]:
    """One row a size: milliseconds of each, and what all-reduce sends each way in GB/s; of NCCL, and of copies."""
    device, ranks = place(gpus[rank], toy), len(gpus)
    case = Case("bandwidth", tp=ranks, network=True)
    rows: list[dict[str, Any]] = []
    with group(case, rank, device, store), turn.measuring(lambda: meet(case)):
        peers = make_mesh(ranks, device=device, collectives="auto" if toy or ranks != 2 else "copies").peers
        for mib in MIB[:2] if toy else MIB:
            x = torch.randn(mib * 2**20 // 2 // 4096, 4096, device=device, dtype=torch.bfloat16)
            part = x[: len(x) // ranks].clone()
            row: dict[str, Any] = {"MiB": mib, "ranks": ranks}
            row["all_reduce_ms"] = _timed(lambda x=x: dist.all_reduce(x), device)
            row["reduce_scatter_ms"] = (
                _timed(lambda x=x, part=part: dist.reduce_scatter_tensor(part, x), device) if not toy else 0.0
            )  # gloo has none
            row["all_gather_ms"] = _timed(lambda x=x, part=part: dist.all_gather_into_tensor(x, part), device)
            row["all_reduce_gb_per_s"] = 2 * (ranks - 1) / ranks * x.nbytes / row["all_reduce_ms"] / 1e6
            for kind, of in (("sum", x), ("scatter", x), ("gather", part)) if peers else ():
                row[f"copied_{kind}_ms"] = _timed(lambda of=of, kind=kind: peers.exchange(of, kind), device)
            if peers:
                row["copied_sum_gb_per_s"] = x.nbytes / row["copied_sum_ms"] / 1e6
            rows.append(row)
    return rows


def _timed(run: Any, device: torch.device) -> float:
    """The median milliseconds of a call among calls that follow one another."""
    if device.type != "cuda":
        run()
        return 1.0
    for _ in range(5):
        run()
    found = []
    for _ in range(10):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(5):
            run()
        stop.record()
        torch.cuda.synchronize(device)
        found.append(start.elapsed_time(stop) / 5)
    return statistics.median(found)
