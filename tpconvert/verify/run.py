"""A verification: by ranks of its own or those of torchrun, or in lockstep; and the comparison of stored bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tpconvert.checkpoint import load_rank, read_manifest
from tpconvert.checkpoint.tensors.pieces import same_bytes, take_pieces
from tpconvert.errors import NotRunError, VerifyError
from tpconvert.planning.make import eval_mode
from tpconvert.source import Source
from tpconvert.spec.plan import Plan
from tpconvert.spec.sliced import sliced_form
from tpconvert.verify.compare.asked import compare_asked
from tpconvert.verify.compare.lockstep import Lockstep
from tpconvert.verify.measure.dtypes import dtype_of, precision
from tpconvert.verify.measure.lastbits import measured
from tpconvert.verify.measure.modes import Exact, perturb
from tpconvert.verify.ranks import LIMIT, How, Work, start_ranks
from tpconvert.verify.result import BYTES, Check, Result


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
    collectives: str = "auto",
) -> Result:
    """The whole model and the one ``plan`` makes of it, compared; with ``folder``, also every stored byte.

    Ranks are processes on this machine, or those of torchrun where this runs under it: on CPUs with gloo, or with
    ``device="cuda"`` each on a GPU of its own with NCCL.  On a machine with GPUs they are fresh interpreters, so there
    ``source`` is one of :func:`tpconvert.open_source`, or has a ``build`` that can be pickled.  They compare in
    ``dtype``: float64 (float32 where no kernel has it), float32, or bfloat16.  ``emulate`` runs all ranks in lockstep
    in this process instead, on the recorded graph, in float64 on the CPU; it needs the ``rules`` the plan was made
    with.  ``sequence_parallel`` is that of :func:`tpconvert.parallelize`, ``collectives`` that of
    :func:`tpconvert.make_mesh`.
    """
    if sequence_parallel:
        sliced_form(plan)  # which there must be
    if emulate:
        result = verify_emulated(source, plan, rules, sequence_parallel=sequence_parallel)
    else:
        result = _on_ranks(source, plan, How(sequence_parallel, device, dtype, collectives))
    result = replace(result, notes=(*result.notes, *plan.notes))
    if folder is not None:
        stored = compare_bytes(source, folder)
        result = replace(result, checks=(*result.checks, *stored))
    return result


def _check_gpus(ranks: int) -> None:
    if (count := torch.cuda.device_count()) < ranks:
        raise NotRunError(
            f"{ranks} ranks need a GPU each, and torch finds {count} on this machine.", hint="Verify on CPUs."
        )


def _on_ranks(source: Source, plan: Plan, how: How) -> Result:
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if how.device == "cuda":
        _check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if torchrun else plan.tp)
    if torchrun:
        return _under_torchrun(source, plan, how)
    return start_ranks(Work(source.build, source.inputs, plan.dumps(), plan.tp, how))


def _under_torchrun(source: Source, plan: Plan, how: How) -> Result:
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
    lockstep = Lockstep(module, plan, [Path(r) for r in rules], tolerance, sequence_parallel)
    with eval_mode(module), Exact(dtype_of(tolerance)):
        lockstep.run(inputs)
        if not sequence_parallel:
            lockstep.run_other(inputs)
    form = sliced_form(plan) if sequence_parallel else plan
    notes = measured(lockstep.ops, [tolerance.bound] * len(lockstep.ops))
    checks = (*compare_asked(form, lockstep.asked), *lockstep.ops)
    return Result(checks, tolerance, lockstep.parted, (*lockstep.notes, *notes))


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
