"""What hangs on chance, for the converted model as it fell for the whole one.

That is decisions between values that are equal but for rounding, and random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tpconvert.analyze.emulate.ties import ORDERED, as_recorded
from tpconvert.verify.measure.dealt import DRAWS, Deal
from tpconvert.verify.measure.modes import DROPOUTS, rate_of, tensors_of
from tpconvert.verify.measure.values import relative

AT = {"topk": 2, "kthvalue": 2}
"""The place of the dim among the arguments, where it is not the second."""


class Decisions:
    """What one run, in ``dtype``, ranked and drew, each in order."""

    def __init__(self, dtype: torch.dtype, deal: Deal) -> None:
        self.dtype, self.deal = dtype, deal
        self.taken: list[tuple[str, Any]] = []
        self.drawn: list[tuple[str, torch.Tensor]] = []
        self.dropped: list[tuple[str, torch.Tensor]] = []
        """What each dropout kept (1), what it dropped (-1), and what was zero before (0)."""

    @contextmanager
    def of(self, first: bool) -> Iterator[None]:
        """Within it, ``first`` runs are written down; others take the same decisions where these are as good, and draw
        the same numbers, or their part of them."""
        if first:
            for found in (self.taken, self.drawn, self.dropped):
                found.clear()
        with _Deciding(self, first):
            yield


def apart(whole: Any, local: Any) -> float:
    """How far this rank's outputs are from the whole model's."""
    theirs = dict(tensors_of(local))
    return max((relative(theirs.get(n, t[:0]), t) for n, t in tensors_of(whole) if t.dim()), default=0.0)


class _Deciding(TorchFunctionMode):
    def __init__(self, decisions: Decisions, first: bool) -> None:
        super().__init__()
        self.dtype, self.deal = decisions.dtype, decisions.deal
        self.taken, self.drawn, self.dropped = decisions.taken, decisions.drawn, decisions.dropped
        self.first, self.number, self.draws = first, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        op = getattr(func, "__name__", "")
        if torch.compiler.is_compiling():
            return out
        if op in DRAWS and kwargs.get("generator") is None and isinstance(out, torch.Tensor):
            self.draw(op, out)
        elif op in DROPOUTS and self.first and rate_of(*args, **kwargs) and isinstance(out, torch.Tensor):
            given = (args[0] if args else kwargs["input"]).detach()  # the same as out where it was written into
            self.dropped.append((op, (out.detach() != 0).to(torch.int8) * 2 - (given != 0).to(torch.int8)))
        if op not in ORDERED or kwargs.get("out") is not None:
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

    def draw(self, op: str, out: torch.Tensor) -> None:
        """Write down what was drawn, or put in its place what the first run drew."""
        if self.first:
            return self.drawn.append((op, out.detach().clone()))
        first, whole = self.drawn[self.draws] if self.draws < len(self.drawn) else ("", out)
        self.draws += 1
        part = self.deal.part(whole, out.shape) if first == op else None
        if part is not None:
            with torch.no_grad():
                out.copy_(part)
        return None
