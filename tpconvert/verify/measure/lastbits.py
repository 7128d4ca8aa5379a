"""What was found, each value held to what rounding may do to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.emulate.rounding import BITS, RUNS, rounding
from tpconvert.analyze.emulate.run import Emulation
from tpconvert.verify.result import MARGIN, Check, Tolerance


def checked(emulation: Emulation, ax: Axes, tolerance: Tolerance) -> tuple[list[Check], str]:
    """A check for each value and gradient, and the first module where values part.

    The bound of one that exceeds it is measured, if it is a matter of rounding: what other last bits of the whole
    model's own parameters and sums do to it, with a margin.  For outputs and gradients there is a limit to that.
    """
    kinds = {"op": emulation.forward, "output": emulation.outputs, "gradient": emulation.gradients}
    where = {"op": " in {}"}
    checks = [
        (d, Check(kind, d.name + where.get(kind, "").format(d.module or "the model"), d.error, tolerance.bound, "eval"))
        for kind, found in kinds.items()
        for d in found
    ]
    moved: dict[tuple[str, str], float] = {}
    if _worth_measuring([c for _, c in checks], tolerance):
        for run in rounding(ax, tolerance.floor):
            for kind, found in (("op", run.forward), ("output", run.outputs), ("gradient", run.gradients)):
                for d in found:
                    moved[kind, d.name] = max(moved.get((kind, d.name), 0.0), d.error)
    held = [(d, _held(c, moved.get((c.kind, d.name), 0.0), tolerance)) for d, c in checks]
    parted = next((d.module for d, c in held if c.kind == "op" and not c.equal), "")
    return [c for _, c in held], parted


def measured(checks: Iterable[Check], bounds: Iterable[float]) -> tuple[str, ...]:
    """A note on how many checks exceed the bounds they had at first, and not the ones that were measured."""
    count = sum(c.equal and not c.error <= bound for c, bound in zip(checks, bounds, strict=True))
    what = "1 check is" if count == 1 else f"{count} checks are"
    return (f"{what} held to what other last bits of the whole model itself do to the value.",) if count else ()


LIMITED = ("output", "loss", "gradient")
UNLIMITED = ("op", "gradient norm", "after 2 steps")
"""What is measured.  An op's result may be rounding alone, and a step may take other last bits to another place."""


def _held(check: Check, moved: float, tolerance: Tolerance) -> Check:
    """The check, held to what was measured if that is wider, up to a limit."""
    most = math.inf if check.kind in UNLIMITED else tolerance.bound**0.5
    return replace(check, bound=max(check.bound, min(MARGIN * moved, most)), moved=moved)


def _worth_measuring(checks: list[Check], tolerance: Tolerance) -> bool:
    """Whether some check exceeds its bound, and none by more than rounding may be the cause of."""
    most = dict.fromkeys(LIMITED, tolerance.bound**0.25) | dict.fromkeys(UNLIMITED, math.inf)
    apart = [c for c in checks if not c.equal]
    return bool(apart) and all(c.error <= most.get(c.kind, 0.0) for c in apart)


def widened(checks: list[Check], tolerance: Tolerance, again: Callable[[int], list[Check]]) -> list[Check]:
    """The checks, the bound of one that exceeds it as measured, if it is a matter of rounding.

    ``again`` compares the whole model with itself with other last bits, drawn from a seed.
    """
    if not _worth_measuring(checks, tolerance):
        return checks
    moved: dict[tuple[str, str, str], float] = {}
    for seed in range(RUNS):
        for c in again(seed):
            key = (c.kind, c.name, c.mode)
            moved[key] = max(moved.get(key, 0.0), c.error)
    return [c if c.equal else _held(c, moved.get((c.kind, c.name, c.mode), 0.0), tolerance) for c in checks]


def nudge(module: nn.Module, seed: int) -> None:
    """Give every parameter other last bits."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            if p.is_floating_point():
                generator = torch.Generator().manual_seed(seed * 1_000_003 + i)
                noise = 2 * torch.rand(p.shape, generator=generator, dtype=torch.float64) - 1
                p.mul_((1 + BITS * torch.finfo(p.dtype).eps * noise).to(p))


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """What parameters and buffers hold, kept where there is room."""
    return {name: tensor.cpu().clone() for name, tensor in _stored(module)}


def restore(module: nn.Module, held: dict[str, torch.Tensor]) -> None:
    """Put it back."""
    for name, tensor in _stored(module):
        tensor.copy_(held[name])


def _stored(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for named in (module.named_parameters, module.named_buffers):
        yield from ((name, tensor.detach()) for name, tensor in named())
