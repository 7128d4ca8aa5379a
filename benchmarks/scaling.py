"""Everything about a converted model on several GPUs of one machine, in one call.

    python benchmarks/scaling.py --seconds 540 --out results
    python benchmarks/scaling.py --toy --out results        # on CPUs with gloo, tiny models: does it run?
    python benchmarks/scaling.py --render results/scaling.json --out docs/scaling.md

*proofs*: ``tpconvert verify`` on GPU ranks, in float32 and bfloat16.  *steps*: forward and backward of a Llama, whole
and in every way it can be cut, over NCCL.  *alone*: the same as rank 0 of a group in which nobody else is, compute and
launches without the network, and *others*: other kinds of models so.  *bandwidth* of collectives.  *runner*: training
against one GPU, resumed on another degree, merged, with a rank killed.  *load*: from the disk to the GPUs.  *costs*:
against layers, tokens, width and tp.

The program starts the ranks itself, each case in processes of its own with a limit of time: a case that hangs costs its
own figure and no other.  Results are written as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # many cases compile at once, each in a process of its own
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else the parent would touch a GPU, and no forked process could
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._dynamo
import torch._inductor.compile_fx
import transformers

from benchmarks.compare import cases, loading, page, proofs, running, step, tables
from benchmarks.compare.bandwidth import bandwidth
from benchmarks.compare.case import Case
from benchmarks.compare.growth import plot
from benchmarks.compare.plans import key, make_plans
from benchmarks.compare.processes import Job, run_all, slug

PARTS = ("bandwidth", "proofs", "steps", "alone", "runner", "load", "others", "costs")
AT_ONCE = 7
"""Cases that prepare at the same time on a GPU."""


def main() -> None:
    """Run the parts that are asked for."""
    options = arguments()
    if options.render:
        page.write(options.render, options.out)
        return
    warnings.simplefilter("ignore")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    gpus = 2 if options.toy else torch.cuda.device_count()
    if torch.cuda.is_initialized() and set(options.parts) - {"proofs"}:
        sys.exit("An import has begun CUDA (torchao does), so no process that is forked could use it: run without it.")
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="scaling-", dir=options.work))
    run = Run(options, gpus, work, began)
    try:
        run.everything()
    finally:  # first the results: to remove large files takes its time
        text = tables.markdown(run.rows, [run.about()])
        (options.out / "scaling.md").write_text(text)
        (options.out / "scaling.json").write_text(json.dumps({"about": run.about(), "rows": run.rows}, indent=1))
        plot(run.rows, options.out / "growth.png")
        shutil.rmtree(work, ignore_errors=True)
    print(text)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("scaling-results"))
    parser.add_argument("--work", type=Path, help="a folder on a large disk, for checkpoints")
    parser.add_argument("--seconds", type=float, default=540.0, help="no case is begun after that, none outlasts it")
    parser.add_argument("--gb", type=float, default=16.0, help="of the model that is loaded")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose sizes and names hold one of these")
    parser.add_argument("--options", nargs="*", default=[], metavar="JSON", help="further cases of the converted model")
    parser.add_argument("--render", nargs="+", type=Path, metavar="JSON", help="results -> the page --out, no run")
    parser.add_argument("--toy", action="store_true", help="tiny models on CPUs")
    return parser.parse_args()


class Run:
    """One call: what was asked for, and what was found so far."""

    def __init__(self, options: argparse.Namespace, gpus: int, work: Path, began: float) -> None:
        self.options, self.gpus, self.work, self.began = options, gpus, work, began
        self.rows: list[dict[str, Any]] = []
        self.parts: dict[str, str] = {}
        self.until = began + options.seconds

    def everything(self) -> None:
        """All parts: what needs no turn of its own beside the first cases, then case by case."""
        toy, parts = self.options.toy, set(self.options.parts)
        more = tuple(
            tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in json.loads(o).items())
            for o in self.options.options
        )
        found = [(p, c) for p, made in self.cases(more).items() if p in parts for c in made]
        found = [(p, c) for p, c in found if any(o in f"{c.size}: {c.name}" for o in self.options.only)]
        found = [(p, shrunk(c) if toy else c) for p, c in found]
        found = list({c: (p, c) for p, c in reversed(found)}.values())[::-1]
        self.say(f"{len(found)} cases on {self.gpus} GPUs")
        plans = make_plans([c for _, c in found], toy, os.cpu_count() or 1)
        self.say(f"{len(plans)} plans made")
        waves = self.waves(found, plans)
        if "bandwidth" in parts:
            self.run(
                [
                    Job(
                        "bandwidth",
                        bandwidth,
                        (tuple(range(self.gpus)), self.work / "b.store", toy),
                        self.gpus,
                        tuple(range(self.gpus)),
                        60,
                    )
                ]
            )
        beside, every = [], tuple(range(self.gpus))
        if "proofs" in parts:
            asked = proofs.proofs([d for d in (2, 4) if d <= self.gpus], toy)
            beside += [job for job in asked if any(o in job.name for o in self.options.only)]
        if "runner" in parts:
            beside.append(
                Job(
                    "runner",
                    running.runner,
                    (self.work / "run", every, toy),
                    1,
                    every,
                    400 if toy else 170,
                )
            )
        if "load" in parts:
            beside.append(
                Job(
                    "written",
                    loading.written,
                    (self.work / "load", self.options.gb, toy),
                    1,
                    tuple(range(self.gpus)),
                    150,
                )
            )
        self.run(beside + (waves.pop(0) if waves else []))
        for wave in waves:
            if time.monotonic() > self.until - (0 if toy else 65 if "load" in parts else 40):
                self.say(f"no time left for {len(wave)} cases")
                self.rows += [
                    {"part": self.parts.get(job.name, ""), "name": job.name, "error": "no time left"} for job in wave
                ]
                continue
            self.run(wave)
        if "load" in parts:
            self.load()

    def cases(self, more: Any) -> dict[str, list[Case]]:
        """Of each part."""
        return {
            "steps": cases.network(self.gpus, more),
            "others": cases.others(),
            "alone": cases.alone(more),
            "costs": cases.costs(),
        }

    def waves(self, found: list[tuple[str, Case]], plans: Any) -> list[list[Job]]:
        """Jobs that prepare at the same time, as many as GPUs have room for."""
        waves: list[list[Job]] = [[]]
        load = [0] * self.gpus
        for number, (part, case) in enumerate(found):
            mine = tuple(range(case.tp)) if case.network else (min(range(self.gpus), key=load.__getitem__),)
            if any(load[g] >= (2 if self.options.toy else AT_ONCE) for g in mine):
                waves.append([])
                load = [0] * self.gpus
            for g in mine:
                load[g] += 1
            plan, _ = plans.get(key(case), (None, 0.0)) if case.way == "converted" else (None, 0.0)
            name = f"{part}: {case.size}: {case.name}{', network' if case.network else ''}"
            self.parts[name] = part
            given = (case, plan, mine, self.work / f"{number}.store", self.options.toy)
            waves[-1].append(Job(name, step.run_case, given, case.ranks, mine, 170))
        return waves

    def load(self) -> None:
        """One after the other: a disk has one reader at a time."""
        toy, work = self.options.toy, self.work / "load"
        if not (work / "tp2").is_dir():
            return
        both = tuple(range(2))
        for number, (way, gpus, cold) in enumerate(
            (
                ("load", both, False),
                ("from_pretrained", (0,), False),
                ("from_pretrained", both, False),
                ("load_file", (0,), False),
                ("load_rank", (0,), False),
                ("load_file", (0,), False),
                ("load_rank", (0,), False),
                ("load_rank", (0,), True),
                ("load_file", (0,), True),
            )
        ):
            store = self.work / f"load-{number}.store"
            self.run(
                [
                    Job(
                        f"load {number}: {way} on {len(gpus)}{', cold' if cold else ''}",
                        loading.loaded,
                        (way, work, gpus, store, cold, toy),
                        len(gpus),
                        gpus,
                        60,
                    )
                ]
            )
        shutil.rmtree(work, ignore_errors=True)

    def run(self, jobs: list[Job]) -> None:
        """Run jobs beside one another."""
        run_all(jobs, self.work, self.until, self.done)

    def done(self, job: Job, result: Any) -> None:
        """Keep a result, and say it."""
        for row in result if isinstance(result, list) else [result]:
            row |= {"part": self.parts.get(job.name, job.name), "job": job.name, "took_s": round(job.took, 1)}
            self.rows.append(row)
            with (self.options.out / "scaling.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        told = result.get("error") if isinstance(result, dict) else None
        if told:
            with (self.options.out / "failed.log").open("a") as file:
                for log in sorted((self.work / slug(job.name)).glob("rank-*.log")):
                    file.write(f"===== {job.name} {log.name}\n{log.read_text(errors='replace')[-4000:]}\n")
        self.say(f"{job.name}: {told or tables.short(result)}")

    def say(self, text: str) -> None:
        """A line with the time."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def about(self) -> dict[str, Any]:
        """What it was run with."""
        return {
            "torch": torch.__version__, "transformers": transformers.__version__, "gpus": self.gpus,
            "command": " ".join(["python", "benchmarks/scaling.py", *sys.argv[1:]]), "toy": self.options.toy,
            "seconds": round(time.monotonic() - self.began),
        }  # fmt: skip


def shrunk(case: Case) -> Case:
    """The same with few layers and tokens."""
    return replace(case, layers=2, tokens=64 if case.tokens <= 4096 else 128, batch=min(case.batch, 2))


if __name__ == "__main__":
    main()
