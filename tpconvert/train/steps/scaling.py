"""The loss scale of fp16: large enough that small gradients do not vanish, small enough that large ones stay finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpconvert.errors import TrainError
from tpconvert.train.settings.config import Training

SMALLEST = 2.0**-14
"""A scale under which no loss is helped: something else than its size is wrong."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The factor of the loss, and how many good steps it has had."""

    value: float = 1.0
    good: int = 0

    def undo(self, module: nn.Module) -> None:
        """Divide all gradients by the factor."""
        if self.value == 1.0:
            return
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        torch._foreach_div_([g.to_local() if isinstance(g, DTensor) else g for g in grads], self.value)

    def after(self, norm: float, training: Training) -> Scale:
        """The scale of the next step, the gradient norm of this one being ``norm``, which is the same on all ranks."""
        if training.precision != "fp16":
            return self
        if math.isfinite(norm):
            grown = self.good + 1 >= training.loss_scale_window
            return Scale(self.value * 2, 0) if grown else replace(self, good=self.good + 1)
        if self.value / 2 < SMALLEST:
            raise TrainError(
                f"Gradients overflow fp16 even at a loss scale of {self.value:g}.",
                hint="Use training.precision: bf16, or a smaller lr.",
            )
        return Scale(self.value / 2, 0)


def first_scale(training: Training, kept: Scale | None = None) -> Scale:
    """Where a run begins, or goes on from what it ``kept``.

    >>> first_scale(Training(precision="fp16", loss_scale=1024)), first_scale(Training())
    (Scale(value=1024.0, good=0), Scale(value=1.0, good=0))
    """
    if training.precision != "fp16":
        return Scale()
    return kept or Scale(training.loss_scale)
