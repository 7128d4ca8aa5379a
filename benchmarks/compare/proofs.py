"""``tpconvert verify`` of small models on GPU ranks, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare.processes import Job, Turn

SMALL = Path(__file__).parent / "small.py"
AT_ONCE = 5
"""Proofs that run at once: collectives of many processes on one GPU wait for one another."""


def proofs(degrees: list[int], toy: bool) -> list[Job]:
    """One job a model, degree and dtype; each starts ranks of its own."""
    kinds = [("llama", "float32")] if toy else [
        (m, d) for m in ("llama", "gpt2", "t5", "mixtral") for d in ("float32", "bfloat16")
    ]  # fmt: skip
    asked = [(m, tp, d, toy, False, "copies" if tp == 2 and not toy else "auto") for tp in degrees for m, d in kinds]
    if not toy:
        asked += [(m, degrees[0], "float32", toy, True, "copies") for m in ("llama", "gpt2")]
    return [
        Job(f"verify {m} tp={tp} {d} {by}{' sequence parallel' * sliced}", _proved, given, 1, gpus, 300)
        for m, tp, d, toy, sliced, by in asked
        for given in [(m, tp, d, toy, sliced, by)]
        for gpus in [tuple(range(tp))]  # of the ranks that it starts: nobody may measure on any of them meanwhile
    ]


def _proved(rank: int, turn: Turn, model: str, tp: int, dtype: str, toy: bool, sliced: bool, by: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tpconvert", "verify", f"{SMALL}:{model}", "--tp", str(tp), "--dtype", dtype]
    command += ["--collectives", by]
    command += ["--json", "--device", "cpu" if toy else "cuda"] + ["--sequence-parallel"] * sliced
    with turn.preparing(), turn.one_of(AT_ONCE):
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True, check=False
        )
    if not done.stdout:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    worst = max(found["checks"], key=lambda c: (c["error"] is None, c["error"] or 0))
    return {
        "model": model, "tp": tp, "dtype": dtype, "sequence_parallel": sliced, "collectives": by,
        "equal": found["equal"], "exit": done.returncode, "checks": len(found["checks"]), "bound": found["bound"],
        "largest": worst["error"], "worst": f"{worst['kind']} {worst['name']}", "verdict": found["verdict"],
    }  # fmt: skip
