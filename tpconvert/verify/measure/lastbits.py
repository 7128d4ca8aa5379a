"""What was found, each value held to what rounding may do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.emulate.rounding import BITS, RUNS, rounding
from tpconvert.analyze.emulate.run import Difference, Emulation
from tpconvert.verify.result import Check, Tolerance

MARGIN = 16.0
"""How many times further than other last bits move a value it may be: long sums are added up in many other orders."""


def checked(emulation: Emulation, ax: Axes, tolerance: Tolerance) -> tuple[list[Check], str]:
    """A check for each value and gradient, and the first module where values part.

    The bound of one that exceeds it is measured, if it is a matter of rounding: what other last bits of the whole
    model's own parameters and sums do to it, with a margin.  For outputs and gradients there is a limit to that.
    """
    kinds = {"op": emulation.forward, "output": emulation.outputs, "gradient": emulation.gradients}
    bounds: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    apart = [(kind, d.error) for kind, found in kinds.items() for d in found if not d.error <= tolerance.bound]
    if apart and not _hopeless(apart, tolerance):
        for run in rounding(ax, tolerance.floor):
            for kind, found in (("op", run.forward), ("output", run.outputs), ("gradient", run.gradients)):
                for d in found:
                    moved = min(MARGIN * d.error, _limit(kind, tolerance))
                    bounds[kind][d.name] = max(bounds[kind].get(d.name, 0.0), moved)

    def bound(kind: str, d: Difference) -> float:
        return max(tolerance.bound, bounds[kind].get(d.name, 0.0))

    checks = []
    for kind, found in kinds.items():
        where = " in {}" if kind == "op" else ""
        checks += [
            Check(kind, d.name + where.format(d.module or "the model"), d.error, bound(kind, d), "eval") for d in found
        ]
    return checks, next((d.module for d in emulation.forward if not d.error <= bound("op", d)), "")


def measured(checks: Iterable[Check], bounds: Iterable[float]) -> tuple[str, ...]:
    """A note on how many checks exceed the bounds they had at first, and not the ones that were measured."""
    count = sum(c.equal and not c.error <= bound for c, bound in zip(checks, bounds, strict=True))
    what = "1 check is" if count == 1 else f"{count} checks are"
    return (f"{what} held to what other last bits of the whole model itself do to the value.",) if count else ()


LIMITED = ("output", "loss", "gradient")
UNLIMITED = ("op", "gradient norm", "after 2 steps")
"""What is measured.  An op's result may be rounding alone, and a step may take other last bits to another place."""


def _limit(kind: str, tolerance: Tolerance) -> float:
    """How wide a bound may become."""
    return float("inf") if kind in UNLIMITED else float(tolerance.bound**0.5)


def _hopeless(apart: list[tuple[str, float]], tolerance: Tolerance) -> bool:
    """Whether some error is beyond any bound, so that nothing is to be gained by measuring."""
    return any(kind not in LIMITED + UNLIMITED or not error <= _limit(kind, tolerance) for kind, error in apart)


def widened(checks: list[Check], tolerance: Tolerance, again: Callable[[int], list[Check]]) -> list[Check]:
    """The checks, the bound of one that exceeds it as measured, if it is a matter of rounding.

    ``again`` compares the whole model with itself with other last bits, drawn from a seed.
    """
    apart = [(c.kind, c.error) for c in checks if not c.equal]
    if not apart or _hopeless(apart, tolerance):
        return checks
    found: dict[tuple[str, str, str], float] = {}
    for seed in range(RUNS):
        for c in again(seed):
            key = (c.kind, c.name, c.mode)
            found[key] = max(found.get(key, 0.0), min(MARGIN * c.error, _limit(c.kind, tolerance)))
    return [c if c.equal else replace(c, bound=max(c.bound, found.get((c.kind, c.name, c.mode), 0.0))) for c in checks]


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
