"""Where does the time of a converted model's step go, beside the whole one's share of it?

    python benchmarks/where.py --one-thread                    # eager, tp=2, plain and with slices of the tokens
    python benchmarks/where.py --compiled --model bert-large --layers 24 --tokens 8192 --batch 16

Rank 0 of a group in which nobody else is, whole and converted in one process and in turns, so that what the machine
does meanwhile falls on all alike: a ratio is the median of the ratios of the rounds.  *kernels* is what
``torch.profiler`` says that the GPU computed, *copies* the part of it in which memory was copied, which a group in
which nobody else is does in the place of the network, *idle* when nothing ran between the first and the last kernel of
a step, *host* how long the processor needs to launch a step on an idle GPU.  *a rank's sizes* is a whole model with
as many heads, words and ffn features as a rank has: what a rank would take if its collectives, its hooks and its loss
cost nothing, but norms and residuals stay as they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from benchmarks.compare import measure, models
from benchmarks.compare.case import Case
from benchmarks.compare.markup import cells, table
from benchmarks.compare.plans import make_plan_text
from benchmarks.compare.step import WARM, group, place, synchronize
from benchmarks.compare.ways import WAYS, RecordedStep, Step, prepare

Run = Callable[[], Any]
BARE = "a rank's sizes, whole"


def main() -> None:
    """Measure and print."""
    options = arguments()
    warnings.simplefilter("ignore")
    device = place(0, options.toy)
    torch.autograd.set_multithreading_enabled(not options.one_thread)
    torch._dynamo.config.automatic_dynamic_shapes = False  # slices in the same process are no other length to a user
    whole = Case(
        "whole", options.model, options.layers, tokens=options.tokens, batch=options.batch, compiled=options.compiled,
        options=(("graphed", True),) if options.recorded else (),
    )  # fmt: skip
    ours = replace(whole, way="converted", tp=options.tp)
    cases = [whole, ours] + [replace(ours, sequence_parallel=True)] * (not options.plain)
    plan = make_plan_text(options.model, options.layers, 1, options.tp, options.toy)
    with group(ours, 0, device, None):
        steps = {case.name: prepare(case, plan, device, options.toy) for case in cases}
        if options.model == "llama":
            steps[BARE] = bare(whole, options.tp, device, options.toy)
        for step in steps.values():
            for _ in range(WARM):
                step.run()
        synchronize(device)
        found = in_turns(steps, options, device)
        if device.type == "cuda" and not options.times:
            for name, step in steps.items():
                found[name] |= {"host_ms": hosted(step.run, device)} | looked_into(step, device, options.recorded)
        dist.destroy_process_group()
    for name in found:
        found[name]["share"] = 1 if name == whole.name else options.tp
    if options.out:
        options.out.write_text(json.dumps(found))
    print(f"{whole.size}, torch {torch.__version__}", *rendered(found), sep="\n")


def bare(case: Case, tp: int, device: torch.device, toy: bool) -> Step:
    """A whole model of a rank's sizes."""
    config = models.config_of(case.model, case.layers, case.width, toy, models.UNMASKED if case.options else "sdpa")
    config.head_dim = config.hidden_size // config.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        setattr(config, name, getattr(config, name) // tp)
    inputs, labels = models.batch_of(case.model, config, case.tokens, case.batch, device)
    step = WAYS["whole"](case, models.skeleton_of(case.model, config), None, device, inputs, labels)
    return RecordedStep(step.module, step.loss) if case.options else step


def in_turns(steps: dict[str, Step], options: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """The median milliseconds of each in every round."""
    found: dict[str, dict[str, Any]] = {name: {"rounds": []} for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            step.run()
            times = measure.milliseconds(step.run, device, options.steps, 1e9)
            found[name]["rounds"].append(statistics.median(times))
    return found


def hosted(run: Run, device: torch.device, steps: int = 8) -> float:
    """The median milliseconds until a step has been launched."""
    found = []
    for _ in range(steps):
        synchronize(device)
        began = time.perf_counter()
        run()
        found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found)


def looked_into(step: Step, device: torch.device, recorded: bool, steps: int = 3) -> dict[str, Any]:
    """What the GPU did, kernel by kernel and op by op; a recorded step has no ops, so kernels stand in their place."""
    found = measure.profiled(step.run, device, steps)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        for _ in range(steps):
            step.run()
        synchronize(device)
    kind = torch.autograd.DeviceType.CUDA if recorded else torch.autograd.DeviceType.CPU
    ops = [
        [e.key, str(e.input_shapes), e.self_device_time_total / steps / 1000, e.count / steps]
        for e in profile.key_averages(group_by_input_shape=True)
        if e.self_device_time_total and e.device_type == kind
    ]
    host = [
        [e.key, e.self_cpu_time_total / steps / 1000, e.count / steps]
        for e in profile.key_averages()
        if e.device_type == torch.autograd.DeviceType.CPU
    ]
    copied = [
        e.self_device_time_total / steps / 1000
        for e in profile.key_averages()
        if e.device_type == torch.autograd.DeviceType.CUDA and "memcpy" in e.key.lower()
    ]
    return found | {"ops": ops, "host": host, "copied_ms": sum(copied)}


def rendered(found: dict[str, dict[str, Any]]) -> list[str]:
    """One row a way, then the ops that take another time than the whole model's share."""
    whole = next(iter(found.values()))
    lines = table(("", "ms", "over its share", "lowest and highest round", "kernels", "copies", "idle", "host"))
    for name, row in found.items():
        ratios = [ms * row["share"] / w for ms, w in zip(row["rounds"], whole["rounds"], strict=True)]
        told = [
            statistics.median(row["rounds"]),
            *(row.get(f"{what}_ms") for what in ("busy", "copied", "idle", "host")),
        ]
        ms, *rest = ("" if v is None else f"{v:.1f}" for v in told)
        ratio, spread = f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} {max(ratios):.3f}"
        lines.append(cells((name, ms, ratio, spread, *rest)))
    if "ops" not in whole:
        return lines
    for name, row in list(found.items())[1:]:
        lines += ["", f"{name}: kernels by op, beside the whole model's share of them"]
        mine, theirs = by_op(row), by_op(whole)
        more = {op: mine.get(op, 0.0) - theirs.get(op, 0.0) / row["share"] for op in {*mine, *theirs}}
        lines += table(("op", "ms", "share", "more"))
        for op in sorted(more, key=lambda op: -abs(more[op]))[:14]:
            lines.append(
                cells((op[:80], *(f"{v:.2f}" for v in (mine.get(op, 0), theirs.get(op, 0) / row["share"], more[op]))))
            )
    return lines


def by_op(row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of kernels that each op launches."""
    found: dict[str, float] = {}
    for op, _, ms, _ in row["ops"]:
        found[op] = found.get(op, 0.0) + ms
    return found


def arguments() -> argparse.Namespace:
    """The sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=list(models.KINDS))
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1, help="sequences that the tokens are of")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--recorded", action="store_true", help="as one CUDA graph")
    parser.add_argument("--one-thread", action="store_true", help="backward in the thread that forward runs in")
    parser.add_argument("--plain", action="store_true", help="without slices of the tokens")
    parser.add_argument("--times", action="store_true", help="no profile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="of each in a round")
    parser.add_argument("--out", type=Path, help="everything, as JSON")
    parser.add_argument("--toy", action="store_true", help="a tiny model on CPUs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
