"""How other libraries deal a dim to ranks: in equal runs, or each half of it in equal runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpconvert.spec.layout import Layout, Piece


@dataclass(frozen=True, slots=True)
class Dealt:
    """One dim dealt in equal runs; ``packed``: each of its two halves is."""

    dim: int
    packed: bool = False

    def pieces(self, size: int, rank: int, degree: int) -> list[Piece]:
        """The ranges a rank holds, as torch chunks a dim: the last ranks get less, or nothing."""
        parts = 2 if self.packed else 1
        out: list[Piece] = []
        for i in range(parts):
            whole = size // parts
            each = -(-whole // degree)
            start, stop = min(rank * each, whole), min((rank + 1) * each, whole)
            if start < stop:
                out.append((i * whole + start, i * whole + stop))
        return out if len(out) < 2 or out[0][1] != out[1][0] else [(out[0][0], out[1][1])]


def dealt(shape: Sequence[int], layout: Layout, degree: int) -> Dealt | None:
    """The dealing that gives every rank what ``layout`` does, or None."""
    if layout.dim is None:
        return None
    size = shape[layout.dim]
    for packed in (False, True):
        found = Dealt(layout.dim, packed)
        if size % (degree * (2 if packed else 1)):
            continue
        if all(found.pieces(size, r, degree) == layout.pieces(r, degree) for r in range(degree)):
            return found
    return None


def undealt(shape: Sequence[int], layout: Layout, degree: int) -> str:
    """Why a layout is none of these, in words that go after the name of a tensor."""
    parts = [layout.pieces(rank, degree) for rank in range(degree)]
    if any(layout.shared(rank, degree) for rank in range(degree)):
        return "has rows that several ranks hold"
    if len({sum(stop - start for start, stop in pieces) for pieces in parts}) > 1:
        return f"is dealt unevenly ({shape[layout.dim or 0]} on {degree} ranks)"
    return "is several tensors side by side, of each of which ranks hold a part"
