"""What does recording micro-batches as CUDA graphs bring in the training runner, and are the numbers the same?

    torchrun --nproc-per-node 2 benchmarks/graphs.py --prove          # losses and gradient norms, plain beside recorded
    torchrun --nproc-per-node 2 benchmarks/graphs.py --speed          # tokens/s at tp=2 and dp=2
    torchrun --nproc-per-node 2 benchmarks/graphs.py --prove --toy    # on CPUs, where all runs are plain ones

Both train by ``tpconvert.train`` from random weights; nothing is saved.  Tokens/s are by the median of the steps after
the first ten.  ``--prove`` prints, for each case, whether every loss and norm of 8 steps has the same bits, or else by
how much the worst differs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import statistics
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf

BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 3}
MODELS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "bert-large": (hf.BertForMaskedLM, hf.BertConfig, {**BERT, "vocab_size": 30522}, {"objective": "masked"}),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2, {}),
    "llama": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {**SMALL, "num_key_value_heads": 2, "vocab_size": 512, "attn_implementation": "eager"},
        {},
    ),
    "llama-sdpa": (hf.LlamaForCausalLM, hf.LlamaConfig, {**SMALL, "num_key_value_heads": 2, "vocab_size": 512}, {}),
    "bert": (
        hf.BertForMaskedLM,
        hf.BertConfig,
        {**SMALL, "vocab_size": 512, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        {"objective": "masked"},
    ),
}
"""Name -> class, class of its configuration, sizes, what of ``data`` is not the default."""
TOY = {"bert-large": {"hidden_size": 64, "num_hidden_layers": 2}, "gpt2": {"n_embd": 96, "n_layer": 2}}
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop")
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("llama", 2, {}),
    ("llama", 2, {"training.precision": "fp32"}),
    ("llama", 2, {"training.global_batch_size": 8}),
    ("llama", 1, {"training.global_batch_size": 16}),
    ("llama", 2, {"training.precision": "fp16", "training.loss_scale": 2.0**40}),
    ("llama", 2, {"parallelism.activation_checkpointing": "full"}),
    ("llama", 2, {"parallelism.activation_checkpointing": "selective"}),
    ("llama", 2, {"parallelism.sequence_parallel": True}),
    ("llama", 2, {"parallelism.compile": True}),
    ("llama", 2, {"data.pack": False}),
    ("llama-sdpa", 2, {}),
    ("bert", 2, {}),
    ("bert", 2, {"training.global_batch_size": 8}),
    ("bert", 1, {}),
    ("llama", 2, {"logging.split_every": 2, "profile.start": 5, "profile.steps": 2}),
    ("bert", 2, {"parallelism.activation_checkpointing": "full"}),
)
"""Model, tp, what is configured: the last one is to be refused."""


class EnoughError(Exception):
    """The steps that were to be run are done; nothing is to be saved."""


def main() -> None:
    """Run what is asked for on the ranks of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--toy", action="store_true", help="on a CPU, where nothing is recorded")
    parser.add_argument("--only", nargs="*", default=["bert-large", "gpt2"], help="models of --speed")
    parser.add_argument("--cases", nargs="*", type=int, default=range(len(CASES)), help="numbers of those of --prove")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", nargs="*", type=int, default=[8, 2], help="sequences of a micro-batch of --speed")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tp", nargs="*", type=int, default=[2, 1], help="of --speed; the rest of two ranks is dp")
    parser.add_argument("--compile", action="store_true", help="--speed with compiled layers")
    options = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    if not options.toy:
        torch.cuda.set_device(local)
    dist.init_process_group("gloo" if options.toy else "cpu:gloo,cuda:nccl", timeout=timedelta(minutes=5))
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    work = Path(shared[0])
    try:
        if options.prove:
            prove(work, options)
        if options.speed:
            speed(work, options)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(work, ignore_errors=True)
    os._exit(0)  # taking NCCL down takes seconds


def tell(text: str) -> None:
    """Print, on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def prove(work: Path, options: argparse.Namespace) -> None:
    """Each case plain and recorded."""
    base = {"training.steps": 8, "training.micro_batch_size": 4, "training.seq_len": 64, "training.lr": 1e-3}
    held = {"data.eval": {"fraction": 0.02, "every": 3, "batches": 2}}
    for number in options.cases:
        name, tp, settings = CASES[number]
        given, told = base | held | settings, " ".join(f"{k}={v}" for k, v in settings.items())
        try:
            folder = made(work, name, tp, options)
            plain = run(work, folder, name, tp, given, options)
            recorded = run(work, folder, name, tp, given | {"parallelism.cuda_graphs": not options.toy}, options)
        except Exception as error:
            tell(f"{number:2} {name} tp={tp} dp={2 // tp} {told}: {type(error).__name__}: {error}")
            continue
        if dist.get_rank() == 0:
            tell(f"{number:2} {name} tp={tp} dp={2 // tp} {told}: {apart(plain, recorded)}")


def apart(plain: list[dict[str, Any]], recorded: list[dict[str, Any]]) -> str:
    """Whether two runs have the same numbers."""
    keys = ("loss", "grad_norm", "eval_loss")
    pairs = [(a[k], b[k]) for a, b in zip(plain, recorded, strict=True) for k in keys if k in a]
    sent = [
        [a["communication_seconds"] / a["step_seconds"] for a in rows if "communication_seconds" in a]
        for rows in (plain, recorded)
    ]
    more = "".join(f", communication {way[-1]:.1%} of a step" for way in sent if way)
    if all(repr(a) == repr(b) for a, b in pairs):
        return f"same bits, {len(pairs)} numbers, last loss {[a['loss'] for a in plain if 'loss' in a][-1]:.6f}{more}"
    return f"worst relative difference {max(abs(a - b) / max(abs(a), 1e-30) for a, b in pairs):.2e}"


def speed(work: Path, options: argparse.Namespace) -> None:
    """Tokens/s of each model, plain and recorded, over tp and over dp."""
    device = "CPU" if options.toy else torch.cuda.get_device_name()
    tell(f"torch {torch.__version__}, transformers {hf.__version__}, {device}")
    for name, tp, batch in itertools.product(options.only, options.tp, options.batch):
        given = {
            "training.steps": options.steps + 1, "training.micro_batch_size": batch, "training.seq_len": options.length,
            "data.boundaries": "none", "parallelism.compile": options.compile,
        }  # fmt: skip
        folder, speeds = made(work, name, tp, options), []
        for way in (False, True):
            given["parallelism.cuda_graphs"] = way and not options.toy
            rows = run(work, folder, name, tp, given, options, most=options.steps)
            if rows:
                seconds = statistics.median(row["step_seconds"] for row in rows[10:] or rows)
                speeds.append(batch * options.length * (2 // tp) / seconds)
                tell(
                    f"{name} tp={tp} dp={2 // tp} {batch} x {options.length} {'recorded' if way else 'plain':8} "
                    f"{speeds[-1]:10,.0f} tokens/s {seconds * 1e3:7.2f} ms {rows[-1]['memory_gib']:6.2f} GiB  "
                    f"loss {rows[-1]['loss']:.5f}  x{speeds[-1] / speeds[0]:.2f}"
                )


def made(work: Path, name: str, tp: int, options: argparse.Namespace) -> Path:
    """The folder of a model, cut for ``tp``; made by rank 0."""
    folder = work / f"{name}-tp{tp}"
    if dist.get_rank() == 0 and not folder.exists():
        from tpconvert.checkpoint import shard
        from tpconvert.planning import make_plan
        from tpconvert.source import open_source

        kind, config, sizes, _ = MODELS[name]
        if name in ("bert-large", "gpt2"):
            sizes = sizes | dict.fromkeys(DROPOUTS, 0.1) | (TOY[name] if options.toy else {})
        source = work / name
        if not source.exists():
            torch.manual_seed(0)
            with torch.device("cpu" if options.toy else "cuda"):
                kind(config(**sizes)).save_pretrained(source)
        opened = open_source(str(source), task="masked-lm" if "bert" in name else "causal-lm")
        shard(opened.weights(), make_plan(opened.module, opened.inputs, tp=tp, source=opened.description), folder)
        text = "".join(f"{i} times {i % 97} is {i * (i % 97)}.\n" for i in range(60000))
        (work / "text.txt").write_text(text)
    dist.barrier()
    return folder


def run(
    work: Path,
    folder: Path,
    name: str,
    tp: int,
    given: dict[str, Any],
    options: argparse.Namespace,
    most: int | None = None,
) -> list[dict[str, Any]]:
    """The logged lines of a run, on rank 0."""
    from tpconvert.train.loop import train
    from tpconvert.train.settings.config import apply_overrides, make_config

    data = {"path": str(work / "text.txt"), "tokenizer": "bytes", "cache": str(work / "cache"), "documents": "line"}
    base = {
        "data": data | MODELS[name][3],
        "logging": {"every": 1, "tensorboard": False, "split_every": None},
        "training": {"schedule": "constant"},
    }
    config = make_config(apply_overrides(base, [f"{key}={json.dumps(value)}" for key, value in given.items()]))
    begun, shared = itertools.count(), [tempfile.mkdtemp(dir=work) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    out = Path(shared[0])

    def before_a_step() -> bool:
        if next(begun) == most:
            raise EnoughError
        return False

    mesh = mesh_of(tp, "cpu" if options.toy else f"cuda:{os.environ['LOCAL_RANK']}")
    log = (out / f"log-{dist.get_rank()}").open("w")
    with log, contextlib.redirect_stdout(log), contextlib.suppress(EnoughError):
        train(folder, config, mesh, output=out, stopped=before_a_step)
    if not options.toy:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    lines = (out / "metrics.jsonl").read_text().splitlines() if dist.get_rank() == 0 else []
    return [json.loads(line) for line in lines]


@functools.cache
def mesh_of(tp: int, device: str) -> Any:
    """The mesh, whose groups take NCCL a while to make."""
    from tpconvert.parallel import make_mesh

    return make_mesh(tp, device=device)


if __name__ == "__main__":
    main()
