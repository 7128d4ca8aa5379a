"""The run, from a configuration to trained weights, in the order in which it happens."""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tpconvert.checkpoint import read_manifest, read_plan
from tpconvert.errors import ConfigError, TrainError
from tpconvert.parallel import Mesh, clip_grad_norm_
from tpconvert.parallel.grads.clip import grad_norm
from tpconvert.train.data import run as data
from tpconvert.train.data.own import function_of
from tpconvert.train.data.run import Micro
from tpconvert.train.model.flops import Work, device_peak, model_flops
from tpconvert.train.model.fp8 import check_fp8, use_fp8
from tpconvert.train.model.memory import out_of_memory, peak
from tpconvert.train.model.open import (
    Model,
    OwnCall,
    build,
    call_of_padded,
    layers_of,
    make_call,
    master_dtype,
    open_module,
    packing_of,
    speed_up,
    told_of_packing,
)
from tpconvert.train.model.shards import share_out
from tpconvert.train.saving import state
from tpconvert.train.saving.saves import Saves, find_best, is_due
from tpconvert.train.saving.state import Progress, Run
from tpconvert.train.settings.config import Config, accumulation
from tpconvert.train.shown.metrics import Metrics
from tpconvert.train.shown.profile import Watch
from tpconvert.train.steps.evaluate import evaluate
from tpconvert.train.steps.optimizer import learning_rate, make_optimizer, set_learning_rate
from tpconvert.train.steps.recorded import MicroStep, check_device, micro_step
from tpconvert.train.steps.scaling import Scale, first_scale
from tpconvert.train.together.ranks import gathered, same_buffers, sum_gradients, summed_over_dp, together, totals


def train(
    folder: Path,
    config: Config,
    mesh: Mesh,
    *,
    output: Path | None = None,
    trust_remote_code: bool = False,
    prepares: bool | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Train the model of a sharded folder on the ranks of ``mesh``; the losses of the logged steps.

    ``prepares`` says whether this rank tokenizes for its machine; by default the first rank does for all.
    ``stopped`` is asked before each step; where it is true on any rank, all save and return.
    """
    run = Run(folder, output or folder, read_plan(folder), config, mesh)
    resume = config.checkpoint.resume

    # Where to begin.
    check_device(config, mesh)
    together(mesh, lambda: state.check_output(run.output))
    start = together(mesh, lambda: state.find_start(folder, run.output, resume))
    state.check_same_model(read_manifest(folder), read_manifest(start), start)
    progress = state.read_progress(start, resume)

    # Data: one rank of each machine tokenizes, the others find the tokens in the cache.
    examples = data.open_data(folder, run.output, run.plan, config, mesh, run.first if prepares is None else prepares)
    config = examples.resolved(config)
    changed = state.changes(start, config, mesh.dp_degree) if progress.step else ""
    run = replace(run, config=config)
    check_slices(run, 0 if examples.held is None else len(examples.held))
    best = gathered(mesh, together(mesh, lambda: find_best(run, progress)))[0]
    progress = replace(progress, best=best)

    # Model and optimizer.
    model = open_model(run, start, progress, trust_remote_code, examples.packed)
    optimizer = make_optimizer(model.module.named_parameters(), config.training)
    state.load_optimizer(start, mesh, optimizer, model.module, progress.updates)

    steps = config.training.steps
    metrics = together(mesh, lambda: Metrics(run.output, config.logging, steps, run.first, progress.step))
    metrics.say(
        f"tp {mesh.degree} x dp {mesh.dp_degree} on {mesh.device.type}, {_count(model):,} parameters a rank, "
        f"{examples.told()}, step {progress.step} of {steps}, from {start}"
    )
    begun = state.not_resumed(run.output, resume, progress)
    for note in filter(None, (begun, changed, *examples.notes, told_of_packing(model) if examples.packed else "")):
        metrics.say(note)
    if run.first:
        metrics.watch = Watch(run.output, config.profile, config.logging.split_every, gpu=mesh.device.type == "cuda")
        metrics.work = work_of(run, examples.train.step_size if examples.full else 0, trust_remote_code)
    try:
        with torch.autograd.set_multithreading_enabled(False):  # another thread would only launch later
            return run_steps(run, model, optimizer, examples, metrics, progress, stopped)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, config, mesh, model.module, optimizer) from None
    finally:
        metrics.close()


def run_steps(
    run: Run,
    model: Model,
    optimizer: torch.optim.Optimizer,
    examples: data.Data,
    metrics: Metrics,
    progress: Progress,
    stopped: Callable[[], bool],
) -> list[float]:
    """All steps from ``progress`` to the last, or to where some rank is told to stop."""
    mesh, training, losses = run.mesh, run.config.training, []
    first, saves = progress.step, Saves(run, model.module, optimizer, metrics.say, progress.best)
    upcoming = examples.train.steps(progress.position)
    run_micro = micro_step(model, run.config, accumulation(training, mesh.dp_degree) > 1)

    while progress.step < training.steps:
        with metrics.waiting():
            micros, after = next(upcoming)
        counts = [model.count(micros), sum(micro.size for micro in micros), int(stopped()), int(saves.writing)]
        labels, tokens, stop, writing = totals(mesh, counts)
        if not writing:
            saves.finish()
        if stop:
            metrics.say(f"told to stop after step {progress.step}")
            break
        step = progress.step + 1
        if progress.step == first:
            data.check_shares(gathered(mesh, (data.fingerprint(micros), data.origins_of(micros))), mesh.degree)
        rate = learning_rate(step, training)
        set_learning_rate(optimizer, rate)
        with metrics.stepping(step):
            loss, norm, scale = take_step(run, model, run_micro, optimizer, micros, labels // mesh.degree, progress)
        if not math.isfinite(norm):
            metrics.say(f"step {step}: gradients overflow fp16, so no weight is changed; loss scale {scale.value:g}")
        if not labels:
            metrics.say(f"step {step}: there is nothing to predict in its batch, so no weight is changed")
        progress = Progress(step, after, scale=scale)

        metrics.count(tokens // mesh.degree)
        if step % run.config.logging.every == 0 or step in (first + 1, training.steps):
            losses.append(loss)
            memory = peak(mesh, recorded=run.config.parallelism.cuda_graphs)
            metrics.log(step, loss=loss, lr=rate, grad_norm=norm, epoch=after.epoch, memory_gib=memory)
        restart_clock, due = metrics.pause(), is_due(step, run.config)
        if examples.judged_after(step, training.steps):
            found = evaluate(model, examples, stopped)
            metrics.evaluated(step, found)
            due = saves.is_best(step, found) or due
        if due:
            saves.begin(progress)
        restart_clock()
    if progress.step > first:
        saves.end(progress)
    elif first >= training.steps:
        metrics.say(f"all {training.steps} steps were done before; set training.steps to more to go on")
    return losses


def work_of(run: Run, sequences: int, trust_remote_code: bool) -> Work:
    """What a step of so many full ``sequences`` asks of each GPU; counted only where that can be compared with what the
    GPU could do."""
    config, mesh = run.config, run.mesh
    gpus = mesh.degree * mesh.dp_degree
    peak = device_peak(mesh.device, config.logging.peak_tflops, config.training.precision)
    if not sequences or (mesh.device.type != "cuda" and not peak):
        return Work(gpus)
    source = open_module(run.base, run.plan, trust_remote_code=trust_remote_code)
    return Work(gpus, model_flops(source, sequences, config.training.seq_len), peak)


def take_step(
    run: Run,
    model: Model,
    run_micro: MicroStep,
    optimizer: torch.optim.Optimizer,
    micros: Sequence[Micro],
    labels: int,
    progress: Progress,
) -> tuple[float, float, Scale]:
    """One update by this dp rank's micro-batches, ``labels`` being those of all: ``(loss, gradient norm, new scale)``.

    All ranks see the same two numbers, so all update their weights or none does.
    """
    mesh, training = run.mesh, run.config.training
    scale = first_scale(training, progress.scale)
    shares = run_micro_batches(run_micro, mesh, micros, max(labels, 1), scale.value, training.seed, progress.step + 1)
    sum_gradients(model.module, mesh, int(run.config.parallelism.bucket_mb * 2**20))
    scale.undo(model.module)
    norm = clip(run, model)
    total = summed_over_dp(shares.sum(), mesh)
    loss, size = torch.stack([total, norm.to(total)]).tolist()  # the one wait for the GPU in a step

    if not math.isfinite(loss) or not (math.isfinite(size) or training.precision == "fp16"):
        raise no_number(run, micros, shares, loss=loss, norm=size, progress=progress)
    if math.isfinite(size) and labels:
        optimizer.step()
    optimizer.zero_grad()
    same_buffers(model.module, mesh)
    return loss, size, scale.after(size, training)


def check_slices(run: Run, held: int) -> None:
    """Raise ConfigError where ranks cannot have equally many tokens, or sequences of a batch; ``held`` are held out."""
    training, tp = run.config.training, run.mesh.degree
    if not run.config.parallelism.sequence_parallel or tp == 1:
        return
    sizes = {"seq_len": training.seq_len}
    if run.plan.slices.sequences:
        sizes = {"micro_batch_size": training.micro_batch_size}
        last = held % training.micro_batch_size
        if rest := last % tp:
            raise ConfigError(
                f"{held} sequences are held out, which leaves a batch of {last}, no multiple of tp={tp}.",
                hint=f"Hold out {held - rest}, or set parallelism.sequence_parallel=false.",
            )
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(
                f"{name} {size} is no multiple of tp={tp}.",
                hint=f"Set training.{name}={max(size - size % tp, tp)}, or parallelism.sequence_parallel=false.",
            )


def open_model(run: Run, start: Path, progress: Progress, trust_remote_code: bool, packed: bool) -> Model:
    """This rank's part of the model, with the weights in ``start``."""
    config, mesh = run.config, run.mesh
    dtype = master_dtype(config.training.precision)
    tensors = together(mesh, lambda: state.load_tensors(start, mesh, dtype, masters=progress.step > 0))
    module, call, cut = build(
        lambda: open_module(run.base, run.plan, trust_remote_code=trust_remote_code),
        run.plan,
        mesh,
        tensors,
        dtype,
        config.parallelism.sequence_parallel,
        call=make_call if config.data.dataset is None else lambda _: OwnCall(),
        whole=config.data.loss is not None,
    )
    own_loss = together(mesh, lambda: function_of("data.loss", config.data.loss) if config.data.loss else None)
    packing = together(mesh, lambda: packing_of(module, call, mesh, config) if packed else None)
    padded = not (config.data.pack and config.data.objective == "causal")
    if mesh.degree > 1 and padded and packing is None and config.data.dataset is None:
        call = together(mesh, lambda: call_of_padded(module, call, mesh, config))
    layers = list(layers_of(module))
    if config.training.precision == "fp8":
        check_fp8(config.training, mesh)
        use_fp8(layers)
    speed_up(module, config.parallelism)
    shards = share_out(module, layers, mesh, config.parallelism)
    return Model(module, call, cut, mesh, padded, config.training.precision, shards, packing, own_loss)


def run_micro_batches(
    run_micro: MicroStep, mesh: Mesh, micros: Sequence[Micro], labels: int, scale: float, seed: int, step: int
) -> Tensor:
    """Each micro-batch's share of the mean loss over all ``labels`` of the step; leaves their gradients x ``scale``."""
    shares, last = [], len(micros) - 1
    over, factor = (torch.full((), value, dtype=torch.float64, device=mesh.device) for value in (labels, scale))
    for number, micro in enumerate(micros):
        seed_micro_batch(mesh, seed, step, number)
        share = run_micro(micro.to(mesh.device), over, factor, first=number == 0, last=number == last)
        shares.append(share.double())
    return torch.stack(shares)


def seed_micro_batch(mesh: Mesh, seed: int, step: int, number: int) -> None:
    """Make every random number a function of seed, step and place, so that a resumed run draws the same ones."""
    digest = hashlib.sha256(f"{seed} {step} {number} {mesh.dp_rank}".encode()).digest()
    value = int.from_bytes(digest[:4], "big")
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def clip(run: Run, model: Model) -> Tensor:
    """The gradient norm of the whole model, as it was before clipping."""
    largest = run.config.training.clip
    if largest is None:
        return grad_norm(model.module, run.mesh, run.plan)
    return clip_grad_norm_(model.module, largest, run.mesh, run.plan)


def no_number(
    run: Run, micros: Sequence[Micro], shares: Tensor, *, loss: float, norm: float, progress: Progress
) -> TrainError:
    """The error of a step whose loss or gradient is no number; its batch is left in the output folder."""
    step, mesh = progress.step + 1, run.mesh
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
    stem = run.output / f"{state.BAD}-{step}"
    if mesh.rank == 0:
        tensors = {
            f"{number}.{name}": value for number, micro in enumerate(micros) for name, value in micro.named().items()
        }
        told = {"step": step, "position": progress.position, "losses": shares.tolist(), "rows": data.origins_of(micros)}
        with contextlib.suppress(OSError, SafetensorError):  # the first thing to say is what went wrong
            save_file(tensors, f"{stem}-dp-{mesh.dp_rank}.safetensors", {k: str(v) for k, v in told.items()})
    bad = [
        f"dp rank {rank // mesh.degree}, micro-batch {number}"
        for rank, each in enumerate(gathered(mesh, shares.tolist()))
        for number, share in enumerate(each)
        if rank % mesh.degree == 0 and not math.isfinite(share)
    ]
    return TrainError(
        f"Step {step}: {what}{f' ({bad[0]}' + (f' and {len(bad) - 1} more' if bad[1:] else '') + ')' if bad else ''}. "
        f"No weight was changed; the batch is in {stem}-dp-*.safetensors.",
        hint="Lower training.lr, add warmup_steps, or resume an earlier step.",
    )


def _count(model: Model) -> int:
    return sum(p.numel() for p in model.module.parameters())
