"""Whether two captures of a module did the same: its ops and its children's calls, what they were given, what it gave.

Tensors are named by where they come from and integers by the sizes they were made of, so that captures of other
sizes, in another mode or dtype can be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tpconvert.analyze.capture.run import Call, Trace
from tpconvert.analyze.trace.provenance import Attribute, Expression, Int, reads_shape

Place = tuple[Any, tuple[Any, ...]]
"""Where a constant stands: the number of an op, and the path to it in ``(args, kwargs)``."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, by where it comes from."""

    source: str


@dataclass(frozen=True, slots=True)
class Size:
    """An integer made from sizes."""

    made: Any


class Written:
    """One call of a module: the names of its steps, and every leaf of what they and its caller are given."""

    def __init__(self, trace: Trace, call: Call, own: list[fx.Node | Call]) -> None:
        self.trace = trace
        self.steps: list[str] = []
        self.names = {node: f"input {slot}" for slot, node in call.inputs.items()}
        self.leaves: dict[Place, Any] = {("call", (slot,)): _plain(v) for slot, v in call.constants.items()}
        self.leaves |= {("call", (slot,)): Tensor(self.names[node]) for slot, node in call.inputs.items()}
        number = 0
        for i, step in enumerate(own):
            if isinstance(step, Call):
                self.steps.append(f"call of {step.module}")
                self.add(f"step {i}", step.arguments)
                self.names |= {node: f"step {i} {slot}" for slot, node in step.outputs.items()}
            else:
                self.steps.append(step.meta["op"])
                self.add(number, (step.args, dict(step.kwargs)))
                self.names[step] = f"step {i}"
                number += 1
        self.add("result", call.result)

    def add(self, place: Any, tree: Any, path: tuple[Any, ...] = ()) -> None:
        """The leaves of a tree."""
        if isinstance(tree, tuple | list):
            self.leaves[place, (*path, "len")] = len(tree)
            for i, item in enumerate(tree):
                self.add(place, item, (*path, i))
        elif isinstance(tree, Mapping):
            for key, item in tree.items():
                self.add(place, item, (*path, key))
        elif isinstance(tree, slice):
            for key in ("start", "stop", "step"):
                self.add(place, getattr(tree, key), (*path, key))
        else:
            self.leaves[place, path] = self.leaf(tree)

    def leaf(self, value: Any) -> Any:
        """A leaf, the same in every capture where it means the same."""
        if isinstance(value, fx.Node):
            return Tensor(self.source(value))
        if isinstance(value, Int) and reads_shape(value.expression):
            return Size(self.made(value.expression))
        return _plain(value)

    def source(self, node: fx.Node) -> str:
        """Where a tensor comes from."""
        return self.names.get(node) or (str(node.target) if node.op == "get_attr" else f"outside: {node.meta['op']}")

    def made(self, expr: Expression) -> Any:
        """An expression, without the objects of one capture."""
        if isinstance(expr, Attribute):
            held = getattr(self.trace.owners[expr.owner], expr.name)
            return expr.name, expr.item, int(held if expr.item is None else held[expr.item])
        if not isinstance(expr, tuple):
            return expr
        if expr[0] == "dim":
            return "size", self.source(expr[1]), expr[2]
        return expr[0].__name__, self.made(expr[1]), self.made(expr[2])


class Calls:
    """The calls of a capture, each written down when it is first asked for."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.known: dict[str, list[Written]] = {}
        self.steps = trace.steps()
        self.of_module: dict[str, list[Call]] = defaultdict(list)
        for call in trace.calls:
            self.of_module[call.module].append(call)

    def __getitem__(self, path: str) -> list[Written]:
        if path not in self.known:
            self.known[path] = [Written(self.trace, c, self.steps[c]) for c in self.of_module.get(path, ())]
        return self.known[path]


def constants_that_differ(mine: list[Written], theirs: list[Written]) -> dict[Place, Any] | None:
    """``(number of an op, path) -> the other value`` of ops' constants; None where anything else differs.

    Where the other capture called the module more often, the last call here stands for the rest.
    """
    if not mine or not theirs:
        return None
    out: dict[Place, Any] = {}
    for i, other in enumerate(theirs):
        one = mine[min(i, len(mine) - 1)]
        if one.steps != other.steps or one.leaves.keys() != other.leaves.keys():
            return None
        for place, value in one.leaves.items():
            if not _same(value, other.leaves[place]):
                number, path = place
                if not isinstance(number, int) or path[-1] == "len" or _is_made(value, other.leaves[place]):
                    return None
                out[place] = other.leaves[place]
    return out


def _plain(value: Any) -> Any:
    """A constant; an object, which no forward that is written anew may be given, by its kind."""
    if isinstance(value, Int):
        return int(value)
    known = int | float | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format
    return value if value is None or value is ... or isinstance(value, known) else f"<{type(value).__name__}>"


def _is_made(*values: Any) -> bool:
    return any(isinstance(v, Tensor | Size) for v in values)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a is b or bool(a == b) or (a != a and b != b))
