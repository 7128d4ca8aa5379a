"""Micro-batches on this rank: as they are, or as one CUDA graph that the first of them is recorded into.

Within the graph are forward, loss and backward with their collectives over tp.  What comes once a step stays outside:
the sums over dp, clipping, the update, and whatever depends on a number (a step that fp16 skips, one that is no
number), as do evaluation and the seeds that dropout draws by.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tpconvert.errors import ConfigError, PlanError
from tpconvert.parallel import Mesh
from tpconvert.parallel.compiled.graphed import GraphedStep, unchanged
from tpconvert.parallel.compiled.layers import layers_of
from tpconvert.train.data.batch import Batch, OwnBatch, leaves
from tpconvert.train.model.open import Model
from tpconvert.train.settings.config import Config

OFF = "Set parallelism.cuda_graphs: false."


class MicroStep(Protocol):
    """Runs one micro-batch of a step."""

    def __call__(self, micro: Batch | OwnBatch, labels: Tensor, scale: Tensor, *, first: bool, last: bool) -> Tensor:
        """Its share of the mean loss over all ``labels`` of the step; adds its gradients x ``scale``."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Op by op."""

    model: Model

    def __call__(self, micro: Batch | OwnBatch, labels: Tensor, scale: Tensor, *, first: bool, last: bool) -> Tensor:
        """See :class:`MicroStep`."""
        scaled, share = _losses(self.model, micro, labels, scale)
        self.model.shards.before_backward(self.model.module, scaled, last=last)
        scaled.backward()
        return share.detach()


@dataclass(eq=False)
class Recorded:
    """By a CUDA graph."""

    model: Model
    several: bool
    """Whether a step has more than one micro-batch, whose gradients are added up."""
    _step: list[GraphedStep] = field(default_factory=list)

    def __call__(self, micro: Batch | OwnBatch, labels: Tensor, scale: Tensor, *, first: bool, last: bool) -> Tensor:
        """See :class:`MicroStep`."""
        tensors = _tensors(micro)
        if not self._step:
            self._step.append(self._record(micro, [*tensors, labels, scale]))
        (step,) = self._step
        if [t.shape for t in tensors] != [t.shape for t in step.batch[:-2]]:
            raise ConfigError(
                f"The batches are of different sizes ({_sizes(step.batch[:-2])}, then {_sizes(tensors)}), and "
                "parallelism.cuda_graphs needs all alike.",
                hint=f"Give examples of one size. {OFF}",
            )
        if first and self.several:
            step.zero_grad()
        return step(*tensors, labels, scale)[1]  # type: ignore[no-any-return]

    def _record(self, micro: Batch | OwnBatch, batch: list[Tensor]) -> GraphedStep:
        def losses(*given: Tensor) -> tuple[Tensor, Tensor]:
            *tensors, labels, scale = given
            return _losses(self.model, micro.filled(tensors), labels, scale)

        _check_repeated(self.model, micro)
        try:
            return GraphedStep(self.model.module, losses, batch, accumulate=self.several)
        except PlanError as error:
            raise PlanError(error.message, hint=OFF) from error


def micro_step(model: Model, config: Config, several: bool) -> MicroStep:
    """How micro-batches are run, as configured."""
    return Recorded(model, several) if config.parallelism.cuda_graphs else Plain(model)


def check_device(config: Config, mesh: Mesh) -> None:
    """Raise where graphs are to be recorded and there is no GPU."""
    if config.parallelism.cuda_graphs and mesh.device.type != "cuda":
        raise ConfigError(f"parallelism.cuda_graphs needs CUDA, and this run is on {mesh.device.type}.", hint=OFF)


def _losses(model: Model, micro: Batch | OwnBatch, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """``(share x scale, share)`` of the mean loss over all labels of the step."""
    share = model.loss(micro) / labels
    return share * scale, share


def _check_repeated(model: Model, micro: Batch | OwnBatch) -> None:
    """Raise where layers are to be run again in backward and draw numbers; let them not ask for these otherwise."""
    layers = [layer for layer in layers_of(model.module) if getattr(layer, "tp_draws", False)]
    if not layers:
        return
    with torch.random.fork_rng([model.mesh.device]):
        states = torch.get_rng_state(), torch.cuda.get_rng_state(model.mesh.device)
        with torch.no_grad(), unchanged(model.module):
            model.loss(micro)
        now = torch.get_rng_state(), torch.cuda.get_rng_state(model.mesh.device)
    if not all(torch.equal(a, b) for a, b in zip(states, now, strict=True)):
        raise ConfigError(
            "The model draws random numbers (dropout), which parallelism.cuda_graphs cannot give anew to the layers "
            "that activation_checkpointing runs again.",
            hint="Set parallelism.activation_checkpointing: none, the model's dropout to 0, or cuda_graphs: false.",
        )
    for layer in layers:
        layer.tp_draws = False


def _tensors(micro: Batch | OwnBatch) -> list[Tensor]:
    if isinstance(micro, Batch):
        return list(micro.named().values())
    every: list[Any] = list(leaves(micro.content))
    if other := [type(v).__name__ for v in every if not isinstance(v, Tensor)]:
        raise ConfigError(
            f"data.dataset: its batches hold {other[0]} beside tensors, which parallelism.cuda_graphs would repeat.",
            hint=f"Give tensors and numbers. {OFF}",
        )
    return every


def _sizes(tensors: list[Tensor]) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)
