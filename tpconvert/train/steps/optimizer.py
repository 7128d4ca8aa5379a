"""The optimizer and its learning rate; the rate is a function of the step, so there is no scheduler to keep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tpconvert.train.settings.config import Training

FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices where torch has one kernel for all of AdamW, for real parameters."""


def make_optimizer(named: Iterable[tuple[str, nn.Parameter]], training: Training) -> torch.optim.Optimizer:
    """AdamW or SGD over two groups: matrices, which decay, and norms and biases, which do not."""
    parameters = [p for _, p in named if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=training.lr, momentum=training.momentum)
    fused = all(p.is_floating_point() and p.device.type in FUSED for p in parameters)
    return torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, eps=training.eps, fused=fused)


def learning_rate(step: int, training: Training) -> float:
    """The rate of the step with this number, counted from 1.

    >>> t = Training(steps=100, warmup_steps=10, lr=1.0, schedule="linear")
    >>> [learning_rate(s, t) for s in (1, 10, 55, 100)]
    [0.1, 1.0, 0.51..., 0.01...]
    """
    if step <= training.warmup_steps:
        return training.lr * step / training.warmup_steps
    if training.schedule == "constant":
        return training.lr
    done = min(1.0, (step - 1 - training.warmup_steps) / max(1, training.steps - training.warmup_steps))
    left = 1.0 - done if training.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return training.min_lr + (training.lr - training.min_lr) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """``(kind -> parameter name -> tensor of the parameter's shape, parameter name -> updates so far)``."""
    kinds: dict[str, dict[str, Tensor]] = {}
    updates: dict[str, float] = {}
    for name, parameter in named.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind == "step":
                updates[name] = float(value)
            elif isinstance(value, Tensor):
                kinds.setdefault(kind, {})[name] = value
    return kinds, updates


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    kinds: Mapping[str, Mapping[str, Tensor]],
    updates: Mapping[str, float],
) -> None:
    """The inverse of :func:`optimizer_tensors`."""
    numbers = {parameter: i for i, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    state = optimizer.state_dict()
    state["state"] = {}
    for name, parameter in named.items():
        entry = {kind: _like(parameter, tensors[name]) for kind, tensors in kinds.items() if name in tensors}
        if name in updates:
            entry["step"] = torch.tensor(updates[name], dtype=torch.float32)
        if entry:
            state["state"][numbers[parameter]] = entry
    optimizer.load_state_dict(state)


def _like(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """The tensor, or what this dp rank has of it where FSDP shards the parameter."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
