"""What a verification found: plain data that travels between processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How large a relative error may be, and why."""

    bound: float
    reason: str
    floor: float = 0.0
    """A gradient below this part of the largest one is all rounding (a key's bias under softmax): it is held to the
    bound as if it were as large as that."""


FLOAT64 = Tolerance(
    1e-9,
    "float64: eps 2.2e-16 times the few thousand terms of a sum and the depth of the model, with a wide margin",
    floor=1e-6,
)
FLOAT32 = Tolerance(
    2e-3,
    "float32: eps 1.2e-7 times the terms of a sum and the depth; used where a kernel has no float64",
    floor=1e-3,
)
BFLOAT16 = Tolerance(
    6e-2,
    "bfloat16: eps 7.8e-3 times the square root of the roundings on the way through a few layers and back",
    floor=5e-2,
)
BYTES = Tolerance(0.0, "bytes: equal or not")
MARGIN = 16.0
"""How many times further than other last bits move a value it may be: long sums are added up in many other orders."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: the largest difference over the largest entry of the whole value."""

    kind: str
    """``output``, ``loss``, ``gradient``, ``gradient norm``, ``after 2 steps``, ``dropout rates``, ``replicas``,
    ``bytes``, ``op``, ``boundary``, ``edit``."""
    name: str
    error: float
    bound: float
    mode: str = ""
    """``eval``, ``train``, ``no grad``, ``other size``; or another way to call the model, ``with attention_mask``."""
    moved: float = 0.0
    """How far other last bits of the whole model itself move the value, where that was measured."""

    @property
    def equal(self) -> bool:
        """Whether it is within its bound; an error that is not a number is not."""
        return self.error <= self.bound

    @property
    def undecided(self) -> bool:
        """Whether it is beyond its bound, and no further than rounding alone takes it: neither proved nor disproved."""
        return not self.equal and self.error <= MARGIN * self.moved


@dataclass(frozen=True, slots=True)
class Result:
    """All checks of one verification."""

    checks: tuple[Check, ...]
    tolerance: Tolerance
    parted: str = ""
    """The first module, in order of execution, where the values part; empty when they do not."""
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every check holds, and there was at least one."""
        return bool(self.checks) and all(c.equal for c in self.checks)

    @property
    def undecided(self) -> bool:
        """Whether every check that does not hold is beyond what can be proved of this model with these inputs."""
        return not self.equal and bool(self.checks) and all(c.equal or c.undecided for c in self.checks)

    def worst(self, count: int | None = None) -> list[Check]:
        """The checks, those furthest beyond their bound first."""
        return sorted(self.checks, key=lambda c: (-_excess(c), c.kind, c.name))[:count]

    def verdict(self) -> str:
        """One sentence."""
        kinds: dict[str, int] = {}
        for c in self.checks:
            kinds[c.kind] = kinds.get(c.kind, 0) + 1
        said = ", ".join(f"{n} {_plural(k) if n > 1 else k}" for k, n in kinds.items())
        if self.equal:
            worst = self.worst(1)[0]
            return f"Equal: {said}; largest error {worst.error:.1e}, bound {worst.bound:.0e}."
        if not self.checks:
            return "Not verified: nothing was compared."
        bad = self.worst(1)[0]
        failing = sum(not c.equal for c in self.checks)
        where = f" Values first part in {self.parted}." if self.parted else ""
        found = f"worst {bad.kind} {bad.name}, error {bad.error:.1e}, bound {bad.bound:.0e}"
        if self.undecided:
            return (
                f"Not decided: {failing} of {len(self.checks)} checks ({said}) are beyond their bound, and no further "
                f"than last bits alone take the whole model from itself; {found}, by itself {bad.moved:.1e}.{where} "
                f"Verify with inputs that its norms have more to divide by: more examples, larger images."
            )
        return f"Not equal: {failing} of {len(self.checks)} checks ({said}); {found}.{where}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "equal": self.equal,
            "undecided": self.undecided,
            "verdict": self.verdict(),
            "bound": self.tolerance.bound,
            "bound_reason": self.tolerance.reason,
            "parted": self.parted,
            "notes": list(self.notes),
            "checks": [_check(c) for c in self.worst()],
        }


def _check(c: Check) -> dict[str, Any]:
    """One check; JSON has no infinity, so an error that is none, or no number, is null."""
    error = c.error if math.isfinite(c.error) else None
    return {"kind": c.kind, "mode": c.mode, "name": c.name, "error": error, "bound": c.bound, "equal": c.equal}


def _plural(kind: str) -> str:
    if kind == "boundary":
        return "boundaries"
    return f"{kind}es" if kind.endswith("ss") else kind if kind.endswith("s") else f"{kind}s"


def _excess(check: Check) -> float:
    if check.error != check.error:  # not a number
        return float("inf")
    return check.error / check.bound if check.bound else check.error * 1e300
