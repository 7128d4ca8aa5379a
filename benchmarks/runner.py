"""How fast is the training runner on one GPU, beside the HF Trainer on the same model and data?

    python benchmarks/runner.py                         # a 1.1B Llama from scratch, bf16, compiled, 100 steps of each
    python benchmarks/runner.py --toy --steps 3         # the same on a CPU, to see that it runs

Both train every weight of the same checkpoint (AdamW, bf16 autocast over fp32 weights, no checkpointing) on the same
sequences in the same order; each in a process of its own.  Tokens/s are by the median of the last four fifths of the
steps, nothing is saved; MFU counts 6 x parameters (the embedding's left out) + 6 x layers x width x length FLOPs a
token, over 989 TFLOP/s.  ``--profile`` adds a table of the kernels of three steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

PEAK = 989e12
"""Dense bf16 of an H200, by its datasheet."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a model for a CPU")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument(
        "--only", nargs="*", metavar="NAME", default=["ours", "trainer"], help="of ours, trainer, fp8, eager"
    )
    parser.add_argument("--profile", action="store_true", help="a table of kernels, in OUT/profile-NAME.txt")
    parser.add_argument("--work", type=Path, help="where the model is made, once; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="where the logs and the profile go")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process that runs one of them
    options = parser.parse_args()
    if options.toy:
        options.length = min(options.length, 64)
    if options.folder is not None:
        train = train_by_transformers if options.only == ["trainer"] else train_by_us
        return train(options.folder, options)
    with tempfile.TemporaryDirectory() as folder:
        report(options, options.work or Path(folder), options.out or Path(folder))


def report(options: argparse.Namespace, folder: Path, out: Path) -> None:
    """Run each in a process of its own, one after the other."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if not (folder / "flops.txt").exists():
        (folder / "flops.txt").write_text(str(prepare(folder, options)))
    flops = float((folder / "flops.txt").read_text())
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device}", flush=True)
    print(f"{'':26}{'tokens/s':>10}{'ms/step':>9}{'MFU':>7}{'GiB':>7}{'first loss':>12}{'last loss':>11}", flush=True)
    for name in options.only:
        began = time.perf_counter()
        rows = rows_of(name, folder, options, out)
        steady = rows[len(rows) // 5 :] or rows
        seconds = statistics.median(row["seconds"] for row in steady)
        speed = options.batch * options.length / seconds
        first, last = rows[0]["loss"], rows[-1]["loss"]
        label = {"ours": "tpconvert", "fp8": "tpconvert, fp8", "eager": "tpconvert, eager"}.get(name, "HF Trainer")
        print(
            f"{label:26}{speed:>10,.0f}{seconds * 1e3:>9.1f}{speed * flops / PEAK:>7.3f}{rows[-1]['gib']:>7.1f}"
            f"{first:>12.4f}{last:>11.4f}   ({time.perf_counter() - began:.0f} s in all)",
            flush=True,
        )


def prepare(folder: Path, options: argparse.Namespace) -> float:
    """Write the model, cut for one rank, and the configuration; the FLOPs of a token."""
    from tpconvert.checkpoint import shard
    from tpconvert.planning import make_plan
    from tpconvert.source import open_source

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4}
    if options.toy:
        sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, num_attention_heads=32, vocab_size=32000, use_cache=False, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "source")
    counted = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    del model
    source = open_source(str(folder / "source"))
    shard(source.weights(), make_plan(source.module, source.inputs, tp=1, source=source.description), folder / "model")
    characters = options.batch * options.length * (options.steps + 2)
    lines = (f"{i} times {i % 97} is {i * (i % 97)}.\n" for i in range(characters // 12))
    (folder / "text.txt").write_text("".join(lines)[:characters])
    (folder / "c.yaml").write_text(yaml.safe_dump(configuration(folder, options)))
    return 6.0 * counted + 6.0 * config.num_hidden_layers * config.hidden_size * options.length


def configuration(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the runner is told."""
    return {
        "parallelism": {"compile": not options.toy},
        "training": {
            "steps": options.steps + 1, "micro_batch_size": options.batch, "seq_len": options.length, "lr": 3e-4,
            "schedule": "constant", "precision": "bf16",
        },
        "data": {
            "path": str(folder / "text.txt"), "tokenizer": "bytes", "cache": str(folder / "cache"),
            "boundaries": "labels",
        },
        "logging": {"every": 1, "tensorboard": False},
    }  # fmt: skip


def rows_of(name: str, folder: Path, options: argparse.Namespace, out: Path) -> list[dict[str, float]]:
    """Each step of one of them, in a process of its own."""
    command = [sys.executable, __file__, "--folder", str(folder), "--steps", str(options.steps), "--out", str(out)]
    command += ["--batch", str(options.batch), "--length", str(options.length), *(["--toy"] if options.toy else [])]
    command += ["--only", name, *(["--profile"] if options.profile and name != "trainer" else [])]
    with (out / f"{name}.log").open("w+") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        log.seek(0)
        lines = log.read().splitlines()
    if code:
        print("\n".join(lines[-15:]))
    if (path := folder / name / "metrics.jsonl").exists():
        every = [json.loads(line) for line in path.read_text().splitlines()]
        return [{"seconds": r["step_seconds"], "loss": r["loss"], "gib": r["memory_gib"]} for r in every if "loss" in r]
    return [json.loads(line) for line in lines if line.startswith('{"seconds"')]


class EnoughError(Exception):
    """The steps that were to be measured are done; nothing is to be saved."""


def train_by_us(folder: Path, options: argparse.Namespace) -> None:
    """Train by our runner."""
    from torch.profiler import ProfilerActivity, schedule

    from tpconvert.parallel import make_mesh
    from tpconvert.train.loop import train
    from tpconvert.train.settings.config import load_config

    (name,) = options.only
    more = {"fp8": ["training.precision=fp8"], "eager": ["parallelism.compile=false"]}.get(name, [])
    config, cuda = load_config(folder / "c.yaml", more), torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    plan = schedule(skip_first=max(options.steps - 5, 0), wait=0, warmup=1, active=3, repeat=1)
    found = torch.profiler.profile(activities=kinds, schedule=plan) if options.profile else None
    begun = iter(range(options.steps))

    def before_a_step() -> bool:
        if next(begun, None) is None:
            raise EnoughError
        if found is not None:
            found.step()
        return False

    mesh = make_mesh(1, device="cuda:0" if cuda else "cpu")
    with contextlib.suppress(EnoughError), found or contextlib.nullcontext():
        train(folder / "model", config, mesh, output=folder / name, stopped=before_a_step)
    if found is not None:
        (options.out / f"profile-{name}.txt").write_text(
            kernels(found, "self_device_time_total" if cuda else "self_cpu_time_total")
        )


def kernels(found: torch.profiler.profile, key: str) -> str:
    """Where the time of a step goes."""
    averages = [e for e in found.key_averages() if key.startswith("self_cpu") or e.device_type.name == "CUDA"]
    times = {e.key: getattr(e, key) / 3e3 for e in averages if "#" not in e.key and "ProfilerStep" not in e.key}
    total = sum(times.values())
    rows = [f"{each:9.2f} ms {each / total:6.1%}  {name[:110]}" for name, each in times.items()]
    return "\n".join([f"{total:9.2f} ms of kernels a step", *sorted(rows, reverse=True)[:25]]) + "\n"


def train_by_transformers(folder: Path, options: argparse.Namespace) -> None:
    """Train by the HF Trainer on what our runner's batches hold; a line of JSON a step."""
    from torch.utils.data import Dataset, SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rows(Dataset[dict[str, torch.Tensor]]):
        def __init__(self, ids: torch.Tensor) -> None:
            self.ids = ids

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": self.ids[index], "labels": self.ids[index]}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            self.began = time.perf_counter()

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **__: Any) -> None:
            if "loss" in (logs or {}):
                gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
                seconds = time.perf_counter() - self.began
                print(json.dumps({"seconds": seconds, "loss": logs["loss"], "gib": gib}), flush=True)

    model = LlamaForCausalLM.from_pretrained(folder / "source", dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(folder / "hf"), max_steps=options.steps, per_device_train_batch_size=options.batch,
        learning_rate=3e-4, lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.1, max_grad_norm=1.0,
        bf16=True, torch_compile=not options.toy, optim="adamw_torch_fused", logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, dataloader_num_workers=0, use_cpu=options.toy,
    )  # fmt: skip
    InOrder(model=model, args=arguments, train_dataset=Rows(same_sequences(folder)), callbacks=[Clock()]).train()


def same_sequences(folder: Path) -> torch.Tensor:
    """The sequences that our runner trains on, in its order."""
    from tpconvert.checkpoint import read_plan
    from tpconvert.parallel import make_mesh
    from tpconvert.train.data.order import Position
    from tpconvert.train.data.run import open_data
    from tpconvert.train.settings.config import load_config

    config, model = load_config(folder / "c.yaml"), folder / "model"
    steps = open_data(model, folder, read_plan(model), config, make_mesh(1), True).train.steps(Position())
    return torch.cat([micro.ids for _ in range(config.training.steps) for micro in next(steps)[0]])


if __name__ == "__main__":
    main()
