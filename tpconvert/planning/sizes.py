"""Example inputs of other sizes, made from those that were given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term, find, leaves
from tpconvert.analyze.trace.trees import map_tensors

LONGER = 3
"""How many entries are added; odd, so that what is even becomes odd."""


def resized(inputs: Any, shapes: Iterable[Sequence[int]]) -> Any:
    """``inputs`` with each tensor in another shape of as many dims: cropped, or with its entries over again."""
    left = iter(shapes)

    def made(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(next(left)):
            if size != tensor.shape[dim]:
                tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
        return tensor

    return map_tensors(made, inputs)


class OtherSizes:
    """The sizes of the inputs that may be other ones in a later call, and inputs with some of them changed.

    A dim that a parameter shares is what it is.  Dims of one size change together, for they may have to be equal; a
    size of one is changed by itself, where it stands first and so is a batch.
    """

    def __init__(self, ax: Axes, inputs: Any) -> None:
        self.inputs = inputs
        nodes = [n for n in ax.trace.nodes if n.meta["op"] == "input"]
        self.shapes = [tuple(n.meta["shape"]) for n in nodes]
        parameters = [t for n in ax.trace.parameters.values() for t in ax.of(n)]
        tied = {a for t in parameters for a in leaves(t) if a.n == t.n}
        self.free: dict[tuple[int, int], Term] = {}
        """``(tensor, dim)`` -> the term, of each dim that may change."""
        for i, node in enumerate(nodes):
            for dim, term in enumerate(ax.of(node)):
                own = leaves(term)
                if (term.n > 1 and not (own and own <= tied)) or (term.n == 1 and dim == 0):
                    self.free[i, dim] = term

    def __iter__(self) -> Iterator[tuple[Any, set[Term]]]:
        """``(inputs, the terms that changed)``: all sizes at once in a few ways, then each by itself."""
        sizes = sorted({t.n for t in self.free.values() if t.n > 1})
        for group in (sizes, *([n] for n in sizes if len(sizes) > 1), [1]):
            for way in range(len(_others(1))):
                changed = {at: _others(t.n)[way] for at, t in self.free.items() if t.n in group}
                if any(n != self.free[at].n for at, n in changed.items()):
                    shapes = [[changed.get((i, d), n) for d, n in enumerate(s)] for i, s in enumerate(self.shapes)]
                    yield resized(self.inputs, shapes), {find(self.free[at]) for at in changed}


def _others(size: int) -> tuple[int, int, int]:
    """Other sizes to try, for not every model takes every size."""
    return size + LONGER, 2 * size, size // 2 or size
