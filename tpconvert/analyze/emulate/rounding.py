"""How far rounding alone moves each value and gradient of a model: the whole model once more, with other last bits.

Ranks add up in another order than the whole model does.  Where a value hangs on the last bits of what it is computed
from (a difference of equal numbers, a gradient through a nearly flat step) they part for that alone, by as much as the
whole model parts from itself when the last bits of its parameters, and of every sum in it, are others.  So that is
measured, as Monte Carlo arithmetic does (Parker, 1997), rather than allowed for everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpconvert.analyze.axes.dealing import Deal
from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.emulate.run import Emulation, Lockstep
from tpconvert.analyze.flow.run import trace_flow

RUNS = 3
BITS = 2.0
"""How many units in the last place a value is moved by, at most."""


def rounding(ax: Axes, floor: float) -> list[Emulation]:
    """What some runs with other last bits find, each held to the recorded one as ranks are; the trace holds values."""
    flow = trace_flow(ax, ())
    return [_Jittered(ax, flow, torch.Generator().manual_seed(seed), floor).run(0) for seed in range(RUNS)]


class _Jittered(Lockstep):
    """One rank that has the whole model."""

    def __init__(self, ax: Axes, flow: Any, generator: torch.Generator, floor: float) -> None:
        super().__init__(flow, Deal(1, {}), floor=floor)
        self.generator = generator
        self.sums = {node for _, node in ax.contracts}

    def start(self, node: fx.Node) -> None:
        """Parameters and inputs with other last bits."""
        super().start(node)
        self.env[node] = [self.moved(v) for v in self.env[node]]

    def call(self, node: fx.Node, rank: int) -> Any:
        """Sums with other last bits."""
        out = super().call(node, rank)
        return self.moved(out) if node in self.sums and isinstance(out, torch.Tensor) and out._base is None else out

    def moved(self, value: torch.Tensor) -> torch.Tensor:
        """The value with other last bits, and so its gradient."""
        if value.dtype not in (torch.float64, torch.float32):
            return value
        by = BITS * torch.finfo(value.dtype).eps
        forward, backward = (
            1 + by * (2 * torch.rand(value.shape, generator=self.generator, dtype=value.dtype) - 1) for _ in range(2)
        )
        moved: torch.Tensor = _Moved.apply(value, forward, backward)  # type: ignore[no-untyped-call]
        return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, forward: torch.Tensor, backward: torch.Tensor) -> torch.Tensor:
        ctx.by = backward
        return value * forward

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad if grad.is_sparse else grad * ctx.by, None, None
