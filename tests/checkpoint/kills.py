"""``python -m tests.checkpoint.kills KIND FOLDER TIMES``: kill runs at random moments, and look at what they leave.

After each kill the output is the previous folder or the new one, byte for byte, and what is half-written is known as
such; at the end a run succeeds and nothing else is left.  Prints how many runs were killed and how many had finished.
Runs are forked, so that each costs milliseconds.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tests.checkpoint.frame import cut_all, hashes, plan_of
from tpconvert.checkpoint import (
    NewFolder,
    carry,
    finish,
    load_rank,
    merge,
    partial_path,
    read_manifest,
    read_plan,
    reshard,
    shard,
    tensor_weights,
    write_rank,
)
from tpconvert.errors import CheckpointError

WEIGHTS = tensor_weights({f"w{i}": torch.full((8, 8), float(i)) for i in range(24)})
OLD = tensor_weights({"a": torch.arange(12.0)})


def run(kind: str, here: Path, out: Path, pause: float) -> None:
    """One run that writes ``out``, with a pause between its steps."""

    def slowly(done: int, total: int) -> None:
        time.sleep(pause)

    if kind == "shard":
        shard(WEIGHTS, plan_of(WEIGHTS, 2, cut_all(WEIGHTS)), out, force=True, progress=slowly)
    elif kind == "merge":
        merge(here / "in", out, force=True, progress=slowly)
    elif kind == "reshard":
        reshard(here / "in", out, tp=4, force=True, progress=slowly)
    else:
        save(here / "in", out, pause)


def save(base: Path, out: Path, pause: float) -> None:
    """What the ranks of a training run do."""
    held = read_manifest(base)
    with NewFolder(out, force=True) as new:
        carry(base, held, new.path)
        for rank in range(held.tp):
            time.sleep(10 * pause)
            write_rank(new.path, rank, held.tp, load_rank(base, rank))
        time.sleep(10 * pause)
        finish(new, held, read_plan(base))


def previous(out: Path) -> None:
    """Put the old folder in place."""
    shard(OLD, plan_of(OLD, 1), out, force=True)


def main(kind: str, here: Path, times: int) -> None:
    """Kill ``times`` runs of one kind."""
    out, dice, killed, finished = here / "out", random.Random(kind), 0, 0
    shard(WEIGHTS, plan_of(WEIGHTS, 3, cut_all(WEIGHTS)), here / "in")
    run(kind, here, here / "new", 0)  # the first one pays for what is loaded late
    start = time.monotonic()
    run(kind, here, here / "new", 0.0005)
    length = time.monotonic() - start
    previous(out)
    old, new = hashes(out), hashes(here / "new")
    for _ in range(times):
        child = os.fork()
        if not child:
            run(kind, here, out, 0.0005)
            os._exit(0)
        time.sleep(dice.uniform(0.0, length))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        state = hashes(out)
        assert state in ((new,) if status == 0 else (old, new)), f"neither old nor new: {sorted(state)}"
        killed, finished = killed + (status != 0), finished + (status == 0)
        look_at_half(partial_path(out), state == new)
        if state == new:
            previous(out)
    previous(out)
    assert sorted(path.name for path in here.iterdir()) == ["in", "new", "out"], "something was left behind"
    print(killed, finished)


def look_at_half(half: Path, swapped: bool) -> None:
    """What a killed run left is not taken for a folder, unless it was killed between its manifest and its rename."""
    if swapped or not half.exists():
        return
    try:
        read_manifest(half)
    except CheckpointError as error:
        assert "half-written" in str(error) or "not a sharded folder" in str(error), error


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
