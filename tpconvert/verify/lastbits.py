"""What a lockstep run found, each value held to what rounding may do to it."""

from __future__ import annotations

from tpconvert.analyze.axes import Axes
from tpconvert.analyze.emulate import Difference, Emulation
from tpconvert.analyze.rounding import rounding
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
    if not all(d.error <= tolerance.bound for found in kinds.values() for d in found):
        for run in rounding(ax, tolerance.floor):
            for kind, found in (("op", run.forward), ("output", run.outputs), ("gradient", run.gradients)):
                limit = float("inf") if kind == "op" else tolerance.bound**0.5
                for d in found:
                    bounds[kind][d.name] = max(bounds[kind].get(d.name, 0.0), min(MARGIN * d.error, limit))

    def bound(kind: str, d: Difference) -> float:
        return max(tolerance.bound, bounds[kind].get(d.name, 0.0))

    checks = []
    for kind, found in kinds.items():
        where = " in {}" if kind == "op" else ""
        checks += [
            Check(kind, d.name + where.format(d.module or "the model"), d.error, bound(kind, d), "eval") for d in found
        ]
    return checks, next((d.module for d in emulation.forward if not d.error <= bound("op", d)), "")
