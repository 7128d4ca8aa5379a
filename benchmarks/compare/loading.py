"""A sharded model from the disk to the GPUs, against ``from_pretrained`` and ``load_file``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.compare.case import Case
from benchmarks.compare.processes import Turn
from benchmarks.compare.step import group, meet, place
from tpconvert import load, make_mesh
from tpconvert.checkpoint import load_rank

ROOT = Path(__file__).parents[2]


def config_for(gb: float, toy: bool) -> Any:
    """A Llama 3 8B, with as many layers as make about ``gb`` of bfloat16."""
    from transformers import LlamaConfig

    if toy:
        return LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=128,
            num_hidden_layers=2,
            dtype="bfloat16",
        )
    layers = max(round((gb - 2.1) / 0.4363), 1)
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        num_hidden_layers=layers,
        dtype="bfloat16",
    )


def written(rank: int, turn: Turn, work: Path, gb: float, toy: bool) -> dict[str, Any]:
    """The checkpoint, of random weights, and the folder of its ranks."""
    with turn.preparing():
        return _written(work, gb, toy)


def _written(work: Path, gb: float, toy: bool) -> dict[str, Any]:
    from safetensors.torch import save_file

    from benchmarks.compare.models import skeleton_of

    device = place(0, toy)
    config = config_for(gb, toy)
    source = work / "source"
    source.mkdir(parents=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(source)
    began, files, held = time.monotonic(), [{}], 0
    for name, p in skeleton_of("llama", config).named_parameters():
        if held > 4e9:
            files, held = [*files, {}], 0
        files[-1][name], held = p.shape, held + p.numel() * 2
    index: dict[str, str] = {}
    total = 0
    for i, shapes in enumerate(files, 1):
        file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        tensors = {n: torch.randn(s, device=device, dtype=torch.bfloat16).mul_(0.02).cpu() for n, s in shapes.items()}
        save_file(tensors, source / file, {"format": "pt"})
        index |= dict.fromkeys(shapes, file)
        total += sum(t.nbytes for t in tensors.values())
    import json

    (source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    wrote, began = time.monotonic() - began, time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tpconvert", "shard", str(source), "--tp", "2", "-o", str(work / "tp2")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return {"gb": total / 1e9, "write_s": wrote, "shard_s": time.monotonic() - began}


def loaded(
    rank: int, turn: Turn, way: str, work: Path, gpus: tuple[int, ...], store: Path, cold: bool, toy: bool
) -> dict[str, Any]:
    """Seconds from the call to all weights on the GPU; each of its processes has its GPU ready before."""
    device = place(gpus[rank], toy)
    case = Case("load" if len(gpus) > 1 else "whole", tp=len(gpus), network=len(gpus) > 1)
    with group(case, rank, device, store), turn.measuring(lambda: meet(case)):
        torch.ones(1, device=device)
        if case.network and not toy:
            dist.all_reduce(torch.ones(1, device=device))
        if cold and rank == 0:
            forget(work)
        meet(case)
        before, began = disk_bytes(), time.monotonic()
        tensors = WAYS[way](work, rank, device, len(gpus))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        meet(case)
        seconds = time.monotonic() - began
        own = sum(t.nbytes for t in {t.data_ptr(): t for t in tensors}.values())
        return {
            "way": way,
            "ranks": len(gpus),
            "cold": cold,
            "seconds": seconds,
            "gb_a_rank": own / 1e9,
            "gb_per_s_a_rank": own / seconds / 1e9,
            "disk_read_over_own": (disk_bytes() - before) / own,
        }


def _ours(work: Path, rank: int, device: torch.device, ranks: int) -> list[torch.Tensor]:
    return list(load(work / "tp2", make_mesh(ranks, device=device)).parameters())


def _from_pretrained(work: Path, rank: int, device: torch.device, ranks: int) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    if ranks == 1:
        return list(
            AutoModelForCausalLM.from_pretrained(
                work / "source", dtype=torch.bfloat16, device_map=str(device)
            ).parameters()
        )
    from transformers.distributed import DistributedConfig

    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks))
    model = AutoModelForCausalLM.from_pretrained(
        work / "source", dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_size=ranks)
    )
    return [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]


def _load_rank(work: Path, rank: int, device: torch.device, ranks: int) -> list[torch.Tensor]:
    return list(load_rank(work / "tp2", 0, device=device).values())


def _load_file(work: Path, rank: int, device: torch.device, ranks: int) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    found: list[torch.Tensor] = []
    for file in sorted((work / "tp2" / "rank-00000-of-00002").glob("*.safetensors")):
        found += load_file(file, device=str(device)).values()
    return found


WAYS = {"load": _ours, "from_pretrained": _from_pretrained, "load_rank": _load_rank, "load_file": _load_file}


def disk_bytes() -> int:
    """Bytes that the disk has read for this process."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])
    return 0


def forget(folder: Path) -> None:
    """Have the page cache forget the files of a folder."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
