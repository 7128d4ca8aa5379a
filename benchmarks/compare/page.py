"""The page of all results, from the files of several calls."""

from __future__ import annotations

import json
from collections import Counter
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
eager or both compiled and of the same call (of tp=1 where a call has none): 1 is perfect. *exposed* is the time in
which only collectives ran (kernels of NCCL, copies from GPU to GPU, waits for the other GPU), *idle* that in which
nothing ran, both of rank 0 under torch.profiler. Two GPUs copy what is 64 MiB or more into each other's memory,
which are the *exchanges*, or all with *collectives=copies*, or nothing with *collectives=nccl*. All ways start from
the same weights, so the loss and the gradient norm of the first step must agree to the rounding of bfloat16;
Megatron-Core draws its own. FSDP runs one micro-batch on each rank, so it counts twice the tokens. *compiled* is
layer by layer, with the last norm and the loss. *graphed* is forward and backward recorded as one CUDA graph
(`tpconvert.GraphedStep`), beside the whole model recorded so; the memory of these is the most since their beginning.
Memory that GPUs copy into is not counted: twice the largest exchange.

*Rank 0 alone* is a group in which nobody else is: the compute and the launches of a rank, without the network.
"""


def write(results: Sequence[Path], out: Path) -> None:
    """Later results take the place of earlier ones of the same case."""
    found: dict[str, list[dict[str, Any]]] = {}
    calls: list[dict[str, Any]] = []
    call_of: dict[str, int] = {}
    for path in results:
        data = json.loads(path.read_text())
        fresh: dict[str, list[dict[str, Any]]] = {}
        for row in data["rows"]:
            fresh.setdefault(row.get("job", row.get("name", "")), []).append(row)
        kept = {job: rows for job, rows in fresh.items() if job not in found or not any("error" in r for r in rows)}
        found |= kept
        call_of |= dict.fromkeys(kept, len(calls))
        calls.append(data["about"])
    if len(calls) > 1:
        for number, about in enumerate(calls):
            about["gives"] = _parts([rows[0] for job, rows in found.items() if call_of[job] == number])
    rows = [row | {"call": call_of[job]} for job, rows in found.items() for row in rows]
    several = "In these calls, of which the later counts where two measured the same:"
    said = several if len(calls) > 1 else "In this call:"
    out.write_text(f"{HEAD}\n{said}\n\n{tables.markdown(rows, calls)}", encoding="utf-8")


def _parts(rows: Sequence[dict[str, Any]]) -> str:
    """What rows are of, and how many."""
    counted = Counter(row["part"].split()[0].rstrip(":") for row in rows)
    return ", ".join(f"{n} of {part}" for part, n in counted.items())
