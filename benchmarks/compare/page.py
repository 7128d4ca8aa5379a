"""The page of all results, from the files of several calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import tables

HEAD = """# How does it scale on one machine?

Measured by `benchmarks/scaling.py`, which starts the ranks of each case in processes of their own, lets several
prepare and compile at once, and gives one at a time the GPUs to itself. Two H200 with NVLink, NVLink multicast off.
This page is made by `python benchmarks/scaling.py --render RESULTS.json --out docs/scaling.md`; what it means is
told in [performance.md](performance.md).

A Llama is of width 4096, ffn 14336, 32 heads on 8 key heads, 32000 words; bfloat16, forward and backward of one
sequence, AdamW only where it says so, gradients given up after each step. Times are the median of 20 steps after 6,
memory the most that torch held. *ideal / ms* is the time of the whole model on one GPU over tp times this one, both
eager or both compiled: 1 is perfect. *exposed* is the time in which only kernels of NCCL ran, *idle* that in which
no kernel ran, both of rank 0 under torch.profiler. All ways start from the same weights, so the loss and the
gradient norm of the first step must agree to the rounding of bfloat16; Megatron-Core draws its own. FSDP runs one
micro-batch on each rank, so it counts twice the tokens. *graphed* is forward and backward recorded as one CUDA graph
(`tpconvert.GraphedStep`), beside the whole model recorded so; the memory of these is the most since their beginning.

*Rank 0 alone* is a group in which nobody else is: the compute and the launches of a rank, without the network.
"""


def write(results: Sequence[Path], out: Path) -> None:
    """Later results take the place of earlier ones of the same case."""
    found: dict[str, list[dict[str, Any]]] = {}
    calls = []
    for path in results:
        data = json.loads(path.read_text())
        calls.append(data["about"])
        fresh: dict[str, list[dict[str, Any]]] = {}
        for row in data["rows"]:
            fresh.setdefault(row.get("job", row.get("name", "")), []).append(row)
        found |= {job: rows for job, rows in fresh.items() if job not in found or not any("error" in r for r in rows)}
    rows = [row for rows in found.values() for row in rows]
    said = "In these calls, of which the later counts where two measured the same:"
    out.write_text(f"{HEAD}\n{said}\n\n{tables.markdown(rows, calls)}", encoding="utf-8")
