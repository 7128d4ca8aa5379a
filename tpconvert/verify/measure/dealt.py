"""Random numbers of a converted model, as the whole one drew them: where they are cut, the part of this rank.

A rank draws numbers of its own for what is cut.  Any deal of the whole model's numbers is as likely as these, so two
models that are equal under one are equal in distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from tpconvert.checkpoint.tensors.pieces import take_pieces
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.plan import Plan

DRAWS = frozenset(["rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm"]) | frozenset(
    f"{name}_" for name in ("cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
)
"""Ops whose numbers hang on nothing that a model computed."""


class Deal:
    """How a plan deals dims to this rank."""

    def __init__(self, plan: Plan, rank: int, degree: int) -> None:
        self.rank, self.degree, self.rows = rank, degree, plan.slices.rows
        self.blocks = list(dict.fromkeys(_blocks(plan)))

    def part(self, whole: Tensor, shape: Sequence[int]) -> Tensor | None:
        """The part of ``whole`` that has ``shape`` on this rank; None where no layout of the plan makes one.

        A dim may be dealt within each of several rows, as heads are within the examples of a batch.
        """
        if whole.shape == tuple(shape):
            return whole
        differing = [d for d, (n, own) in enumerate(zip(whole.shape, shape, strict=False)) if n != own]
        if len(differing) != 1 or whole.dim() != len(shape):
            return None
        (dim,) = differing
        for layout, rows in self.layouts(whole.shape[dim], shape[dim]):
            inner = whole.unflatten(dim, (rows, -1))
            return take_pieces(inner, Layout(dim + 1, layout.blocks), self.rank, self.degree).flatten(dim, dim + 1)
        return self.slice(whole, dim, shape) if whole.shape[dim] == shape[dim] * self.degree else None

    def slice(self, whole: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
        """The slice of tokens that this rank has."""
        if self.rows:
            return whole.reshape(self.degree, *shape)[self.rank]
        return whole.narrow(dim, self.rank * shape[dim], shape[dim])

    def layouts(self, size: int, own: int) -> Iterator[tuple[Layout, int]]:
        """The layouts of a dim of ``size`` of which a rank has ``own``, and in how many rows, the fewest first."""
        found = []
        for blocks in self.blocks:
            rows, rest = divmod(size, max(sum(b.size for b in blocks), 1))
            if not rest and rows * Layout(0, blocks).local_size(self.rank, self.degree) == own:
                found.append((Layout(0, blocks), rows))
        yield from sorted(found, key=lambda f: f[1])


def _blocks(plan: Plan) -> Iterable[tuple[Block, ...]]:
    """Every way in which a plan deals a dim."""
    for holder in (*(v.layout for v in plan.verdicts), *plan.boundaries, *plan.slices.boundaries, *plan.edits):
        if holder.blocks:
            yield tuple(holder.blocks)
