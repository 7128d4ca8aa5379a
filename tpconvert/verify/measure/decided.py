"""Decisions between values that are equal but for rounding, taken by the converted model as the whole one took them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tpconvert.analyze.emulate.ties import ORDERED, as_recorded
from tpconvert.verify.measure.modes import tensors_of
from tpconvert.verify.measure.values import relative

AT = {"topk": 2, "kthvalue": 2}
"""The place of the dim among the arguments, where it is not the second."""


class Decisions:
    """What one run, in ``dtype``, ranked, in order."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.taken: list[tuple[str, Any]] = []

    @contextmanager
    def of(self, first: bool) -> Iterator[None]:
        """Within it, ``first`` runs are written down, and others take the same decisions where these are as good."""
        if first:
            self.taken.clear()
        with _Deciding(self.taken, first, self.dtype):
            yield


def apart(whole: Any, local: Any) -> float:
    """How far this rank's outputs are from the whole model's."""
    theirs = dict(tensors_of(local))
    return max((relative(theirs.get(n, t[:0]), t) for n, t in tensors_of(whole) if t.dim()), default=0.0)


class _Deciding(TorchFunctionMode):
    def __init__(self, taken: list[tuple[str, Any]], first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.taken, self.first, self.number = taken, first, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        op = getattr(func, "__name__", "")
        if op not in ORDERED or kwargs.get("out") is not None or torch.compiler.is_compiling():
            return out
        several = not isinstance(out, torch.Tensor)
        places = (out[1] if several else out).detach()
        if self.first:
            self.taken.append((op, places))
            return out
        recorded = self.taken[self.number] if self.number < len(self.taken) else ("", None)
        self.number += 1
        if recorded[0] != op or not args:
            return out
        dim = kwargs.get("dim", args[AT.get(op, 1)] if len(args) > AT.get(op, 1) else ORDERED[op])
        settled = as_recorded(args[0], dim, out, recorded[1], self.dtype)
        return type(out)(settled) if several and isinstance(settled, list) else settled
