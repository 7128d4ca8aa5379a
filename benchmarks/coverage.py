"""Which model types of transformers are cut, and equal?  Each in its own process, the results in a file that grows.

python benchmarks/coverage.py run [--out FILE] [--ranks] [--tp N ...] [--jobs N] [-- TYPE ...]
    measures what FILE does not hold yet; stop it and start it again as you like
python benchmarks/coverage.py render [--out FILE] [--onto]
    writes docs/coverage.md and docs/coverage.jsonl; with --onto the lines there of other types than FILE's stay
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SECONDS, MEMORY = 90, 8 << 30
PATIENCE = 60
"""How many times longer than it computes a process may take, where others compute beside it."""
RANKS_LIMIT = 60.0
"""Seconds that real ranks have for one model, on a machine that does nothing else."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["run", "render"])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "coverage.jsonl")
    parser.add_argument("--ranks", action="store_true", help="also compare on real gloo ranks")
    parser.add_argument("--tp", type=int, nargs="*", default=[], help="degrees beside 2 that are emulated")
    parser.add_argument("--jobs", type=int, default=1, help="types that are measured at a time")
    parser.add_argument("--again", action="store_true", help="measure the named types even if FILE holds them")
    parser.add_argument("--onto", action="store_true", help="render: keep the lines of types that FILE does not hold")
    given = parser.parse_intermixed_args()
    if given.do == "render":
        from benchmarks.zoo.render import render
        from benchmarks.zoo.types import model_types

        limits = f"{MEMORY >> 30} GB and {SECONDS} s of computing"
        render(given.out, ROOT / "docs", model_types(), limits, onto=given.onto)
    elif given.jobs > 1:
        deal(given.jobs, given)
    else:
        run(given.types, given.out, ranks=given.ranks, again=given.again, degrees=tuple(given.tp))


def deal(jobs: int, given: argparse.Namespace) -> None:
    """Run as many of this program, each with its part of the types; they append to one file."""
    from benchmarks.zoo.types import model_types

    held = set() if given.again else {line["type"] for line in lines(given.out)}
    todo = [t for t in given.types or model_types() if t not in held]
    options = ["--out", str(given.out), *["--ranks"] * given.ranks, *["--again"] * given.again]
    options += ["--tp", *map(str, given.tp)] if given.tp else []
    mine = [sys.executable, __file__, "run", *options, "--"]
    parts = [part for i in range(jobs) if (part := todo[i::jobs])]
    started = [subprocess.Popen([*mine, *part]) for part in parts]
    try:
        sys.exit(max((process.wait() for process in started), default=0))
    except KeyboardInterrupt:
        sys.exit(130)  # which they have got too


def run(types: list[str], out: Path, *, ranks: bool, again: bool, degrees: tuple[int, ...] = ()) -> None:
    """Append a line to ``out`` for every type that it does not hold."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.filterwarnings("ignore")
    import torch
    import transformers
    import transformers.modeling_utils
    import transformers.models.auto.feature_extraction_auto
    import transformers.models.auto.image_processing_auto

    from benchmarks.zoo.types import model_types

    torch.set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    held = set() if again else {line["type"] for line in lines(out)}
    todo = [t for t in types or model_types() if t not in held]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "commit": commit()}
    pool = None
    if ranks:
        from tests.ranks import Pool

        pool = Pool(2)
    with tempfile.TemporaryDirectory(prefix="coverage-") as scratch:
        keep = Path(scratch) / "model.pt" if pool else None
        for i, name in enumerate(todo):
            found = apart(name, keep, degrees)
            if pool and keep and found.get("outcome") in ("equal", "undecided", "not equal") and keep.exists():
                found["ranks"] = on_ranks(pool, keep)
            found |= versions | {"date": time.strftime("%Y-%m-%d")}
            with out.open("ab", buffering=0) as file:  # one write, since others may append too
                file.write(json.dumps(found).encode() + b"\n")
            print(f"{i + 1}/{len(todo)} {name}: {found['outcome']} {found.get('why', '')[:160]}", flush=True)
    if pool:
        pool.close()


def commit() -> str:
    """The commit that is measured, with a ``+`` where files differ from it; empty outside of a clone."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; the last of a type counts."""
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return list({line["type"]: line for line in found}.values())


def apart(name: str, keep: Path | None, degrees: tuple[int, ...] = ()) -> dict[str, Any]:
    """What a process of its own finds of a type, in bounded time and memory."""
    if keep:
        keep.unlink(missing_ok=True)
    reading, writing = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(name, writing, keep, degrees)
    os.close(writing)
    text, late = _read(reading, start + PATIENCE * SECONDS)
    os.close(reading)
    if late:
        os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    late = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL))
    found: dict[str, Any] = {"type": name}
    for line in text.splitlines():
        found |= json.loads(line)
    found["seconds"] = round(time.monotonic() - start, 1)
    found["cpu_s"] = round(used.ru_utime + used.ru_stime, 1)
    if "outcome" not in found:
        stage = found.get("stage", "start")
        why = f"longer than {SECONDS} s" if late else f"the process died with status {status}"
        found |= {"outcome": "not built" if stage in ("start", "build") else "crashed", "why": f"{why}, in {stage}"}
    return found


def _read(pipe: int, deadline: float) -> tuple[str, bool]:
    parts = []
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return _whole_lines(parts), True
        part = os.read(pipe, 1 << 16)
        if not part:
            return _whole_lines(parts), False
        parts.append(part)


def _whole_lines(parts: list[bytes]) -> str:
    return b"".join(parts).decode().rpartition("\n")[0]


def _child(name: str, writing: int, keep: Path | None, degrees: tuple[int, ...]) -> None:
    """Measure, and leave without the parent's clean-up."""
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, used + SECONDS + 5))
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive the parent and its limits
        os.closerange(3, writing)  # the pool's pipes: its ranks end when the parent does
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        from benchmarks.zoo.measure import crashed, measure

        def tell(found: dict[str, Any]) -> None:
            os.write(writing, (json.dumps(found) + "\n").encode())

        try:
            measure(name, tell, keep, degrees)
        except BaseException as error:
            tell(crashed(error, "measure"))
    finally:
        os._exit(0)


def patience() -> float:
    """How many times longer than alone a process takes now, as far as the machine's load tells."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), PATIENCE)


def on_ranks(pool: Any, keep: Path) -> dict[str, Any]:
    """What real ranks find: outputs, losses, gradients, steps, in eval and train mode."""
    from benchmarks.zoo.ranks import compare
    from tests.ranks import RankFailedError

    start = time.monotonic()
    try:
        found = pool.run(compare, 2, str(keep), timeout=RANKS_LIMIT * patience())[0]
    except RankFailedError as error:
        found = {"outcome": "crashed", "why": str(error).strip().splitlines()[-1][:300]}
    return found | {"seconds": round(time.monotonic() - start, 1)}


if __name__ == "__main__":
    main()
