"""Starts the ranks of a verification on this machine, and tells what became of those that failed.

Ranks are fresh interpreters wherever there are GPUs: a forked process can use neither CUDA, which any import may have
begun, nor autograd, which has threads for every GPU after the first backward pass.  Elsewhere they are forked: that
is quick, and takes functions which cannot be pickled.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from tpconvert.errors import NotRunError, TPConvertError, VerifyError
from tpconvert.parallel import make_mesh
from tpconvert.source.blame import blaming
from tpconvert.spec.plan import Plan
from tpconvert.verify.compare.checks import compare_on_rank
from tpconvert.verify.measure.dtypes import PRECISIONS
from tpconvert.verify.result import Result

LIMIT = timedelta(minutes=30)
"""How long a rank waits for the others."""
GRACE = 2.0
"""Seconds in which a rank may end by itself when another has failed: it may know more of it."""
_RANK = "import sys; from tpconvert.verify.ranks import fresh_rank; fresh_rank(*sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class How:
    """How ranks compare."""

    sliced: bool
    device: str
    dtype: str
    collectives: str = "auto"

    @property
    def backend(self) -> str:
        """NCCL for what is on GPUs; small things travel as CPU tensors."""
        return "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"

    def compare(self, source: Callable[[], nn.Module], inputs: Any, plan: Plan, place: int) -> Result | None:
        """On the rank that is the ``place``-th of this machine."""
        with blaming("The model fails where it is run"):
            mesh = make_mesh(plan.tp, device=_device(self.device, place), collectives=self.collectives)
            return compare_on_rank(
                source(), inputs, plan, mesh, sequence_parallel=self.sliced, tolerances=PRECISIONS[self.dtype]
            )


@dataclass(frozen=True, slots=True)
class Work:
    """What every rank is given."""

    build: Callable[[], nn.Module]
    inputs: Any
    plan: str
    degree: int
    how: How


def start_ranks(work: Work) -> Result:
    """What the ranks find, each a process of its own."""
    with tempfile.TemporaryDirectory(prefix="tpconvert-verify-") as scratch:
        forked = _not_fresh(work)
        if forked is None:
            _fresh(work, Path(scratch))
        else:
            _forked(work, Path(scratch), forked)
        found: Result = torch.load(Path(scratch) / "result.pt", weights_only=False)  # written by our own rank just now
    return found


def _not_fresh(work: Work) -> str | None:
    """Why ranks are to be forked, empty where it does no harm; None where they are to be fresh."""
    if not hasattr(os, "fork"):
        return None
    if work.how.device == "cpu" and not torch.cuda.device_count():
        return ""
    try:
        pickled = pickle.dumps(work)
    except Exception as error:
        why = str(error)
    else:
        if b"__main__" not in pickled:
            return None
        why = "it is defined in the script that runs"  # which a fresh interpreter would have to run again
    if torch.cuda.is_initialized():
        raise NotRunError(f"No rank can be started for this model: CUDA is in use, and {why}.", hint=_WAY_OUT)
    return why


_WAY_OUT = 'Open the model with tpconvert.open_source("FILE.py:FUNCTION"), or start the script with torchrun.'


# -- in a rank ----------------------------------------------------------------------------------------------------


def fresh_rank(scratch: str, rank: str) -> None:
    """What a fresh interpreter runs: the rank of that number, with the work that lies in ``scratch``."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with _telling(Path(scratch), int(rank)):
        with blaming("A rank cannot load the model"):
            work = pickle.loads((Path(scratch) / "work").read_bytes())
        _rank(int(rank), scratch, work)


def _end_with_parent() -> None:
    """Nothing is ever written to our input, which ends when the parent does."""
    os.read(0, 1)  # not through sys.stdin, whose lock Python takes when it ends
    os._exit(1)


def _forked_rank(rank: int, scratch: str, work: Work) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which comes too when the parent dies: end even while waiting
    with _telling(Path(scratch), rank):
        _rank(rank, scratch, work)


def _rank(rank: int, scratch: str, work: Work) -> None:
    torch.set_num_threads(1)  # a forked process has lost the threads of OpenMP, and would wait for them for ever
    dist.init_process_group(
        work.how.backend, init_method=f"file://{scratch}/store", rank=rank, world_size=work.degree, timeout=LIMIT
    )
    result = work.how.compare(work.build, work.inputs, Plan.loads(work.plan), rank)
    if result is not None:
        torch.save(result, Path(scratch) / "result.pt")
    dist.all_reduce(torch.zeros(1))  # on CPUs: a rank is done when all are
    if work.how.device == "cuda":
        os._exit(0)  # taking NCCL down takes seconds, in which nothing is left to do
    dist.destroy_process_group()


class _telling:
    """Within it, what is raised is written down for the parent."""

    def __init__(self, scratch: Path, rank: int) -> None:
        self.path = scratch / f"error-{rank}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception):
            return
        said = error if isinstance(error, TPConvertError) else _failed(traceback.format_exc())
        writing = self.path.with_name(f"writing-{self.path.name}")
        writing.write_text(json.dumps([said.message, said.hint, said.exit_code]))
        writing.rename(self.path)
        os._exit(1)  # at once: gloo and NCCL would wait for the others, and they wait for this one


def _device(name: str, place: int) -> torch.device:
    """The device of the ``place``-th rank of this machine; on a GPU float32 is made to be float32."""
    if name == "cpu":
        return torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = False  # which convolutions would use
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


# -- in the process that starts them --------------------------------------------------------------------------------


def _forked(work: Work, scratch: Path, why: str) -> None:
    context: Any = mp.start_processes(_forked_rank, (str(scratch), work), work.degree, join=False, start_method="fork")
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it warns of each rank it ends
    try:
        while not context.join():
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException):
        raise _why([process.exitcode or 0 for process in context.processes], scratch, why) from None
    finally:
        for process in context.processes:
            process.kill()


def _fresh(work: Work, scratch: Path) -> None:
    (scratch / "work").write_bytes(pickle.dumps(work))
    paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
    ranks = []
    try:
        for rank in range(work.degree):
            with (scratch / f"said-{rank}").open("wb") as said:
                command = [sys.executable, "-c", _RANK, str(scratch), str(rank)]
                environment = os.environ | {"PYTHONPATH": paths}
                ranks.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said, env=environment)
                )
        _wait(ranks)
        if any(rank.returncode for rank in ranks):
            raise _why([rank.returncode or 0 for rank in ranks], scratch, "")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or one has failed and the others were given time to say why."""
    until = float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        if until == float("inf") and any(rank.returncode for rank in ranks):
            until = time.monotonic() + GRACE
        time.sleep(0.02)


def _why(codes: Sequence[int], scratch: Path, forked: str) -> TPConvertError:
    """What to say of a run whose ranks failed: a rank that was killed, else the first that could say something."""
    for rank, code in enumerate(codes):
        if code < 0 and -code != signal.SIGTERM:  # which the others get; what they say came of that
            said = f"process {rank} terminated with signal {signal.Signals(-code).name}"
            return NotRunError(f"A rank died ({said}).", hint="Is there enough memory? Try --twin.")
    return _told(scratch, forked) or _failed("\n".join(p.read_text("utf-8", "replace") for p in scratch.glob("said-*")))


def _told(scratch: Path, forked: str) -> TPConvertError | None:
    """The first error of a rank; later ones tell only that touch with it was lost."""
    for path in sorted(scratch.glob("error-*"), key=lambda path: path.stat().st_mtime_ns):
        message, hint, code = json.loads(path.read_text())
        if forked and re.search("fork|initialization error", message):
            return NotRunError(f"{message} The rank was forked, because {forked}.", hint=_WAY_OUT)
        return VerifyError(message, hint=hint) if code == VerifyError.exit_code else NotRunError(message, hint=hint)
    return None


def _failed(trace: str) -> NotRunError:
    """A rank's error, of which nobody thought."""
    lines = [line for line in trace.splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"\S*(Error|Exception)\b", line)]
    return NotRunError(f"A rank failed: {[*(lines or ['it said nothing']), *said][-1]}")
