"""Does a run whose ranks are killed at random end with the weights of one that was left alone?

    python benchmarks/kills.py --kills 20

Trains a small model twice on CPU ranks: once undisturbed, once under ``torchrun --max-restarts`` while a rank chosen
at random is killed (SIGKILL) at a moment chosen at random, as a machine would go: while starting, in a step, in a
save.  Compares every byte of the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import yaml
from torch import nn

WORDS, WIDTH = 256, 32


class Layer(nn.Module):
    """A gated feed-forward layer with dropout, so that random numbers have to be the same ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.gate, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual."""
        h = self.norm(x)
        return x + self.dropout(self.down(self.up(h) * self.gate(h).sigmoid()))


class Small(nn.Module):
    """A language model of feed-forward layers: enough to have cut, whole and random parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS + 3, WIDTH), nn.Linear(WIDTH, WORDS + 3, bias=False)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def small() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and its example inputs."""
    torch.manual_seed(0)
    return Small(), {"ids": torch.arange(14).view(2, 7)}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run that was disturbed."""

    code: int
    kills: int
    seconds: float
    error: str
    different: tuple[str, ...]
    """Files of the last step that differ from the undisturbed run's."""


def main() -> None:
    """Run, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(Path(folder), kills=options.kills, steps=options.steps, seed=options.seed)
    different = ", ".join(result.different) or "no file"
    print(f"{result.kills} kills, exit code {result.code}, {result.seconds:.0f} s, different: {different}")
    sys.exit(bool(result.code or result.different or result.kills < options.kills))


def compare(folder: Path, *, kills: int, steps: int, seed: int, tp: int = 2, dp: int = 1) -> Result:
    """Train undisturbed and disturbed."""
    from tpconvert.checkpoint import module_weights, shard
    from tpconvert.planning import make_plan

    module, inputs = small()
    plan = make_plan(module, inputs, tp=tp, source={"name": f"{Path(__file__).resolve()}:small"})
    shard(module_weights(module), plan, folder / "model")
    (folder / "text.txt").write_text("".join(f"{i} times {i % 7} is {i * (i % 7)}.\n" for i in range(1500)))
    config = {
        "training": {"steps": steps, "micro_batch_size": 2, "seq_len": 32, "precision": "fp32", "lr": 1e-3},
        "data": {"path": str(folder / "text.txt"), "tokenizer": "bytes"},
        "checkpoint": {"every": 5},
        "logging": {"every": 1, "tensorboard": False},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    with (folder / "alone.txt").open("w") as errors:
        if start(folder, "alone", ranks=tp * dp, restarts=0, errors=errors).wait():
            raise SystemExit(f"The undisturbed run failed: {Path(errors.name).read_text()}")
    with (folder / "killed.txt").open("w") as errors:
        process = start(folder, "killed", ranks=tp * dp, restarts=kills, errors=errors)
        done, seconds = disturb(process, folder, kills=kills, ranks=tp * dp, chance=random.Random(seed))
    one, other = (contents(folder / name / f"step-{steps}") for name in ("alone", "killed"))
    different = tuple(sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n)))
    return Result(process.returncode, done, seconds, Path(errors.name).read_text(), different)


def start(folder: Path, name: str, *, ranks: int, restarts: int, errors: TextIO) -> subprocess.Popen[bytes]:
    """A run under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "-m", "tpconvert.train", str(folder / "model")]
    command += ["--config", str(folder / "c.yaml"), "--output", str(folder / name)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)


def disturb(
    process: subprocess.Popen[bytes], folder: Path, *, kills: int, ranks: int, chance: random.Random
) -> tuple[int, float]:
    """Kill ranks of a run until there were enough of them, and let it end: ``(kills, seconds)``."""
    began, done = time.monotonic(), 0
    while done < kills and (workers := wait_for(process, ranks)):
        if chance.random() < 0.8:  # else anywhere in the start
            wait_for_step(process, folder / "killed" / "metrics.jsonl", workers)
        time.sleep(chance.random() * 2)
        try:
            os.kill(chance.choice(workers), signal.SIGKILL)
        except ProcessLookupError:
            continue
        done += 1
        while process.poll() is None and set(workers) & set(workers_of(process)):
            time.sleep(0.05)
    process.wait()
    return done, time.monotonic() - began


def wait_for(process: subprocess.Popen[bytes], ranks: int) -> list[int]:
    """The processes of all ranks, once they are there; none where the run is over."""
    while process.poll() is None:
        if len(found := workers_of(process)) == ranks:
            return found
        time.sleep(0.05)
    return []


def wait_for_step(process: subprocess.Popen[bytes], log: Path, workers: list[int]) -> None:
    """Until these ranks have logged a step."""
    seen = log.stat().st_mtime_ns if log.exists() else 0
    while process.poll() is None and set(workers) <= set(workers_of(process)):
        if log.exists() and log.stat().st_mtime_ns > seen and log.stat().st_size:
            return
        time.sleep(0.02)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The ranks that torchrun has started and that live."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        children = [int(text) for text in path.read_text().split()]
    except OSError:
        return []
    return [pid for pid in children if b"tpconvert.train" in _read(pid, "cmdline") and b") Z" not in _read(pid, "stat")]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def contents(step: Path) -> dict[str, bytes]:
    """Every file of a step, by name; what the configuration said of resuming is not compared."""
    files = {p.relative_to(step).as_posix(): p.read_bytes() for p in sorted(step.rglob("*")) if p.is_file()}
    files.pop("manifest.json", None)  # holds the hash of trainer.json
    if "trainer.json" in files:
        files["trainer.json"] = json.dumps(json.loads(files["trainer.json"]) | {"config": None}).encode()
    return files


if __name__ == "__main__":
    main()
