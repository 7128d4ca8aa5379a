"""Decisions that rounding alone took another way: the order of equal values, and which side of a number they are on.

Ranks add up in another order than the whole model does, so values that are equal but for rounding may be ranked the
other way, and everything after would differ.  Such a decision is taken as it was recorded, once the very values it
was taken on are seen to be as good a reason for it.  What leads to those values is compared by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

ORDERED = dict.fromkeys(["topk", "sort", "argsort", "kthvalue"], -1) | dict.fromkeys(["argmax", "argmin", "max", "min"])
"""Ops that say where the values they pick are -> the dim if none is given; None for all entries as one row."""
COMPARED = frozenset(
    f"{left}{name}{right}"
    for name in ("gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal", "not_equal")
    for left, right in (("", ""), ("__", "__"))
)
DECIDING = COMPARED | ORDERED.keys()


def settled(node: fx.Node, bound: dict[str, Any], args: Any, out: Any, wanted: dict[Any, torch.Tensor]) -> Any:
    """``out``, or the recorded decision where it is as good.

    ``bound`` are the arguments by name; ``wanted`` is this rank's part of what was recorded: of the result (None), or
    of each of several by their number.
    """
    op = node.meta["op"]
    if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point() or not args[0].dim():
        return out
    if op in COMPARED:
        want = wanted.get(None)
        return want if want is not None and _as_close(args[0], args[1], out, want) else out
    dim = bound.get("dim", ORDERED.get(op))
    if op not in ORDERED or isinstance(dim, fx.Node):
        return out
    return as_recorded(args[0], dim, out, wanted.get(None if isinstance(out, torch.Tensor) else 1))


def as_recorded(
    x: torch.Tensor, dim: Any, out: Any, places: torch.Tensor | None, dtype: torch.dtype = torch.float64
) -> Any:
    """``out``, or the recorded places of ``x`` where the values there are the same but for rounding.

    What led to them was computed in ``dtype``: a router that widens what it is given still has its rounding.
    """
    several = not isinstance(out, torch.Tensor)
    found = out[1] if several else out
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not (dim is None or type(dim) is int):
        return out
    if places is None or places.dtype != torch.long or places.shape != found.shape or torch.equal(places, found):
        return out
    values = _equally_good(x, dim, found, places, max(close(x.dtype), close(dtype)))
    return out if values is None else [values, places] if several else places


def close(dtype: torch.dtype) -> float:
    """How far rounding may drive values of a dtype apart, relative to the largest."""
    return float(torch.finfo(dtype).eps ** 0.6)


def _as_close(left: torch.Tensor, right: Any, out: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two sides are equal but for rounding wherever their comparison came out otherwise."""
    if want.shape != out.shape or torch.equal(out, want):
        return False
    apart = (left - right).detach().expand(out.shape)[out != want].abs()
    return bool((apart <= close(left.dtype) * _scale(left)).all())


def _equally_good(
    x: torch.Tensor, dim: int | None, found: torch.Tensor, places: torch.Tensor, near: float
) -> torch.Tensor | None:
    """The values at ``places``, if they are those that were found but for rounding, ``near`` of the largest."""
    if dim is None:  # all entries are one row
        x, dim = x.reshape(-1), 0
    kept = places.dim() == x.dim()
    values, before = (x.gather(dim, at if kept else at.unsqueeze(dim)) for at in (places, found))
    apart = torch.where(values == before, torch.zeros_like(values), values - before).detach().abs()  # infinities too
    if not bool((apart <= near * _scale(x)).all()):
        return None
    return values if kept else values.squeeze(dim)


def _scale(x: torch.Tensor) -> float:
    finite = x.detach()[torch.isfinite(x)].abs()
    return float(finite.max()) if finite.numel() else 0.0
