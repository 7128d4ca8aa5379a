"""Starts the ranks of a verification, or uses those of torchrun, and adds the comparison of stored bytes."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from tpconvert.analyze.capture import capture
from tpconvert.analyze.rules import load_rules
from tpconvert.checkpoint import load_rank, read_manifest
from tpconvert.checkpoint.pieces import same_bytes, take_pieces
from tpconvert.errors import NotRunError, TPConvertError, VerifyError
from tpconvert.parallel import make_mesh
from tpconvert.planning.make import eval_mode
from tpconvert.planning.reproduce import reproduce
from tpconvert.source import Source
from tpconvert.source.blame import blaming
from tpconvert.spec.plan import Plan
from tpconvert.spec.sliced import sliced_form
from tpconvert.verify.asked import compare_asked, sliced_flow
from tpconvert.verify.checks import compare_on_rank
from tpconvert.verify.dtypes import PRECISIONS, dtype_of, precision
from tpconvert.verify.modes import Exact, perturb
from tpconvert.verify.result import BYTES, Check, Result

LIMIT = timedelta(minutes=30)
"""How long a rank waits for the others."""


@torch.inference_mode(False)
@torch.enable_grad()
def verify(
    source: Source,
    plan: Plan,
    *,
    folder: Path | None = None,
    emulate: bool = False,
    rules: Sequence[Path | str] = (),
    sequence_parallel: bool = False,
    device: str = "cpu",
    dtype: str = "float64",
) -> Result:
    """The whole model and the one ``plan`` makes of it, compared; with ``folder``, also every stored byte.

    Ranks are processes on this machine, or those of torchrun where this runs under it: on CPUs with gloo, or with
    ``device="cuda"`` each on a GPU of its own with NCCL.  They compare in ``dtype``: float64 (float32 where no
    kernel has it), float32, or bfloat16.  ``emulate`` runs all ranks in lockstep in this process instead, on the
    recorded graph, in float64 on the CPU; it needs the ``rules`` the plan was made with.  ``sequence_parallel`` is
    that of :func:`tpconvert.parallelize`.
    """
    if sequence_parallel:
        sliced_form(plan)  # which there must be
    if emulate:
        result = verify_emulated(source, plan, rules, sequence_parallel=sequence_parallel)
    else:
        result = _on_ranks(source, plan, _How(sequence_parallel, device, dtype))
    result = replace(result, notes=(*result.notes, *plan.notes))
    if folder is not None:
        stored = compare_bytes(source, folder)
        result = replace(result, checks=(*result.checks, *stored))
    return result


@dataclass(frozen=True, slots=True)
class _How:
    """How ranks compare."""

    sliced: bool
    device: str
    dtype: str

    @property
    def backend(self) -> str:
        """NCCL for what is on GPUs; small things travel as CPU tensors."""
        return "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"

    def compare(self, source: Callable[[], nn.Module], inputs: Any, plan: Plan, place: int) -> Result | None:
        """On the rank that is the ``place``-th of this machine."""
        with blaming("The model fails where it is run"):
            mesh = make_mesh(plan.tp, device=_device(self.device, place))
            return compare_on_rank(
                source(), inputs, plan, mesh, sequence_parallel=self.sliced, tolerances=PRECISIONS[self.dtype]
            )


def _device(name: str, place: int) -> torch.device:
    """The device of the ``place``-th rank of this machine; on a GPU float32 is made to be float32."""
    if name == "cpu":
        return torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = False  # which convolutions would use
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


def _check_gpus(ranks: int) -> None:
    if (count := torch.cuda.device_count()) < ranks:
        raise NotRunError(
            f"{ranks} ranks need a GPU each, and torch finds {count} on this machine.", hint="Verify on CPUs."
        )


def _on_ranks(source: Source, plan: Plan, how: _How) -> Result:
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if how.device == "cuda":
        _check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if torchrun else plan.tp)
    if torchrun:
        return _under_torchrun(source, plan, how)
    with tempfile.TemporaryDirectory(prefix="tpconvert-verify-") as scratch:
        arguments = (plan.tp, scratch, source.build, source.inputs, plan.dumps(), how)
        context: Any = mp.start_processes(_rank, arguments, plan.tp, join=False, start_method=_start_method())
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it warns of each rank it ends
        try:
            while not context.join():
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise _why(error, context.processes, Path(scratch)) from None
        finally:
            for process in context.processes:
                process.kill()
        found: Result = torch.load(Path(scratch) / "result.pt", weights_only=False)  # written by our own rank just now
    return found


def _start_method() -> str:
    """Fork keeps a source's functions as they are, which need not be picklable."""
    return "fork" if hasattr(os, "fork") else "spawn"


def _rank(
    rank: int, degree: int, scratch: str, build: Callable[[], nn.Module], inputs: Any, plan: str, how: _How
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which comes too when the parent dies: end even while waiting
    torch.set_num_threads(1)  # a forked process has lost the threads of OpenMP, and would wait for them for ever
    dist.init_process_group(
        how.backend, init_method=f"file://{scratch}/store", rank=rank, world_size=degree, timeout=LIMIT
    )
    try:
        result = how.compare(build, inputs, Plan.loads(plan), rank)
        if result is not None:
            torch.save(result, Path(scratch) / "result.pt")
        dist.barrier()
    except TPConvertError as error:
        (Path(scratch) / f"error-{rank}").write_text(json.dumps([error.message, error.hint, error.exit_code]))
        _leave(how)
        raise
    except Exception:
        said = _failed(traceback.format_exc())
        (Path(scratch) / f"error-{rank}").write_text(json.dumps([said.message, said.hint, said.exit_code]))
        _leave(how)
        raise
    dist.destroy_process_group()


def _leave(how: _How) -> None:
    """End a rank that failed: NCCL would wait for the others while it is taken down, and they wait for this one."""
    if how.device == "cuda":
        os._exit(1)


def _why(error: Exception, processes: Sequence[Any], scratch: Path) -> TPConvertError:
    """What to say of a run whose ranks failed: a rank that was killed, else the first that could say something."""
    for rank, process in enumerate(processes):
        code = process.exitcode or 0
        if code < 0 and -code != signal.SIGTERM:  # which the others get; what they say came of that
            said = f"process {rank} terminated with signal {signal.Signals(-code).name}"
            return NotRunError(f"A rank died ({said}).", hint="Is there enough memory? Try --twin.")
    return _told(scratch) or _failed(str(error))


def _told(scratch: Path) -> TPConvertError | None:
    """The first error of a rank; later ones tell only that touch with it was lost."""
    for path in sorted(scratch.glob("error-*"), key=lambda path: path.stat().st_mtime_ns):
        message, hint, code = json.loads(path.read_text())
        return VerifyError(message, hint=hint) if code == VerifyError.exit_code else NotRunError(message, hint=hint)
    return None


def _under_torchrun(source: Source, plan: Plan, how: _How) -> Result:
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group(how.backend, timeout=LIMIT)
    try:
        ranks = dist.get_world_size()
        if ranks != plan.tp:
            raise NotRunError(
                f"torchrun started {ranks} ranks, the plan is for tp={plan.tp}.", hint=f"Start {plan.tp}."
            )
        mine = how.compare(source.build, source.inputs, plan, int(os.environ.get("LOCAL_RANK", dist.get_rank())))
        results: list[Any] = [mine]
        dist.broadcast_object_list(results)
    except BaseException:
        if ours and how.device == "cpu":  # NCCL would wait for the others here, and they wait for this rank
            dist.destroy_process_group()
        raise
    if ours:
        dist.destroy_process_group()
    found: Result = results[0]
    return found


def _failed(trace: str) -> NotRunError:
    """A rank's error, of which nobody thought."""
    lines = [line for line in trace.splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"\S*(Error|Exception)\b", line)]
    forked = "fork" in trace or "initialization error" in trace
    hint = "After a backward pass on a machine with GPUs no rank can be forked: use tpconvert verify, or torchrun."
    return NotRunError(f"A rank failed: {[*lines, *said][-1]}", hint=hint * forked)


# -- lockstep ---------------------------------------------------------------------------------------------------


def verify_emulated(
    source: Source, plan: Plan, rules: Sequence[Path | str] = (), *, sequence_parallel: bool = False
) -> Result:
    """All ranks in lockstep in this process: every op's result, every output, every gradient."""
    return emulate_module(source.build(), source.inputs, plan, rules=rules, sequence_parallel=sequence_parallel)


@torch.inference_mode(False)
@torch.enable_grad()
def emulate_module(
    module: nn.Module,
    inputs: Any,
    plan: Plan,
    seed: int = 0,
    *,
    rules: Sequence[Path | str] = (),
    sequence_parallel: bool = False,
) -> Result:
    """As :func:`verify_emulated`, for a real module, which is perturbed in place.

    The axes are found anew in the recorded graph and must give the very layouts, collectives and edits of the plan.
    """
    perturb(module, seed)
    tolerance, inputs = precision(module, inputs)
    with eval_mode(module), Exact(dtype_of(tolerance)):
        trace = capture(module, inputs, values=True, rules=load_rules([Path(r) for r in rules]))
        found = reproduce(trace, plan, [Path(r) for r in rules])
        sliced = sliced_flow(found.choice.flow, plan) if sequence_parallel else None
        emulation = found.emulate(sliced)
        checks = compare_asked(module, inputs, trace, found, plan, sliced)
    bound = tolerance.bound
    checks += [Check("op", f"{d.name} in {d.module or 'the model'}", d.error, bound, "eval") for d in emulation.forward]
    checks += [Check("output", d.name, d.error, bound, "eval") for d in emulation.outputs]
    checks += [Check("gradient", d.name, d.error, bound, "eval") for d in emulation.gradients]
    parted = next((d.module for d in emulation.forward if not d.error <= bound), "")
    return Result(tuple(checks), tolerance, parted, tuple(emulation.notes))


# -- bytes ------------------------------------------------------------------------------------------------------


def compare_bytes(source: Source, folder: Path) -> list[Check]:
    """Every stored tensor of every rank against the source's."""
    manifest = read_manifest(folder)
    weights = source.weights()
    worst = dict.fromkeys(weights.names(), 0.0)
    for rank in range(manifest.tp):
        local = load_rank(folder, rank)
        for name in worst:
            entry = manifest.tensors.get(name)
            if entry is None or name not in local:
                worst[name] = float("inf")
                continue
            want = take_pieces(weights.read(name), entry.layout, rank, manifest.tp)
            if not same_bytes(local[name], want):
                worst[name] = float("inf")
    if missing := set(manifest.tensors) - set(worst):
        raise VerifyError(f"{folder} holds {min(missing)}, which {source.name} does not.")
    return [Check("bytes", name, error, BYTES.bound, "") for name, error in worst.items()]
