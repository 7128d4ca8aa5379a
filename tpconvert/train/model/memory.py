"""What to say when a GPU is full: what fills it, and what would fill it less, with the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpconvert.errors import TrainError
from tpconvert.parallel import Mesh
from tpconvert.train.settings.config import Config, accumulation

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on this rank's device."""

    total: int
    """What the device has."""
    peak: int
    """The most that was in use at once."""
    weights: int
    gradients: int
    optimizer: int

    @property
    def rest(self) -> int:
        """What is kept for backward, and what comes and goes."""
        return max(self.peak - self.weights - self.gradients - self.optimizer, 0)


def peak(mesh: Mesh, *, recorded: bool = False) -> float:
    """The most GiB that this rank's GPU has held; 0 on a CPU.

    What a CUDA graph works in is nobody's while it is not recording, so where there is one all that is reserved counts.
    """
    if mesh.device.type != "cuda":
        return 0.0
    held = torch.cuda.max_memory_reserved if recorded else torch.cuda.max_memory_allocated
    return held(mesh.device) / GIB


def out_of_memory(
    error: Exception, config: Config, mesh: Mesh, module: nn.Module, optimizer: torch.optim.Optimizer
) -> TrainError:
    """The error of a rank whose GPU is full."""
    parameters = list(module.parameters())
    weights = _bytes(parameters, mesh)
    grads = _bytes((p for p in parameters if p.requires_grad), mesh)
    state = _bytes((v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)), mesh)
    two = 2 if config.training.optimizer == "adamw" else int(config.training.momentum > 0)
    cuda = mesh.device.type == "cuda"
    total = torch.cuda.get_device_properties(mesh.device).total_memory if cuda else 0
    most = torch.cuda.max_memory_allocated(mesh.device) if cuda else 0
    held = Held(total, most, weights, grads, max(state, two * grads))
    rank = mesh.dp_rank * mesh.degree + mesh.rank
    asked = str(error).partition("Tried to allocate ")[2].partition(". ")[0]
    return TrainError(
        f"Rank {rank}: {mesh.device} is out of memory{f' ({asked} more were asked for)' if asked else ''}: "
        f"{held.peak / GIB:.1f} of {held.total / GIB:.1f} GiB, of which weights {weights / GIB:.1f}, gradients "
        f"{grads / GIB:.1f}, optimizer {held.optimizer / GIB:.1f}, activations and the rest {held.rest / GIB:.1f}.",
        hint=f"Try, from the cheapest: {'; '.join(ways_out(config, mesh.degree, mesh.dp_degree, held))}.",
    )


def ways_out(config: Config, tp: int, dp: int, held: Held) -> Iterator[str]:
    """What would take less, from what costs least time."""
    training, parallelism = config.training, config.parallelism
    state, rest = (held.weights + held.gradients + held.optimizer) / GIB, held.rest / GIB
    if training.micro_batch_size > 1:
        half = max(n for n in range(1, training.micro_batch_size) if training.micro_batch_size % n == 0)
        batch = training.micro_batch_size * dp * accumulation(training, dp)
        yield (
            f"training.micro_batch_size={half} training.global_batch_size={batch} (the same steps, "
            f"{rest * (1 - half / training.micro_batch_size):.1f} GiB less)"
        )
    if tp > 1 and not parallelism.sequence_parallel:
        yield "parallelism.sequence_parallel=true"
    if dp > 1 and parallelism.data_parallel == "ddp":
        yield f"parallelism.data_parallel=fsdp ({state * (1 - 1 / dp):.1f} GiB less)"
    if parallelism.activation_checkpointing == "none":
        yield "parallelism.activation_checkpointing=selective, or full"
    elif parallelism.activation_checkpointing == "selective":
        yield "parallelism.activation_checkpointing=full"
    yield f"tpconvert reshard to tp={2 * tp} and twice the GPUs ({state / 2:.1f} GiB less)"
    if dp > 1 and not parallelism.cpu_offload:
        yield "parallelism.data_parallel=fsdp with parallelism.cpu_offload=true (slow)"
    yield f"training.seq_len={training.seq_len // 2}"


def _bytes(tensors: Iterable[Tensor], mesh: Mesh) -> int:
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.nbytes for t in local if t.device.type == mesh.device.type)
