"""Which indices of a term a rank holds, once axes are chosen and the degree is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from tpconvert.analyze.axes.terms import Term, atoms, find, segments
from tpconvert.spec.layout import share


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """The chosen atoms: ``parts`` shares each, of which rank r holds number ``(r // stride) % parts``.

    An axis by itself has ``(tp, 1)``.  Where 2 kv heads meet tp=4, the kv atom has ``(2, 2)`` and the atom of the
    query heads in each group has ``(2, 1)``: two ranks share a kv head and take half of its queries each.
    """

    tp: int
    shares: Mapping[Term, tuple[int, int]]

    def units(self, atom: Term, rank: int) -> tuple[int, int]:
        """The range of an atom's indices that a rank holds."""
        if atom not in self.shares:
            return 0, atom.n
        parts, stride = self.shares[atom]
        return share(atom.n, (rank // stride) % parts, parts)

    def size(self, term: Term, rank: int) -> int:
        """The number of a dim's indices that a rank holds."""
        if find(term).n == 0:
            return 0
        out = 1
        for atom in atoms(term):
            if atom.kind == "V":
                first, last = self.units(atom, rank)
                out *= last - first
            else:
                out *= sum(self.size(s, rank) for s in segments(atom))
        return out

    def index(self, term: Term, rank: int) -> torch.Tensor:
        """The dim's indices that a rank holds, in its order: int64 of shape ``(size,)``."""
        out = torch.zeros(1, dtype=torch.long)
        if find(term).n == 0:
            return out[:0]
        for atom in atoms(term):
            if atom.kind == "V":
                inner = torch.arange(*self.units(atom, rank))
            else:
                pieces, offset = [], 0
                for segment in segments(atom):
                    pieces.append(self.index(segment, rank) + offset)
                    offset += segment.n
                inner = torch.cat(pieces)
            out = (out[:, None] * atom.n + inner).reshape(-1)
        return out

    def local(self, value: torch.Tensor, dims: Iterable[Term], rank: int) -> torch.Tensor:
        """A copy of the rank's part of a whole tensor."""
        for i, term in enumerate(dims):
            if self.size(term, rank) != term.n:
                value = value.index_select(i, self.index(term, rank).to(value.device))
        return value.clone()
