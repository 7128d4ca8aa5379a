"""What a module's forward does differently in training or at other sizes: constants, or another path altogether.

A rewritten forward is a recorded one, so it must hold for later calls too.  The model is captured once more in train
mode, in train mode and another dtype, and at other sizes of the inputs; a module that does the same each time may be
rewritten.  Constants that differ in train mode become a choice, dtypes that differ are read from the tensor they were
read from, limits of dtypes from the tensor they go with; any other constant that moves with the dtype is another path.
Each capture is made when it is first asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from tpconvert.analyze.axes.run import Axes, tensors
from tpconvert.analyze.axes.terms import Term, find, leaves
from tpconvert.analyze.capture.run import Inputs, Trace, capture
from tpconvert.analyze.rewrite.spelling import Limit
from tpconvert.analyze.trace.call import Turn
from tpconvert.analyze.trace.copies import copied
from tpconvert.analyze.trace.draws import DROPS, ENDS
from tpconvert.analyze.trace.trees import floats_as
from tpconvert.analyze.watch.shadow import Shadow, needs_shadow
from tpconvert.errors import SourceError
from tpconvert.planning.calls.sizes import OtherSizes
from tpconvert.planning.proof.compare import Calls, Place, constants_that_differ

NORMS = frozenset(["batch_norm", "instance_norm"])
"""Ops with a flag for training; their rule holds with the flag and without."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Differences = dict[str, dict[Any, Any] | None]
"""Module path -> the constants that differ between two captures; None where the ops do."""


class Training:
    """What later calls do otherwise than the captured ones."""

    def __init__(self, module: nn.Module, inputs: Inputs, ax: Axes, known: Training | None = None) -> None:
        self.module, self.inputs, self.ax, self.trace = module, inputs, ax, ax.trace
        self.failure = ""
        """Why the forward could not be run in train mode."""
        if known is not None:  # what was captured for other axes of the same trace
            kept = ("failure", "other", "differences", "calls", "trained")
            self.__dict__ |= {k: v for k, v in known.__dict__.items() if k in kept}

    def elsewhere(self) -> list[str]:
        """Modules whose forward takes another path in training."""
        if self.other is None:
            return []
        ops = own_ops(self.trace)
        mine, theirs = _floating(ops), _floating(own_ops(self.other))
        wiring, other_wiring = children(self.trace), children(self.other)
        return [
            path
            for path in self.differences
            if not path.startswith("?")
            and (
                mine.get(path) != theirs.get(path)
                or wiring.get(path) != other_wiring.get(path)
                or _other_numbers(ops[path], self.get(path))
            )
        ]

    def get(self, path: str) -> dict[Any, Any]:
        """The constants of a module that differ in training; none where its ops differ."""
        return self.differences.get(path) or {}

    def refusal(self, path: str) -> str:
        """Why the forward of a module cannot be written from its recorded ops; empty where it can."""
        mine = self.calls[path]
        for other, where in zip(self.trained, ("training", "another dtype"), strict=True):
            if other is None or len(other[path]) != len(mine) or constants_that_differ(mine, other[path]) is None:
                return f"it takes another path in {where}"
        if None in self.by_dtype(path).values():
            return "it takes another path in another dtype"
        for other in self.resized[0]:
            if constants_that_differ(mine, other[path]) != {}:
                return "it does something else at another size of the inputs"
        return ""

    def constants(self, path: str) -> dict[Place, Any]:
        """The constants of a module that differ in training or move with the dtype, where it may be rewritten."""
        trained, _ = self.trained
        assert trained is not None
        return (constants_that_differ(self.calls[path], trained[path]) or {}) | self.by_dtype(path)

    def by_dtype(self, path: str) -> dict[Place, Any]:
        """The constants of a module that are others in another dtype: that dtype, the limit they are, or None."""
        trained, moved = self.trained
        assert trained is not None and moved is not None
        mine, theirs = trained[path], moved[path]
        known = {place: value for call in mine for place, value in call.leaves.items()}
        return {
            place: other if isinstance(other, torch.dtype) else limit(known[place], other)
            for place, other in (constants_that_differ(mine, theirs) or {}).items()
        }

    @property
    def fixed(self) -> set[Term]:
        """Dims of the inputs, and their atoms, at no other sizes of which a capture could be made."""
        return self.resized[1].union(*(leaves(t) for t in self.resized[1]))

    # -- captures -----------------------------------------------------------------------------------------

    @cached_property
    def other(self) -> Trace | None:
        """In train mode; None where the forward fails.

        Where layers are left out at random, the path that has most of them stands for all: a layer that is not called
        asks for nothing.
        """
        found = self.captured(self.inputs, training=True)
        called = {c.module for c in self.trace.calls}
        for drawn in ENDS:
            if not isinstance(found, Trace) or called <= {c.module for c in found.calls}:
                break
            again = self.captured(self.inputs, training=True, drawn=drawn)
            if isinstance(again, Trace) and len(again.calls) > len(found.calls):
                found = again
        self.failure = "" if isinstance(found, Trace) else found
        return found if isinstance(found, Trace) else None

    @cached_property
    def differences(self) -> Differences:
        """What differs in train mode."""
        return compared(self.trace, self.other) if self.other is not None else {}

    @cached_property
    def calls(self) -> Calls:
        """The calls of the captured forward."""
        return Calls(self.trace)

    @cached_property
    def trained(self) -> list[Calls | None]:
        """Those in train mode, and in train mode and another dtype, so that the dtypes that follow the model's show."""
        last: Trace | str = ""
        for dtype in other_dtypes(self.module):
            drawn = None if self.other is None else self.other.drawn
            last = self.captured(floats_as(self.inputs, dtype), training=True, dtype=dtype, drawn=drawn)
            if isinstance(last, Trace):
                break
        return [Calls(t) if isinstance(t, Trace) else None for t in (self.other, last)]

    @cached_property
    def resized(self) -> tuple[list[Calls], set[Term]]:
        """Those at other sizes, and the sizes that could not be changed."""
        others = OtherSizes(self.ax, self.inputs)
        found, left = [], {find(t) for t in others.free.values()}
        for inputs, changed in others:
            trace = self.captured(inputs, training=False) if changed & left else ""
            if isinstance(trace, Trace):
                found.append(Calls(trace))
                left -= changed
        return found, left

    def captured(
        self,
        inputs: Inputs,
        training: bool,
        dtype: torch.dtype | None = None,
        drawn: float | None = None,
        turned: Set[Turn] = frozenset(),
        most: int | None = None,
    ) -> Trace | str:
        """A capture of a copy, or why the forward fails."""
        from tpconvert.planning.make import eval_mode

        module = copied(self.module).to(dtype)  # of a copy: running statistics move, and other things a forward keeps
        try:
            with eval_mode(module, training=training):
                shadow = Shadow() if needs_shadow(module) else None
                rules, apart = self.trace.rules, self.trace.apart
                return capture(
                    module, inputs, shadow=shadow, rules=rules, drawn=drawn, apart=apart, turned=turned, most=most
                )
        except SourceError as error:
            return error.message


def limit(value: Any, other: Any) -> Limit | None:
    """What a number is of its dtype, which is another number of another dtype; None where it is nothing known."""
    if not isinstance(value, int | float) or not isinstance(other, int | float):
        return None
    for name in ("min", "max", "eps", "tiny"):
        if {value, other} <= {getattr(torch.finfo(dtype), name) for dtype in FLOATS}:
            return Limit(name)
    return None


def _other_numbers(calls: list[list[fx.Node]], differing: dict[Any, Any]) -> bool:
    """Whether ops are given other constants in training, rates of dropout and flags of norms aside."""
    for number, at in differing:
        ops = {call[number].meta["op"] for call in calls if number < len(call)}
        rate = ops == {"scaled_dot_product_attention"} and at in ((1, "dropout_p"), (0, 4))
        if not rate and not {op.rstrip("_") for op in ops} <= DROPS.keys() | NORMS:
            return True
    return False


def _floating(ops: dict[str, list[list[fx.Node]]]) -> dict[str, list[list[str]]]:
    """The names of the ops that give floating values: a counter of batches is no other path."""
    return {p: [[n.meta["op"] for n in call if _is_floating(n)] for call in calls] for p, calls in ops.items()}


def _is_floating(node: fx.Node) -> bool:
    return any(t.is_floating_point() for t in tensors(node.meta["val"]))


def compared(trace: Trace, other: Trace) -> Differences:
    """What differs between two captures of one module."""
    mine, theirs = own_ops(trace), own_ops(other)
    wiring, other_wiring = children(trace), children(other)
    out: Differences = {}
    for path, calls in mine.items():
        same = len(calls) == len(theirs.get(path, ())) and wiring.get(path) == other_wiring.get(path)
        found = [_difference(a, b) for a, b in zip(calls, theirs.get(path, ()), strict=False)]
        out[path] = {k: v for f in found for k, v in f.items()} if same and None not in found else None  # type: ignore[union-attr]
    return out


def other_dtypes(module: nn.Module) -> list[torch.dtype]:
    """Dtypes that a forward seldom names by itself, so that those that follow the model's stand out."""
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return [d for d in (torch.float64, torch.bfloat16, torch.float16) if d is not own]


def children(trace: Trace) -> dict[str, list[str]]:
    """Module path -> the children its calls call, in order."""
    out: dict[str, list[str]] = defaultdict(list)
    for call in trace.calls:
        if call.parent is not None:
            out[call.parent.module].append(call.module)
    return out


def own_ops(trace: Trace) -> dict[str, list[list[fx.Node]]]:
    """Module path -> for each call, the ops of its own forward."""
    by_call: dict[Any, list[fx.Node]] = {call: [] for call in trace.calls}
    for node in trace.nodes:
        if node.op == "call_function" and node.meta["call"] is not None:
            by_call[node.meta["call"]].append(node)
    out: dict[str, list[list[fx.Node]]] = defaultdict(list)
    for call, nodes in by_call.items():
        out[call.module].append(nodes)
    return out


def _difference(a: list[fx.Node], b: list[fx.Node]) -> dict[Any, Any] | None:
    if [n.meta["op"] for n in a] != [n.meta["op"] for n in b]:
        return None
    out: dict[Any, Any] = {}
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        mine, theirs = constants((x.args, dict(x.kwargs))), constants((y.args, dict(y.kwargs)))
        if mine.keys() != theirs.keys():
            return None
        out |= {(number, path): theirs[path] for path in mine if mine[path] != theirs[path]}
    return out


def constants(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """The leaves of arguments that are no tensors, by path."""
    if isinstance(tree, fx.Node):
        return {}
    if isinstance(tree, tuple | list):
        return {k: v for i, t in enumerate(tree) for k, v in constants(t, (*path, i)).items()}
    if isinstance(tree, dict):
        return {k: v for i, t in tree.items() for k, v in constants(t, (*path, i)).items()}
    if isinstance(tree, slice):
        return {k: v for i in ("start", "stop", "step") for k, v in constants(getattr(tree, i), (*path, i)).items()}
    return {path: tree}
