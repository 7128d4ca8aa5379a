"""Models as users hand them to ``tpconvert verify``: functions that return a module and its inputs."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.verify.own import Grouped
from tests.zoo.frame import floats, framed, seeded


def mlp():
    """A model that is cut."""
    return seeded(lambda: nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))), (floats(3, 12),)


class Routed(nn.Module):
    """Each row goes the way of the larger of two numbers that are the same but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 240), nn.Linear(240, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        forth, back = (sum(each) for each in (y.unbind(-1), y.flip(-1).unbind(-1)))
        _, way = torch.stack([forth, back], -1).softmax(-1, dtype=torch.float32).topk(1, dim=-1)
        return torch.where(way == 0, y, -y)


def routed():
    """A model that decides by rounding."""
    return seeded(Routed), {"x": floats(64, 12)}


class Then(nn.Module):
    """An MLP and what is done with its result."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.then = nn.Linear(12, 24), nn.Linear(24, 12), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.down(torch.relu(self.up(x))))


def after(then: Callable[[Tensor], Any]):
    """The model that does ``then``."""
    return seeded(Then, then), {"x": floats(3, 12)}


def many():
    """Outputs that cannot be differentiated, integers, a mask and masked logits beside the one that counts."""
    return after(
        lambda y: {
            "logits": y,
            "detached": y.detach() * 2,
            "best": y.argmax(-1),
            "mask": torch.ones(3, dtype=torch.bool),
            "masked": y.masked_fill(torch.arange(12) > 8, float("-inf")),
        }
    )


def integers():
    """No output of floating point."""
    return after(lambda y: y.argmax(-1))


def detached():
    """No output that can be differentiated."""
    return after(lambda y: y.detach())


class Labelled(Then):
    """Asks for labels in training, which the example inputs lack."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training and labels is None:
            raise ValueError("no labels")
        return super().forward(x)


def for_evaluation():
    """A model that does not run in train mode."""
    return seeded(Labelled, torch.relu), {"x": floats(3, 12)}


class OneWay(torch.autograd.Function):
    """Has no backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


def one_way():
    """A model whose gradients cannot be computed, though its output asks for them."""
    return after(OneWay.apply)


def not_a_number():
    """One entry of the output is no number, in the whole model too."""
    return after(lambda y: torch.where(torch.arange(12) == 3, y * float("nan"), y))


def grouped():
    """An attribute that counts something cut."""
    return framed(Grouped)


def whole():
    """Nothing can be cut."""
    return seeded(lambda: nn.Sequential(nn.LayerNorm(13), nn.Softmax(-1))), (floats(3, 13),)


def normed():
    """Batch norm: running statistics in buffers."""
    layers = (nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12), nn.BatchNorm1d(12))
    return seeded(lambda: nn.Sequential(*layers)), (floats(5, 12),)


def rank() -> int | None:
    """The rank of this process, though the model be shown those of dp alone; None where it is not one of several."""
    return dist.get_process_group_ranks(dist.group.WORLD)[dist.get_rank()] if dist.is_initialized() else None


def fault_on_a_rank(y: Tensor) -> Tensor:
    """Fails where ranks run, not where the plan is made."""
    if rank() == 1:
        raise ArithmeticError("this rank cannot add")
    return y


def raising():
    """Raises on one rank."""
    return after(fault_on_a_rank)


def no_kernel(y: Tensor) -> Tensor:
    """Has no kernel where ranks run."""
    if dist.is_initialized():
        raise NotImplementedError("not on this device")
    return y


def neither():
    """Runs in no dtype."""
    return after(no_kernel)


def death_of_a_rank(y: Tensor) -> Tensor:
    """Dies where ranks run, as for lack of memory."""
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return y


def dying():
    """Dies on one rank."""
    return after(death_of_a_rank)


def waiting():
    """Never ends where ranks run."""

    def wait(y: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.distributed_c10d._get_default_store().wait(["never"], timedelta(1)) if rank() else signal.pause()
        return y

    return after(wait)
