"""The run, from a configuration to trained weights, in the order in which it happens."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tpconvert.checkpoint import read_manifest, read_plan
from tpconvert.errors import ConfigError, TrainError
from tpconvert.parallel import Mesh, clip_grad_norm_
from tpconvert.parallel.clip import grad_norm
from tpconvert.train import data, state, text
from tpconvert.train.config import Config, accumulation
from tpconvert.train.data import Batch, Batches
from tpconvert.train.metrics import Metrics
from tpconvert.train.model import DTYPES, Model, build, limits, open_module, speed_up
from tpconvert.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from tpconvert.train.ranks import gathered, same_buffers, sum_gradients, summed_over_dp, together, totals
from tpconvert.train.state import Progress, Run


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
    start = together(mesh, lambda: state.find_start(folder, run.output, resume))
    state.check_same_model(read_manifest(folder), read_manifest(start), start)
    progress = state.read_progress(start, resume)

    # Data: one rank of each machine tokenizes, the others find the tokens in the cache.
    tokenizer = together(mesh, lambda: text.open_tokenizer(config.data, folder))
    cache = Path(config.data.cache or run.output / "data")
    if run.first if prepares is None else prepares:
        tokens = together(mesh, lambda: text.tokenize(config.data, tokenizer, cache))
    else:
        tokens = together(mesh, lambda: None) or text.tokenize(config.data, tokenizer, cache)
    batches = together(mesh, lambda: open_batches(run, text.open_tokens(tokens), tokenizer))

    # Model and optimizer.
    model = open_model(run, start, progress, trust_remote_code)
    optimizer = make_optimizer(model.module.named_parameters(), config.training)
    state.load_optimizer(start, mesh, optimizer, model.module, progress.updates)

    metrics = Metrics(run.output, config.logging, steps=config.training.steps, active=run.first, resumed=progress.step)
    metrics.say(
        f"tp {mesh.degree} x dp {mesh.dp_degree} on {mesh.device.type}, {_count(model):,} parameters a rank, "
        f"{len(batches.sequences):,} sequences, step {progress.step} of {config.training.steps}, from {start}"
    )
    try:
        return run_steps(run, model, optimizer, batches, metrics, progress, stopped)
    finally:
        metrics.close()


def run_steps(
    run: Run,
    model: Model,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    metrics: Metrics,
    progress: Progress,
    stopped: Callable[[], bool],
) -> list[float]:
    """All steps from ``progress`` to the last, or to where some rank is told to stop."""
    mesh, training, losses = run.mesh, run.config.training, []
    step, position, saved = progress.step, progress.position, progress.step
    upcoming = batches.steps(position)

    def save() -> None:
        restart_clock = metrics.pause()
        metrics.say(f"saved {state.save_step(run, model.module, optimizer, step, position)}")
        restart_clock()

    while step < training.steps:
        micros, after = next(upcoming)
        labels, stop = totals(mesh, [data.count_labels(micros), int(stopped())])
        if stop:
            metrics.say(f"told to stop after step {step}")
            break
        if step == progress.step:
            data.check_fingerprints(gathered(mesh, data.fingerprint(micros)), mesh.degree)
        step, position = step + 1, after
        rate = learning_rate(step, training)
        set_learning_rate(optimizer, rate)
        loss = run_micro_batches(model, micros, max(labels // mesh.degree, 1), seed=training.seed, step=step)
        sum_gradients(model.module, mesh, int(run.config.parallelism.bucket_mb * 2**20))
        norm = clip(run, model)
        optimizer.step()
        optimizer.zero_grad()
        same_buffers(model.module, mesh)
        metrics.count(batches.step_size * training.seq_len)
        if step % run.config.logging.every == 0 or step in (progress.step + 1, training.steps):
            losses.append(check_finite(summed_over_dp(loss, mesh).item(), step))
            metrics.log(
                step, loss=losses[-1], lr=rate, grad_norm=norm.item(), epoch=position.epoch, memory_gib=memory(mesh)
            )
        if run.config.checkpoint.every and step % run.config.checkpoint.every == 0:
            save()
            saved = step
    if step > saved:
        save()
    return losses


def open_batches(run: Run, tokens: text.Tokens, tokenizer: text.Tokenizer) -> Batches:
    """The batches of this rank."""
    training, mesh = run.config.training, run.mesh
    micros = accumulation(training, mesh.dp_degree)
    data.check_fits(run.config, tokens, tokenizer, *limits(run.base, run.plan))
    sequences = data.make_sequences(run.config, tokens, tokenizer)
    return Batches(sequences, training.seed, training.micro_batch_size, micros, mesh.dp_rank, mesh.dp_degree)


def open_model(run: Run, start: Path, progress: Progress, trust_remote_code: bool) -> Model:
    """This rank's part of the model, with the weights in ``start``."""
    config, mesh = run.config, run.mesh
    dtype = DTYPES[config.training.precision]
    tensors = state.load_tensors(start, mesh, dtype, masters=progress.step > 0)
    sliced, length = config.parallelism.sequence_parallel, config.training.seq_len
    if sliced and length % mesh.degree:
        raise ConfigError(
            f"seq_len {length} is no multiple of tp={mesh.degree}.",
            hint=f"Set training.seq_len={length - length % mesh.degree}, or parallelism.sequence_parallel=false.",
        )
    module, call, cut = build(
        lambda: open_module(run.base, run.plan, trust_remote_code=trust_remote_code),
        run.plan,
        mesh,
        tensors,
        dtype,
        sliced,
    )
    speed_up(module, config.parallelism)
    return Model(module, call, cut, mesh, not config.data.pack, config.training.precision)


def run_micro_batches(model: Model, micros: Sequence[Batch], labels: int, *, seed: int, step: int) -> Tensor:
    """This dp rank's share of the mean loss over all ``labels`` of the step; leaves the gradients of that share."""
    total = torch.zeros((), device=model.mesh.device, dtype=torch.float64)
    for number, micro in enumerate(micros):
        seed_micro_batch(model.mesh, seed, step, number)
        loss = model.loss(micro.to(model.mesh.device)) / labels
        loss.backward()
        total += loss.detach()
    return total


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


def check_finite(loss: float, step: int) -> float:
    """The loss, if it is a number."""
    if not math.isfinite(loss):
        raise TrainError(
            f"Step {step}: the loss is {loss}.", hint="Lower training.lr, add warmup_steps, or resume an earlier step."
        )
    return loss


def memory(mesh: Mesh) -> float:
    """The most GiB that this rank's GPU has held; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(mesh.device) / 2**30 if mesh.device.type == "cuda" else 0.0


def _count(model: Model) -> int:
    return sum(p.numel() for p in model.module.parameters())
