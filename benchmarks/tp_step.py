"""What does one training step of a converted Llama cost beside the whole model on one GPU?

    python benchmarks/tp_step.py --tp 2 --layers 8 --tokens 4096
    torchrun --nproc-per-node 2 benchmarks/tp_step.py --tokens 4096
    torchrun --nproc-per-node 2 benchmarks/tp_step.py --tokens 4096 --sequence-parallel

Under torchrun the ranks are real and talk over NCCL.  Alone, this process is rank 0 of a fake process group: compute
and launch cost are measured, the network is left out.  Forward and backward, bf16, AdamW left out; median of the
steps after warm-up.  *efficiency* is whole time / (tp x converted time) at equal compile settings.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tpconvert import cross_entropy, make_mesh, make_plan, parallelize
from tpconvert.parallel.convert import output_gathers
from tpconvert.parallel.mesh import Mesh
from tpconvert.source.frugal import frugal, parameters_to_meta
from tpconvert.spec.plan import Plan


def main() -> None:
    """Measure, and print a table on rank 0."""
    options = arguments()
    real = "RANK" in os.environ
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    start_group(options.tp, real, device)
    mesh = make_mesh(dist.get_world_size(), device=device)
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=options.layers,
        vocab_size=32000,
        dtype="bfloat16",
        use_cache=False,
    )
    with frugal():
        skeleton = parameters_to_meta(LlamaForCausalLM(config)).to(torch.bfloat16)
    began = time.perf_counter()
    plan = make_plan(skeleton, {"input_ids": torch.randint(0, 32000, (2, 13)), "use_cache": False}, tp=mesh.degree)
    say(mesh, f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.cuda.get_device_name()}")
    say(
        mesh,
        f"Llama 4096/14336, {options.layers} layers, {options.tokens} tokens in {options.batch}, bf16, "
        f"tp={mesh.degree}{', sequence parallel' * options.sequence_parallel}, "
        f"{'NCCL' if real else 'fake process group'}; planned in {time.perf_counter() - began:.1f} s",
    )
    say(mesh, f"{'':28}{'ms':>8}{'peak GiB':>10}{'efficiency':>12}")
    times = {}
    for compiled in (False, True):
        for name in ("whole", "converted"):
            if name == "whole" and mesh.rank:
                dist.barrier()
                continue
            step = prepared(skeleton, config, plan if name == "converted" else None, mesh, compiled, options)
            times[name, compiled], peak = measure(step, options.steps)
            ratio = (
                times["whole", compiled] / (mesh.degree * times[name, compiled])
                if mesh.rank == 0 and name != "whole"
                else None
            )
            label = f"{name}, {'compiled per layer' if compiled else 'eager'}"
            say(mesh, f"{label:28}{times[name, compiled]:8.1f}{peak:10.2f}{'' if ratio is None else f'{ratio:12.2f}'}")
            del step
            gc.collect()
            torch.cuda.empty_cache()
            if name == "whole":
                dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    """The sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="the degree when not under torchrun")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1, help="sequences that the tokens are of")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequence-parallel", action="store_true", help="slices of the tokens between regions")
    return parser.parse_args()


def start_group(tp: int, real: bool, device: torch.device) -> None:
    """NCCL under torchrun, else a group in which nobody else is."""
    if real:
        dist.init_process_group("nccl", device_id=device)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())


def prepared(
    skeleton: nn.Module,
    config: LlamaConfig,
    plan: Plan | None,
    mesh: Mesh,
    compiled: bool,
    options: argparse.Namespace,
) -> Callable[[], None]:
    """One forward and backward, of the whole model or of this rank's part."""
    module = copy.deepcopy(skeleton)
    blocks = ()
    if plan is not None:
        (head,) = output_gathers(plan)
        blocks = head.blocks
        parallelize(module, plan, mesh, gather_output=False, sequence_parallel=options.sequence_parallel)
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = nn.Parameter(torch.empty_like(p, device=mesh.device).normal_(0, 0.02))
    module.to(mesh.device)
    module.train()
    if compiled:
        for layer in module.model.layers:
            layer.compile(fullgraph=True)
    shape = options.batch, options.tokens // options.batch
    ids = torch.randint(0, config.vocab_size, shape, device=mesh.device)
    labels = torch.randint(0, config.vocab_size, shape, device=mesh.device)

    def step() -> None:
        logits = module(input_ids=ids, use_cache=False).logits
        if plan is None:
            loss = torch.nn.functional.cross_entropy(logits.float().view(-1, config.vocab_size), labels.view(-1))
        else:
            loss = cross_entropy(logits, labels, mesh, blocks)
        loss.backward()
        module.zero_grad(set_to_none=False)

    return step


def measure(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """``(median ms, peak GiB)``."""
    for _ in range(4):
        step()
    torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(steps):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found), torch.cuda.max_memory_allocated() / 2**30


def say(mesh: Mesh, text: str) -> None:
    """Print on rank 0."""
    if mesh.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
