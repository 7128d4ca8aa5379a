"""The collectives at module inputs and outputs, as forward hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.errors import PlanError
from tpconvert.parallel.calls.slots import Slot, input_slots, output_slots, replaced_input, replaced_output
from tpconvert.parallel.comm.collectives import (
    Parts,
    copy,
    copy_own,
    copy_span,
    gather,
    gather_slices,
    once,
    parts_of,
    reduce,
    reduce_scatter,
    scatter,
    scatter_slices,
    single,
)
from tpconvert.parallel.comm.mesh import Mesh
from tpconvert.parallel.layers.products import gathered_from
from tpconvert.parallel.layers.reads import become
from tpconvert.spec.plan import Boundary, Slices

SLICES: dict[str, Callable[[Tensor, Any, Mesh, bool], Tensor]] = {
    "all_gather": gathered_from,
    "reduce_scatter": reduce_scatter,
    "gather": gather_slices,
    "scatter": scatter_slices,
}
"""Of a tensor, a dim, a mesh, and whether the slices are of rows."""

TERMS: dict[str, Callable[[Tensor, Mesh], Tensor]] = {"reduce": reduce, "once": once, "single": single}
"""Of a tensor and a mesh."""


@dataclass(eq=False)
class Rows:
    """How many sequences are in the values that the root's current forward slices, by how many tokens these have.

    A value for all sequences (positions, say, that were planned as each one's own) would meet rows of other tokens.
    """

    sequences: dict[int, int] = field(default_factory=dict)
    running: bool = False

    def begin(self, module: nn.Module, args: Any) -> None:
        """Hook: the root's forward begins."""
        self.sequences.clear()
        self.running = True

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook: the root's forward is over."""
        self.running = False

    def meet(self, x: Tensor, boundary: Boundary) -> None:
        """Raise PlanError where one value has a single sequence for several of another."""
        if not self.running or torch.compiler.is_compiling():
            return
        assert boundary.dim is not None
        count = math.prod(x.shape[: boundary.dim])
        known = self.sequences.setdefault(x.shape[boundary.dim], count)
        if known != count and 1 in (known, count):
            raise PlanError(
                f"{boundary.module or 'the model'}: {max(known, count)} sequences meet a value that is for all of them "
                f"({list(x.shape)}), where the model was planned with one for each.",
                hint="Plan it with inputs like these, or convert it without sequence_parallel.",
            )


@dataclass(frozen=True)
class Crossing:
    """A boundary with what its collective needs."""

    boundary: Boundary
    mesh: Mesh
    parts: Parts | None
    slots: tuple[Slot, ...]
    rows: Rows | None = None
    """Where slices are runs of rows of all sequences (:attr:`tpconvert.spec.plan.Slices.rows`)."""
    sequences: bool = False
    """Slices are whole sequences (:attr:`tpconvert.spec.plan.Slices.sequences`)."""

    def __call__(self, x: Tensor) -> Tensor:
        """The tensor on the other side."""
        kind, span = self.boundary.kind, self.boundary.span
        if kind == "copy":
            if span is not None:
                return copy_span(x, self.boundary.dim, span, self.mesh)
            return copy_own(x, self.mesh) if self.boundary.side == "output" else copy(x, self.mesh)
        if kind in TERMS:
            return TERMS[kind](x, self.mesh)
        if self.parts is None:
            if kind == "scatter" and self.rows is not None:
                self.rows.meet(x, self.boundary)
            if "scatter" in kind and self.sequences:
                check_batch(x.shape[self.boundary.dim], self.mesh)
            return SLICES[kind](x, self.boundary.dim, self.mesh, self.rows is not None)
        return gather(x, self.parts, self.mesh) if kind == "gather" else scatter(x, self.parts, self.mesh)


@dataclass(eq=False)
class Calls:
    """How often each module was called in the root's current forward, as far as collectives differ between calls."""

    planned: dict[str, int] = field(default_factory=dict)
    """How often each was called when it was planned; 1 where that is not known."""
    counts: dict[str, int] = field(default_factory=dict)
    running: bool = False

    def begin(self, module: nn.Module, args: Any) -> None:
        """Hook: the root's forward begins."""
        self.counts.clear()
        self.running = True

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook: the root's forward is over.  Another number of calls may have got the collectives of others."""
        self.running = False
        if output is None:  # the forward failed, and its own error counts
            return
        for path, planned in self.planned.items():
            made = self.counts.get(path, 0)
            if made and planned > 1 and made != planned:
                raise PlanError(
                    f"{path} was planned with {planned} calls in one forward and different collectives in them; "
                    f"this forward made {made}.",
                    hint=f"Plan again with inputs for which it makes {made}, or with --set '{path}=whole'.",
                )


@dataclass(eq=False)
class Selection:
    """Which crossings belong to the current call of one module."""

    path: str
    crossings: tuple[Crossing, ...]
    calls: Calls
    index: int = 0
    numbered: bool = False
    """Whether any of them is for some of the calls only."""

    def count(self, module: nn.Module, args: Any) -> None:
        """Hook: one more call.  A call outside the root's forward is a recomputation (activation checkpointing)."""
        seen = self.calls.counts.get(self.path, 0)
        if self.calls.running:
            self.index, self.calls.counts[self.path] = seen, seen + 1
            return
        calls = max(seen, self.calls.planned[self.path])
        if any(self.at(i) != self.at(0) for i in range(1, calls)):
            raise PlanError(
                f"{self.path} is called {calls} times in one forward, with different collectives, "
                "so a call outside the forward cannot be placed.",
                hint="Do not use activation checkpointing around it.",
            )
        self.index = 0

    def at(self, index: int) -> list[tuple[Any, ...]]:
        """What the crossings of one call do."""
        chosen = (c.boundary for c in self.crossings if c.boundary.call in (-1, index))
        return [(b.kind, b.side, b.slots, b.dim, b.blocks, b.span) for b in chosen]

    def now(self, crossings: tuple[Crossing, ...]) -> Sequence[Crossing]:
        """Those of ``crossings`` that belong to the current call."""
        if not self.numbered:
            return crossings
        return [c for c in crossings if c.boundary.call in (-1, self.index)]


@dataclass(eq=False)
class AtInput:
    """Hook: the collectives at a module's input."""

    selection: Selection
    crossings: tuple[Crossing, ...]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments with each crossing made."""
        for crossing in self.selection.now(self.crossings):
            args, kwargs = replaced_input(args, kwargs, crossing.slots, crossing)
        return args, kwargs


@dataclass(eq=False)
class AtOutput:
    """Hook: the collectives at a module's output."""

    selection: Selection
    crossings: tuple[Crossing, ...]

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The output with each crossing made."""
        for crossing in self.selection.now(self.crossings):
            output = replaced_output(output, crossing.slots, crossing)
        return output


@dataclass(eq=False)
class Direct:
    """Forward of a root with boundaries: asked for by itself, it is a call, since the collectives are hooks of that."""

    inner: Callable[..., Any] | None
    """The forward that the plan gives the root, where it gives one."""
    called: bool = False

    def enter(self, module: nn.Module, args: Any) -> None:
        """Hook: a call begins."""
        self.called = True

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the root returns."""
        if not self.called:
            return module(*args, **kwargs)
        self.called = False
        if self.inner is not None:
            return self.inner(module, args, kwargs)
        return module._tp_base.forward(module, *args, **kwargs)


def _made_whole_first(crossing: Crossing) -> int:
    """What a module returns is put together, then copied, then taken in slices, whichever calls each is for."""
    return {"copy": 1, "all_gather": 1, "scatter": 2}.get(crossing.boundary.kind, 0)


def check_batch(size: int, mesh: Mesh) -> None:
    """Raise PlanError where ranks cannot have equally many sequences of a batch."""
    if size % mesh.degree and not mesh.dry:
        raise PlanError(
            f"A batch of {size} cannot be shared equally by {mesh.degree} ranks "
            f"({size} % {mesh.degree} is {size % mesh.degree}).",
            hint=f"Use a multiple of {mesh.degree}, or convert without sequence_parallel.",
        )


@dataclass(eq=False)
class Common:
    """Hook: inputs that were one for all sequences are that again, or a slice would meet one of another sequence."""

    slots: tuple[Slot, ...]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Raise PlanError where one is for each."""
        for slot in self.slots:
            replaced_input(args, kwargs, (replace(slot, optional=True),), partial(self.check, slot))

    def check(self, slot: Slot, x: Tensor) -> Tensor:
        """The tensor, which is left as it is."""
        if x.dim() and len(x) != 1:
            raise PlanError(
                f"{slot.text!r} was one for all sequences and is {len(x)} now, where ranks share out whole sequences.",
                hint="Plan it with inputs like these, or convert it without sequence_parallel.",
            )
        return x


def crossing(
    boundary: Boundary, mesh: Mesh, slices: Slices, slots: tuple[Slot, ...] = (), rows: Rows | None = None
) -> Crossing:
    """A boundary of a plan with such ``slices``; ``rows`` is what the root knows of them."""
    parts = parts_of(boundary.dim, boundary.blocks, mesh) if boundary.blocks else None
    return Crossing(boundary, mesh, parts, slots, (rows or Rows()) if slices.rows else None, slices.sequences)


def add_boundaries(root: nn.Module, boundaries: Iterable[Boundary], mesh: Mesh, slices: Slices) -> None:
    """Hook each boundary to its module: inside the user's output hooks, after the user's input hooks."""
    of_module: dict[str, list[Crossing]] = {}
    rows = Rows() if slices.rows else None
    for b in boundaries:
        where = b.module or "the root module"
        slots = (
            input_slots(root.get_submodule(b.module), b.slots, where)
            if b.side == "input"
            else output_slots(b.slots, where)
        )
        of_module.setdefault(b.module, []).append(crossing(b, mesh, slices, slots, rows))
    calls = Calls()
    for path, crossings in of_module.items():
        module = root.get_submodule(path)
        selection = Selection(path, tuple(crossings), calls)
        if numbered := [c.boundary.calls for c in crossings if c.boundary.call >= 0]:
            calls.planned[path], selection.numbered = max(numbered), True
            module.register_forward_pre_hook(selection.count)
        if at_input := tuple(c for c in crossings if c.boundary.side == "input"):
            module.register_forward_pre_hook(AtInput(selection, at_input), with_kwargs=True)
        if at_output := tuple(sorted((c for c in crossings if c.boundary.side == "output"), key=_made_whole_first)):
            module.register_forward_hook(AtOutput(selection, at_output), prepend=True)
    if "" in of_module:
        direct = Direct(vars(root).get("_tp_forward"))
        become(root, forward=direct)
        root.register_forward_pre_hook(direct.enter)
    if calls.planned:
        root.register_forward_pre_hook(calls.begin, prepend=True)
        root.register_forward_hook(calls.end, always_call=True)
    if slices.common:
        slots = input_slots(root, slices.common, "the root module")
        root.register_forward_pre_hook(Common(slots), prepend=True, with_kwargs=True)
    if rows is not None and any(c.boundary.kind == "scatter" for crossings in of_module.values() for c in crossings):
        root.register_forward_pre_hook(rows.begin, prepend=True)
        root.register_forward_hook(rows.end, always_call=True)
