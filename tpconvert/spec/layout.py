"""How one dim of a tensor is dealt to ranks: the only place that turns a rank into indices.

A dim is a row of blocks; a block is ``count`` units, and a unit is never divided while there are
at least as many units as ranks::

    Layout(0, (Block(11008),))                                  up_proj: 11008 rows, one by one
    Layout(0, (Block(32, 128), Block(8, 128), Block(8, 128)))   fused q, k, v: each segment cut by itself
    Layout(0, (Block(8, (Block(4, 128),)),))                    q_proj of grouped-query attention

With more ranks than units, ``degree // count`` ranks share each unit.  A unit given as a number of
rows is then held whole by each of them; a unit given as blocks is dealt on among them.  The last
line above is why: at degree 16 the 8 groups are shared by 2 ranks, which take 2 of its 4 heads each.

A layout does not know the degree, so a checkpoint can be resharded without asking the model again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpconvert.errors import PlanError

Piece = tuple[int, int]
"""A half-open range ``(start, stop)`` of indices of the whole dim."""


@dataclass(frozen=True, slots=True)
class Block:
    """``count`` units of ``unit`` rows each; a unit may itself be a row of blocks."""

    count: int
    unit: int | tuple[Block, ...] = 1

    @property
    def rows(self) -> int:
        """Rows of one unit."""
        return self.unit if isinstance(self.unit, int) else sum(b.size for b in self.unit)

    @property
    def size(self) -> int:
        """Rows of the whole block."""
        return self.count * self.rows

    def to_json(self) -> list[Any]:
        """``[count, rows]`` or ``[count, [block, ...]]``."""
        return [self.count, self.unit if isinstance(self.unit, int) else [b.to_json() for b in self.unit]]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Block:
        """The inverse of :meth:`to_json`."""
        if isinstance(data, list | tuple) and len(data) == 2 and _is_count(data[0]):
            count, unit = data
            if isinstance(unit, list | tuple):
                return cls(count, tuple(map(cls.from_json, unit)))
            if _is_count(unit):
                return cls(count, unit)
        raise ValueError(f"{data!r} is no block of units, [count, rows] or [count, [block, ...]]")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one tensor is cut: along ``dim``, block by block.  ``Layout()`` is a whole tensor."""

    dim: int | None = None
    blocks: tuple[Block, ...] = ()

    @property
    def cut(self) -> bool:
        """Whether ranks hold parts rather than everything."""
        return self.dim is not None

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the blocks make up exactly the dim of a tensor of ``shape``."""
        if self.dim is None:
            return True
        return 0 <= self.dim < len(shape) and sum(block.size for block in self.blocks) == shape[self.dim]

    def pieces(self, rank: int, degree: int) -> list[Piece]:
        """The ranges of the whole dim that ``rank`` of ``degree`` holds, in the order it holds them.

        >>> Layout(0, (Block(2, 3), Block(2, 3))).pieces(1, 2)
        [(3, 6), (9, 12)]
        """
        return merge_pieces(deal(self.blocks, rank, degree))

    def local_size(self, rank: int, degree: int) -> int:
        """Rows that ``rank`` of ``degree`` holds."""
        return sum(stop - start for start, stop in self.pieces(rank, degree))

    def local_shape(self, shape: Sequence[int], rank: int, degree: int) -> tuple[int, ...]:
        """The shape of the rank's part of a tensor of ``shape``."""
        if self.dim is None:
            return tuple(shape)
        return tuple(self.local_size(rank, degree) if i == self.dim else n for i, n in enumerate(shape))

    def shared(self, rank: int, degree: int) -> list[tuple[Piece, tuple[int, ...]]]:
        """``(local range, ranks)`` for each run of local rows that other ranks hold too; ``ranks`` has this one too."""
        return _runs(self.blocks, rank, degree)

    def to_json(self) -> dict[str, Any]:
        """``{}`` for a whole tensor, else ``{"dim": 0, "blocks": [[8, 128]]}``."""
        return {} if self.dim is None else {"dim": self.dim, "blocks": [b.to_json() for b in self.blocks]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        """The inverse of :meth:`to_json`."""
        if not isinstance(data, dict) or (data and data.keys() != {"dim", "blocks"}):
            raise ValueError(f'{data!r} is no layout, {{}} or {{"dim": 0, "blocks": [[count, rows]]}}')
        if not data:
            return cls()
        dim, blocks = data["dim"], data["blocks"]
        if not _is_count(dim) or not isinstance(blocks, list | tuple):
            raise ValueError(f"{data!r} is no layout: dim is a number from 0, blocks is a list")
        return cls(dim, tuple(map(Block.from_json, blocks)))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def share(count: int, rank: int, degree: int) -> Piece:
    """The units ``(first, last + 1)`` that ``rank`` gets of ``count``; sizes differ by at most one.

    >>> [share(14, r, 4) for r in range(4)]
    [(0, 4), (4, 8), (8, 11), (11, 14)]
    """
    each, extra = divmod(count, degree)
    start = rank * each + min(rank, extra)
    return start, start + each + (rank < extra)


def deal(blocks: Sequence[Block], rank: int, degree: int, start: int = 0) -> Iterator[Piece]:
    """The pieces of a row of blocks that begins at ``start``, unmerged."""
    for block in blocks:
        if block.count >= degree or not block.count:
            first, last = share(block.count, rank, degree)
            yield start + first * block.rows, start + last * block.rows
        else:
            unit, ranks = _shared_unit(block, rank, degree)
            begin = start + unit * block.rows
            if isinstance(block.unit, int):
                yield begin, begin + block.unit
            else:
                yield from deal(block.unit, rank % ranks, ranks, begin)
        start += block.size


def local_size(blocks: Sequence[Block], rank: int, degree: int) -> int:
    """Rows of ``blocks`` that ``rank`` of ``degree`` holds."""
    return sum(stop - start for start, stop in deal(blocks, rank, degree))


def merge_pieces(pieces: Iterator[Piece]) -> list[Piece]:
    """Neighbouring ranges joined, empty ones dropped."""
    out: list[Piece] = []
    for start, stop in pieces:
        if start == stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


def refuse_degree(blocks: Sequence[Block], degree: int) -> None:
    """Raise PlanError where ``degree`` ranks cannot be dealt ``blocks``; what :func:`deal` does for each rank."""
    for block in blocks:
        if block.count and block.count < degree:
            _, ranks = _shared_unit(block, 0, degree)
            if not isinstance(block.unit, int):
                refuse_degree(block.unit, ranks)


def _shared_unit(block: Block, rank: int, degree: int) -> tuple[int, int]:
    """``(unit of this rank, ranks that share it)`` for a block with fewer units than ranks."""
    if degree % block.count:
        raise PlanError(
            f"{block.count} units cannot be shared by {degree} ranks ({degree} % {block.count} is not 0).",
            hint=f"Use a degree up to {block.count}, or a multiple of it.",
        )
    ranks = degree // block.count
    return rank // ranks, ranks


def _runs(blocks: Sequence[Block], rank: int, degree: int) -> list[tuple[Piece, tuple[int, ...]]]:
    mine = list(_rows_with_owners(blocks, rank, degree, tuple(range(degree))))
    out: list[tuple[Piece, tuple[int, ...]]] = []
    at = 0
    for size, owners in mine:
        if size and len(owners) > 1:
            if out and out[-1][1] == owners and out[-1][0][1] == at:
                out[-1] = ((out[-1][0][0], at + size), owners)
            else:
                out.append(((at, at + size), owners))
        at += size
    return out


def _rows_with_owners(
    blocks: Sequence[Block], rank: int, degree: int, ranks: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """``(rows, global ranks that hold exactly these rows)`` of each run of the local tensor."""
    for block in blocks:
        if block.count >= degree or not block.count:
            first, last = share(block.count, rank, degree)
            yield (last - first) * block.rows, (ranks[rank],)
            continue
        unit, sharers = _shared_unit(block, rank, degree)
        group = ranks[unit * sharers : (unit + 1) * sharers]
        if isinstance(block.unit, int):
            yield block.unit, group
        else:
            yield from _rows_with_owners(block.unit, rank % sharers, sharers, group)
