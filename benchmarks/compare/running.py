"""The training runner on GPUs: against one GPU, resumed on another degree, merged, and with a rank killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.compare.processes import Turn

ROOT = Path(__file__).parents[2]
BOUND, MARGIN = 2e-2, 2.0
"""Of a loss in bfloat16 after many steps, relative: eps 7.8e-3, with a margin; a loss that leaps takes it further, so
it may part as far, twice over, as training on one GPU parts from itself with other last bits of its first weights."""
STEPS = 200


def runner(rank: int, turn: Turn, work: Path, gpus: tuple[int, ...], toy: bool) -> dict[str, Any]:
    """Everything in order; what can run beside another does."""
    with turn.preparing():
        return _everything(work, gpus, toy)


def _everything(work: Path, gpus: tuple[int, ...], toy: bool) -> dict[str, Any]:
    steps = 8 if toy else STEPS
    dp = 2 if len(gpus) >= 4 else 1
    work.mkdir(parents=True, exist_ok=True)
    source, nudged = _model(work / "model"), _model(work / "nudged-model", nudge=True)
    (work / "corpus.txt").write_text("\n\n".join(p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))))
    (work / "config.yaml").write_text(_config(work, steps, dp, toy))
    for tp in (1, 2):
        _cli("shard", source, "--tp", tp, "-o", work / f"tp{tp}")
    _cli("shard", nudged, "--tp", 1, "-o", work / "nudged1")
    one = _train(work, 1, "one", gpus[-1:])
    other = _train(work, 1, "nudged", gpus[:1], sharded="nudged1")
    two = _train(work, 2, "two", gpus[: 2 * dp], dp=dp)
    victim = _train(work, 2, "killed", gpus[:2], "training.steps=100000", "checkpoint.every=null")
    _ended(two)
    half = work / "two" / f"step-{steps // 2}"
    resumed = _train(work, 1, "resumed", gpus[:1], f"checkpoint.resume={half}")
    found: dict[str, Any] = {"steps": steps, "dp": dp} | _killed(work, victim)
    for process in (one, other, resumed):
        _ended(process)
    losses = {name: _losses(work / name) for name in ("one", "nudged", "two", "resumed")}
    found["bound"] = bound = max(BOUND, MARGIN * _apart(losses["nudged"], losses["one"]))
    found |= _compared("tp=2", losses["two"], losses["one"], bound)
    found |= _compared("resumed on tp=1", losses["resumed"], losses["one"], bound)
    _cli("merge", work / "two" / f"step-{steps}", "-o", work / "merged")
    found |= _merged(work, steps)
    return found


def _model(folder: Path, *, nudge: bool = False) -> Path:
    import torch

    from benchmarks.compare.small import llama

    module, _ = llama()
    if nudge:  # by as much as a product in bfloat16 is rounded
        torch.manual_seed(1)
        for parameter in module.parameters():
            parameter.data *= 1 + torch.finfo(torch.bfloat16).eps / 2 * (2 * torch.rand_like(parameter) - 1)
    module.save_pretrained(folder)
    return folder


def _config(work: Path, steps: int, dp: int, toy: bool) -> str:
    length, rows = (32, 2) if toy else (512, 8)
    return f"""
training:
  {{steps: {steps}, micro_batch_size: {rows // dp}, global_batch_size: {rows}, seq_len: {length}, lr: 1.0e-3}}
data: {{path: {work}/corpus.txt, tokenizer: bytes, cache: {work}/cache}}
checkpoint: {{every: {steps // 2}}}
logging: {{every: 1, tensorboard: false}}
"""


def _cli(*arguments: Any) -> None:
    from tpconvert.cli import main

    main([*map(str, arguments)], standalone_mode=False)


def _train(
    work: Path, tp: int, name: str, gpus: tuple[int, ...], *more: str, dp: int = 1, sharded: str = ""
) -> subprocess.Popen[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "tpconvert", "train", work / (sharded or f"tp{tp}"), "--config", work / "config.yaml",
        "--nproc-per-node", tp * dp, *more, "--output", work / name,
    ]  # fmt: skip
    with (work / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [*map(str, command)], stdout=log, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
        )


def _ended(process: subprocess.Popen[str]) -> None:
    if process.wait(200):
        log = Path(f"{process.args[-1]}.log")  # type: ignore[index]
        raise RuntimeError(f"training ended with {process.returncode}: {log.read_text()[-600:]}")


def _losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def _apart(mine: dict[int, float], theirs: dict[int, float]) -> float:
    return max(abs(mine[s] - theirs[s]) / theirs[s] for s in mine.keys() & theirs.keys())


def _compared(name: str, mine: dict[int, float], theirs: dict[int, float], bound: float) -> dict[str, Any]:
    shared, error = sorted(mine.keys() & theirs.keys()), _apart(mine, theirs)
    return {
        name: {
            "steps": len(shared), "first": mine[shared[0]], "last": mine[shared[-1]], "last_on_one": theirs[shared[-1]],
            "largest_error": error, "equal": error <= bound,
        }
    }  # fmt: skip


def _killed(work: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    """A rank killed in the middle of a run: how long the others take to end."""
    log = work / "killed" / "metrics.jsonl"
    ends = time.monotonic() + 90
    while not (log.is_file() and len(log.read_text().splitlines()) > 10):
        if time.monotonic() > ends or process.poll() is not None:
            raise RuntimeError(f"the run to be killed did not start: {(work / 'killed.log').read_text()[-300:]}")
        time.sleep(0.2)
    ranks = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    ranks = [p for p in ranks if "tpconvert.train" in Path(f"/proc/{p}/cmdline").read_text()]
    os.kill(ranks[-1], signal.SIGKILL)
    began = time.monotonic()
    code = process.wait(90)
    return {
        "killed": {
            "seconds_to_end": time.monotonic() - began,
            "exit": code,
            "said": (work / "killed.log").read_text().strip().splitlines()[-1][-200:],
        }
    }


def _merged(work: Path, steps: int) -> dict[str, Any]:
    """The merged checkpoint, as transformers loads it, against the weights of one GPU."""
    from safetensors.torch import load_file

    _cli("merge", work / "one" / f"step-{steps}", "-o", work / "merged-one")
    mine, theirs = (load_file(work / n / "model.safetensors") for n in ("merged", "merged-one"))
    errors = {k: float((mine[k].float() - v.float()).norm() / v.float().norm()) for k, v in theirs.items()}
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(work / "merged")
    same = all(bool((p == mine[n]).all()) for n, p in loaded.named_parameters() if n in mine)
    return {"merged": {"tensors": len(mine), "largest_part": max(errors.values()), "as_transformers_loads": same}}
