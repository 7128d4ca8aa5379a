"""Random numbers while a forward is looked at: the same each time, and those that decide a path as one asks.

A forward in training may leave out a layer at random (LayerDrop, Fan et al. 2019; stochastic depth): it draws one
number and compares.  What is to be seen of such a model is the path with all its layers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

SEED = 0
ENDS = (1 - 2**-20, 2**-20)
"""Nearly the largest number drawn from [0, 1), and nearly the least: a layer is left out below a rate, or above one."""

DROPS = {
    "dropout": 2,
    "alpha_dropout": 2,
    "feature_dropout": 2,
    "feature_alpha_dropout": 2,
    "native_dropout": 2,
    "rrelu": 3,
}
"""Ops that draw while a flag is set -> the place of the flag; they are recorded with it and without."""

_UNIFORM = frozenset(["rand", "rand_like", "uniform_"])


class Decided(TorchFunctionMode):
    """Draws of one number from [0, 1) give ``value``."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _UNIFORM and isinstance(out, torch.Tensor) and out.numel() == 1:
            with torch.no_grad():
                out.fill_(self.value)
        return out


@contextmanager
def settled(value: float | None = None) -> Iterator[None]:
    """Draw from a fixed state, single numbers being ``value`` if given; the caller's generators stay as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(SEED)
        random.seed(SEED)
        numpy.random.seed(SEED)
        try:
            if value is None:
                yield
            else:
                with Decided(value):
                    yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


def is_random(op: str) -> bool:
    """Whether torch says that an op draws numbers, under its own name or that of its in-place form."""
    for name in (op, op.rstrip("_")):
        packet = getattr(torch.ops.aten, name, None)
        names = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
        if any(torch.Tag.nondeterministic_seeded in getattr(packet, n).tags for n in names):
            return True
    return op.rstrip("_") in DROPS
