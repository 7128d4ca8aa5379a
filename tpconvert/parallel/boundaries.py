"""The collectives at module inputs and outputs, as forward hooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tpconvert.errors import PlanError
from tpconvert.parallel.collectives import Parts, copy, copy_own, copy_span, gather, parts_of, reduce, scatter
from tpconvert.parallel.mesh import Mesh
from tpconvert.parallel.slots import positional_names, replaced_input, replaced_output
from tpconvert.spec.plan import Boundary


@dataclass(frozen=True)
class Crossing:
    """A boundary with what its collective needs."""

    boundary: Boundary
    mesh: Mesh
    parts: Parts | None

    def __call__(self, x: Tensor) -> Tensor:
        """The tensor on the other side."""
        kind, span = self.boundary.kind, self.boundary.span
        if kind == "copy":
            if span is not None:
                return copy_span(x, self.boundary.dim, span, self.mesh)
            return copy_own(x, self.mesh) if self.boundary.side == "output" else copy(x, self.mesh)
        if kind == "reduce":
            return reduce(x, self.mesh)
        return gather(x, self.parts, self.mesh) if kind == "gather" else scatter(x, self.parts, self.mesh)


@dataclass(eq=False)
class Calls:
    """How often each module was called in the root's current forward."""

    counts: dict[str, int] = field(default_factory=dict)
    running: bool = False

    def begin(self, module: nn.Module, args: Any) -> None:
        """Hook: the root's forward begins."""
        self.counts.clear()
        self.running = True

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook: the root's forward is over."""
        self.running = False


@dataclass(eq=False)
class Selection:
    """Which crossings belong to the current call of one module."""

    path: str
    crossings: tuple[Crossing, ...]
    calls: Calls
    index: int = 0

    def count(self, module: nn.Module, args: Any) -> None:
        """Hook: one more call.  A call outside the root's forward is a recomputation (activation checkpointing)."""
        seen = self.calls.counts.get(self.path, 0)
        if self.calls.running:
            self.index, self.calls.counts[self.path] = seen, seen + 1
        elif seen > 1 and any(self.at(i) != self.at(0) for i in range(1, seen)):
            raise PlanError(
                f"{self.path} is called {seen} times in one forward, with different collectives, "
                "so a call outside the forward cannot be placed.",
                hint="Do not use activation checkpointing around it.",
            )
        else:
            self.index = 0

    def at(self, index: int) -> list[tuple[Any, ...]]:
        """What the crossings of one call do."""
        chosen = (c.boundary for c in self.crossings if c.boundary.call in (-1, index))
        return [(b.kind, b.side, b.slots, b.dim, b.blocks, b.span) for b in chosen]

    def now(self, side: str) -> list[Crossing]:
        """The crossings of the current call on one side."""
        return [c for c in self.crossings if c.boundary.side == side and c.boundary.call in (-1, self.index)]


@dataclass(eq=False)
class AtInput:
    """Hook: the collectives at a module's input."""

    selection: Selection
    names: tuple[tuple[str, bool], ...]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments with each crossing made."""
        for crossing in self.selection.now("input"):
            args, kwargs = replaced_input(
                args, kwargs, crossing.boundary.slots, self.names, crossing, self.selection.path or "the root module"
            )
        return args, kwargs


@dataclass(eq=False)
class AtOutput:
    """Hook: the collectives at a module's output."""

    selection: Selection

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The output with each crossing made."""
        for crossing in self.selection.now("output"):
            output = replaced_output(
                output, crossing.boundary.slots, crossing, self.selection.path or "the root module"
            )
        return output


def add_boundaries(root: nn.Module, boundaries: Iterable[Boundary], mesh: Mesh) -> None:
    """Hook each boundary to its module: inside the user's output hooks, after the user's input hooks."""
    of_module: dict[str, list[Crossing]] = {}
    for b in boundaries:
        parts = parts_of(b.dim, b.blocks, mesh) if b.kind in ("gather", "scatter") else None
        of_module.setdefault(b.module, []).append(Crossing(b, mesh, parts))
    calls = Calls()
    for path, crossings in of_module.items():
        module = root.get_submodule(path)
        selection = Selection(path, tuple(crossings), calls)
        if any(c.boundary.call >= 0 for c in crossings):
            module.register_forward_pre_hook(selection.count)
        if any(c.boundary.side == "input" for c in crossings):
            module.register_forward_pre_hook(AtInput(selection, positional_names(module)), with_kwargs=True)
        if any(c.boundary.side == "output" for c in crossings):
            module.register_forward_hook(AtOutput(selection), prepend=True)
    if any(c.boundary.call >= 0 for crossings in of_module.values() for c in crossings):
        root.register_forward_pre_hook(calls.begin, prepend=True)
        root.register_forward_hook(calls.end)
