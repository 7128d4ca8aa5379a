"""What a module's forward does differently in training: dropout rates and flags, or another path altogether.

A rewritten forward is a recorded one, so it must hold for training too.  The model is captured once more in train
mode and another dtype; a module whose own ops are the same both times may be rewritten.  Constants that differ become
a choice, dtypes that differ are read from the tensor they were read from.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from tpconvert.analyze.capture import Inputs, Trace, capture
from tpconvert.analyze.shadow import Shadow, needs_shadow
from tpconvert.errors import SourceError


class Training:
    """``path in training`` where a module may be rewritten; ``training[path]`` are its constants that differ."""

    def __init__(self, module: nn.Module, inputs: Inputs, trace: Trace) -> None:
        self.module, self.inputs, self.trace = module, inputs, trace
        self.found: dict[str, dict[Any, Any] | None] | None = None

    def __contains__(self, path: str) -> bool:
        return self.differences.get(path) is not None

    def __getitem__(self, path: str) -> dict[Any, Any]:
        return self.differences[path] or {}

    def get(self, path: str) -> dict[Any, Any]:
        """The constants of a module that differ; none where its ops differ."""
        return self.differences.get(path) or {}

    @property
    def differences(self) -> dict[str, dict[Any, Any] | None]:
        """Module path -> the constants that differ; None where the ops differ."""
        if self.found is None:
            self.found = self._compare()
        return self.found

    def _compare(self) -> dict[str, dict[Any, Any] | None]:
        from tpconvert.planning.make import eval_mode

        other = None
        for dtype in other_dtypes(self.module):
            module = copy.deepcopy(self.module).to(dtype)
            try:
                with eval_mode(module, training=True):
                    other = capture(module, cast(self.inputs, dtype), shadow=Shadow() if needs_shadow(module) else None)
                break
            except SourceError:
                continue
        if other is None:
            return {}
        mine, theirs = own_ops(self.trace), own_ops(other)
        out: dict[str, dict[Any, Any] | None] = {}
        for path, calls in mine.items():
            out[path] = {} if len(calls) == len(theirs.get(path, ())) else None
            for a, b in zip(calls, theirs.get(path, ()), strict=False):
                found = _difference(a, b)
                if found is None or out[path] is None:
                    out[path] = None
                else:
                    out[path] |= found  # type: ignore[operator]
        return out


def other_dtypes(module: nn.Module) -> list[torch.dtype]:
    """Dtypes that a forward seldom names by itself, so that those that follow the model's stand out."""
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return [d for d in (torch.float64, torch.bfloat16, torch.float16) if d is not own]


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """The floating tensors of example inputs in another dtype."""
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        return {k: cast(v, dtype) for k, v in tree.items()}
    return type(tree)(cast(v, dtype) for v in tree) if isinstance(tree, tuple | list) else tree


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
