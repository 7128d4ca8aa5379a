"""How fast, and in how much memory, is a checkpoint of any size sharded, merged, resharded and loaded?

    python benchmarks/checkpoint.py speed [--gb 2] [--tp 4] [--rounds 3] [--cached]
    python benchmarks/checkpoint.py load [--gb 2] [--device cuda]
    python benchmarks/checkpoint.py memory [--gb 2 8 16] [--dtype bfloat16 float32]
    python benchmarks/checkpoint.py plan
    python benchmarks/checkpoint.py hash

The checkpoint is synthetic: dense layers with fused experts (the largest tensor, three dims) in files of 500 MB.  Each
figure is of a process of its own, its start and imports left out, with the source in the page cache.

*speed* compares with ``cp`` of the same bytes in the same round, twice: as cp leaves them, in the page cache (our
forcing to the disk left out too), and forced to the disk, as ours always are.  Every row writes hashes or checks them:
``merge --check`` compares all it reads.  Medians count, of the ratios too: each is
to the ``cp`` of its own round.  *memory* writes from files with holes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch

from tpconvert.checkpoint import file_weights, load_rank, merge, reshard, shard
from tpconvert.checkpoint.files import tensorfile
from tpconvert.checkpoint.files.digest import BLAKE3, Digest, best_kind
from tpconvert.checkpoint.files.header import dtype_name, make_header
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.manifest import SHA256
from tpconvert.spec.plan import Plan, Verdict

HIDDEN, FFN, EXPERTS, EXPERT_FFN, VOCABULARY = 2048, 5632, 16, 1408, 32000
FILE = 500_000_000
MIB = 1 << 20
GOALS = {"shard": 1.25, "merge": 1.25, "merge --check": 1.25, "reshard": 1.35}

Sizes = dict[str, tuple[tuple[int, ...], Layout]]


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "load", "memory", "plan", "hash"])
    parser.add_argument("--gb", type=float, nargs="+")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--cached", action="store_true", help="leave out what is forced to the disk")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--where", type=Path, help="a folder on the disk to measure; the default is the current one")
    options = parser.parse_args()
    print(f"python {' '.join(sys.argv)}")
    print(f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores\n", flush=True)
    with tempfile.TemporaryDirectory(dir=options.where or ".", prefix="tpconvert-bench-") as folder:
        {"speed": speed, "load": load, "memory": memory, "plan": plan_memory, "hash": hashing}[options.what](
            Path(folder), options
        )


def speed(here: Path, options: argparse.Namespace) -> None:
    """The table of seconds beside ``cp``."""
    size = (options.gb or [2])[0]
    plan = make_source(here / "source", size, options.dtype[0], options.tp)
    runs: dict[tuple[str, bool], Callable[[], dict[str, float]]] = {}
    for forced in (False, True)[: 1 if options.cached else 2]:
        runs["cp", forced] = lambda forced=forced: copy_once(here / "source", here / "copy", forced)
        for command in GOALS:
            runs[command, forced] = lambda c=command, forced=forced: child(c, here, plan, options.tp, forced)
    child("shard", here, plan, options.tp, False, keep=True)
    seen: dict[tuple[str, bool], list[dict[str, float]]] = {key: [] for key in runs}
    os.sync()
    for _ in range(options.rounds):  # what a run left in the page cache is gone with its files, so nothing waits for it
        for key, run in runs.items():
            seen[key].append(run())
    print(
        f"{size:g} GB, {options.dtype[0]}, tp={options.tp}, hashes: {best_kind()}, medians of {options.rounds} rounds"
    )
    print("                      in the page cache           forced to the disk")
    print("              goal    seconds times cp  cpu s    seconds times cp  cpu s")
    for command in ("cp", *GOALS):
        row = ""
        for forced in sorted({forced for _, forced in runs}):
            found, beside = seen[command, forced], seen["cp", forced]
            times = median(ours["seconds"] / cp["seconds"] for ours, cp in zip(found, beside, strict=True))
            row += f"{median(s['seconds'] for s in found):11.2f} {times:8.2f} {median(s['cpu'] for s in found):6.2f}"
        print(f"{command:13}{GOALS.get(command, ''):>5}{row}")


def memory(here: Path, options: argparse.Namespace) -> None:
    """The table of peak memory over sizes."""
    print("                     largest            peak RSS, MiB")
    print("   GB  dtype     tensor, MiB     shard    merge  reshard     goal", flush=True)
    for dtype in options.dtype:
        for size in options.gb or [2, 8, 16]:
            plan = make_source(here / "source", size, dtype, options.tp, holes=True)
            largest = max(torch.Size(v.shape).numel() for v in plan.verdicts) * getattr(torch, dtype).itemsize / MIB
            peaks = [child("shard", here, plan, options.tp, False, keep=True)["peak"]]
            shutil.rmtree(here / "source")
            peaks += [child(command, here, plan, options.tp, False)["peak"] for command in ("merge", "reshard")]
            shutil.rmtree(here / "shards")
            row = "".join(f"{peak / MIB:9.0f}" for peak in peaks)
            print(f"{size:5g}  {dtype:9} {largest:10.0f} {row} {512 + 3 * largest:8.0f}", flush=True)


def load(here: Path, options: argparse.Namespace) -> None:
    """A rank beside ``safetensors.torch.load_file`` of its very file: seconds, and bytes read from the disk."""
    size = (options.gb or [2])[0]
    plan = make_source(here / "source", size, options.dtype[0], options.tp)
    child("shard", here, plan, options.tp, True, keep=True)
    file = here / "shards" / f"rank-00000-of-{options.tp:05d}" / "model.safetensors"
    print(f"rank 0 of {options.tp}, {file.stat().st_size / MIB:.0f} MiB, to {options.device}, every byte touched")
    print("                 warm cache, s     bytes read from a cold cache / bytes of the rank")
    run = partial(child, here=here, plan=plan, tp=options.tp, forced=False, device=options.device)
    rounds = [{what: run(what)["seconds"] for what in ("load_file", "load_rank")} for _ in range(5)]
    for what in ("load_file", "load_rank"):
        drop_cache(here / "shards")
        cold = run(what)["read"] / file.stat().st_size
        print(f"{what:14} {min(seen[what] for seen in rounds):14.3f} {cold:20.3f}", flush=True)


def hashing(here: Path, options: argparse.Namespace) -> None:
    """Processor time of each kind of hash, a MiB at a time as files are written."""
    data = memoryview(os.urandom(MIB))
    for kind in (SHA256, BLAKE3):
        digest, start = Digest(kind), time.process_time()
        for _ in range(1000):
            digest.update(data)
        print(f"{kind:8} {(time.process_time() - start) / (1000 * MIB) * 1e9:.3f} s for a GB")


def plan_memory(here: Path, options: argparse.Namespace) -> None:
    """Planning for Llama 405B from its config alone."""
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 126, **sizes}
    (here / "config.json").write_text(json.dumps(config | {"vocab_size": 128256, "dtype": "bfloat16"}))
    code = (
        "from tpconvert.planning import make_plan; from tpconvert.source import open_source\n"
        f"s = open_source({str(here)!r}); p = make_plan(s.module, s.inputs, tp=8)\n"
        "print(sum(v.layout.cut for v in p.verdicts), open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cut, peak = map(int, done.stdout.split())
    print(f"Llama 405B, tp=8: {cut} tensors cut, peak RSS {peak / 1024:.0f} MiB, {time.perf_counter() - start:.0f} s")


def parameters(layers: int) -> Sizes:
    """Name -> shape and layout."""
    rows, columns = (lambda n: Layout(0, (Block(n),))), (lambda n: Layout(1, (Block(n),)))
    experts = EXPERTS, 2 * EXPERT_FFN, HIDDEN
    out: Sizes = {"embed": ((VOCABULARY, HIDDEN), rows(VOCABULARY)), "norm": ((HIDDEN,), Layout())}
    for i in range(layers):
        layer: Sizes = {
            "q": ((HIDDEN, HIDDEN), rows(HIDDEN)),
            "k": ((512, HIDDEN), rows(512)),
            "v": ((512, HIDDEN), rows(512)),
            "o": ((HIDDEN, HIDDEN), columns(HIDDEN)),
            "up": ((2 * FFN, HIDDEN), Layout(0, (Block(FFN), Block(FFN)))),
            "down": ((HIDDEN, FFN), columns(FFN)),
            "norm": ((HIDDEN,), Layout()),
        }
        if i % 2:
            layer["experts.gate_up"] = experts, Layout(1, (Block(EXPERT_FFN), Block(EXPERT_FFN)))
            layer["experts.down"] = (EXPERTS, HIDDEN, EXPERT_FFN), Layout(2, (Block(EXPERT_FFN),))
        out |= {f"layers.{i}.{name}": held for name, held in layer.items()}
    return out


def make_source(folder: Path, gigabytes: float, dtype: str, tp: int, *, holes: bool = False) -> Plan:
    """Write a checkpoint of about that size, and say how it is cut; with ``holes`` its tensors need no disk."""
    kind, layers = getattr(torch, dtype), 2
    while (held := total(parameters(layers), kind)) < gigabytes * 1e9:
        layers += 2
    folder.mkdir()
    noise, files, size = os.urandom(16 * MIB), [{}], 0
    for name, (shape, _) in parameters(layers).items():
        more = torch.Size(shape).numel() * kind.itemsize
        if files[-1] and size + more > FILE:
            files, size = [*files, {}], 0
        files[-1][name], size = (shape, kind), size + more
    for i, tensors in enumerate(files, 1):
        header = make_header(tensors, {"format": "pt"})
        with (folder / f"model-{i:05d}-of-{len(files):05d}.safetensors").open("wb") as file:
            file.write(header.encoded)
            if holes:
                file.truncate(header.size)
                continue
            while (left := header.size - file.tell()) > 0:
                file.write(memoryview(noise)[: min(left, len(noise))])
    verdicts = (Verdict(n, s, dtype_name(kind), layout, "by hand") for n, (s, layout) in parameters(layers).items())
    print(f"{held / 1e9:.1f} GB in {len(files)} files", file=sys.stderr)
    return Plan(tp, tuple(verdicts))


def total(sizes: Sizes, dtype: torch.dtype) -> int:
    """Bytes of all tensors."""
    return sum(torch.Size(shape).numel() for shape, _ in sizes.values()) * dtype.itemsize


def copy_once(source: Path, out: Path, forced: bool) -> dict[str, float]:
    """The seconds of ``cp``; ``forced`` to the disk."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(["cp", "-r", source, out], check=True)
    if forced:
        subprocess.run(["sync", *out.iterdir()], check=True)
    taken, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(out)
    return {"seconds": taken, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def child(
    command: str, here: Path, plan: Plan, tp: int, forced: bool, *, keep: bool = False, device: str = "cpu"
) -> dict[str, float]:
    """Run one command in a process of its own: its seconds, its peak memory, the bytes that the disk read for it."""
    (here / "plan.json").write_text(plan.dumps())
    out = here / ("shards" if keep else "out")
    arguments = ["--one", command, here, out, str(tp), str(int(forced)), device]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    if not keep:
        shutil.rmtree(out, ignore_errors=True)
    return json.loads(done.stdout)


def one(command: str, here: Path, out: Path, tp: int, forced: bool, device: str) -> None:
    """What a child does."""
    file = here / "shards" / f"rank-00000-of-{tp:05d}" / "model.safetensors"
    if command.startswith("load"):
        from safetensors.torch import load_file

        if device != "cpu":
            torch.ones(1, device=device)
    if not forced:
        os.fsync = tensorfile.start_writing = lambda *_: None
    before, cpu, start = disk_bytes(), time.process_time(), time.perf_counter()
    if command == "shard":
        shard(file_weights(here / "source"), Plan.loads((here / "plan.json").read_text()), out)
    elif command == "reshard":
        reshard(here / "shards", out, tp=tp // 2 + 1)
    elif command.startswith("merge"):
        merge(here / "shards", out, check="--check" in command)
    else:
        loaded = load_rank(here / "shards", 0, device=device) if command == "load_rank" else load_file(file, device)
        for tensor in loaded.values():
            tensor.reshape(-1).view(torch.uint8)[:: 512 if device == "cpu" else 1 << 20].sum().item()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak, "read": disk_bytes() - before}))


def disk_bytes() -> int:
    """Bytes that the disk has read for this process."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])
    return 0


def drop_cache(folder: Path) -> None:
    """Have the page cache forget the files of a folder."""
    for path in files_in(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_in(folder: Path) -> Iterator[Path]:
    """Every file below a folder."""
    return (path for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        name, here, out, tp, forced, device = sys.argv[2:]
        one(name, Path(here), Path(out), int(tp), forced == "1", device)
    else:
        main()
