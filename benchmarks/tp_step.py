"""What does one training step of a converted model cost beside the whole one, and beside other ways to cut it?

    python benchmarks/tp_step.py --tp 2 --layers 8 --tokens 4096
    torchrun --nproc-per-node 2 benchmarks/tp_step.py --tokens 4096
    torchrun --nproc-per-node 2 benchmarks/tp_step.py --ways converted transformers dtensor megatron fsdp

Under torchrun the ranks are real and talk over NCCL.  Alone, this process is rank 0 of a fake process group: compute
and launch cost are measured, the network is left out.  Forward and backward, bf16, AdamW where asked for; the median of
the steps after warm-up.  *ideal / ms* is the time of the whole model on one GPU over tp times this one, at equal
compile settings.  One model after the other in one process: ``benchmarks/scaling.py`` gives each processes of its own.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import transformers

from benchmarks.compare import models, tables
from benchmarks.compare.case import Case
from benchmarks.compare.plans import make_plan_text
from benchmarks.compare.step import WARM, adam, figures, first, group, place, synchronize
from benchmarks.compare.ways import WAYS, prepare


def main() -> None:
    """Measure, and print a table on rank 0."""
    options = arguments()
    if "megatron" in options.ways and find_spec("megatron") is None:
        raise SystemExit("megatron-core is not installed.")
    warnings.simplefilter("ignore")
    rank, real = int(os.environ.get("RANK", 0)), "RANK" in os.environ
    tp = int(os.environ["WORLD_SIZE"]) if real else options.tp
    device = place(int(os.environ.get("LOCAL_RANK", 0)), options.toy)
    base = Case(
        "whole", options.model, options.layers, tokens=options.tokens, batch=options.batch, network=real,
        optimizer=options.optimizer,
    )  # fmt: skip
    plan = make_plan_text(options.model, options.layers, 1, tp, options.toy)
    rows: list[dict[str, Any]] = []
    with group(replace(base, way="converted", tp=tp), rank, device, None):
        for way in ("whole", *options.ways):
            for compiled in (False, True) if way not in ("megatron", "transformers") else (False,):
                sliced = options.sequence_parallel and way == "converted"
                case = replace(
                    base, way=way, compiled=compiled, sequence_parallel=sliced, tp=1 if way == "whole" else tp
                )
                if way != "whole" or rank == 0:
                    rows.append(measured(case, plan, device, options.toy))
                if real:
                    dist.barrier()
        if rank == 0:
            say(rows, real)
        dist.destroy_process_group()


def measured(case: Case, plan: str, device: torch.device, toy: bool) -> dict[str, Any]:
    """The figures of one case, and its memory given back."""
    case = replace(case, network=case.network and case.way != "whole")
    step = prepare(case, plan, device, toy)
    found = first(case, step)
    optimizer = adam(step) if case.optimizer else None
    for _ in range(WARM):
        step.run(optimizer)
    synchronize(device)
    found |= figures(case, step, optimizer, device, toy)
    del step, optimizer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return case.to_json() | found


def say(rows: list[dict[str, Any]], real: bool) -> None:
    """The table."""
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {'real ranks' if real else 'fake group'}"
    )
    print(rows[0]["size"], *tables.steps(rows, tables.wholes_of(rows)), sep="\n")


def arguments() -> argparse.Namespace:
    """The sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=list(models.KINDS))
    parser.add_argument("--tp", type=int, default=2, help="the degree when not under torchrun")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1, help="sequences that the tokens are of")
    parser.add_argument(
        "--ways", nargs="+", default=["converted"], choices=[*(w for w in WAYS if w != "whole"), "megatron"]
    )
    parser.add_argument("--sequence-parallel", action="store_true", help="slices of the tokens between regions")
    parser.add_argument("--optimizer", action="store_true", help="AdamW after each backward pass")
    parser.add_argument("--toy", action="store_true", help="a tiny model on CPUs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
