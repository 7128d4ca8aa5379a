"""Example inputs of other sizes, made from those that were given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term, atoms, find, leaves, segments
from tpconvert.analyze.capture.run import Inputs, Trace
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
            yield from self.among(self.free, group)

    @property
    def roots(self) -> list[Term]:
        """What may change, each once."""
        return list(dict.fromkeys(find(t) for t in self.free.values()))

    def to(self, sizes: Mapping[Term, int]) -> Any:
        """The inputs with some of these changed."""
        changed = {at: sizes[find(t)] for at, t in self.free.items() if find(t) in sizes}
        shapes = ([changed.get((i, d), n) for d, n in enumerate(s)] for i, s in enumerate(self.shapes))
        return resized(self.inputs, shapes)

    def among(self, dims: dict[tuple[int, int], Term], sizes: Sequence[int]) -> Iterator[tuple[Any, set[Term]]]:
        """The same, with those of ``dims`` changed that have one of ``sizes``."""
        for way in range(len(_others(1))):
            changed = {at: _others(t.n)[way] for at, t in dims.items() if t.n in sizes}
            if any(n != dims[at].n for at, n in changed.items()):
                shapes = [[changed.get((i, d), n) for d, n in enumerate(s)] for i, s in enumerate(self.shapes)]
                yield resized(self.inputs, shapes), {find(dims[at]) for at in changed}


def by_chance(ax: Axes, inputs: Inputs, captured: Callable[[Any], Trace | str]) -> dict[Term, str]:
    """The axes of parameters that are made otherwise at another size of the inputs.

    A reshape from 36 features of 6 tokens to 6 tokens of 36 features takes each token for 6 of the features, as long as
    there are 6 tokens.  It is looked for where a parameter's dim would be made of a size of the inputs and another
    axis; a size that the parameter asks for has no other.
    """
    mixed = {a for node in ax.trace.parameters.values() for t in ax.of(node) for a in _multiplied(t, ax.input_atoms)}
    nodes = [n for n in ax.trace.nodes if n.meta["op"] == "input"]
    dims = {(i, d): t for i, node in enumerate(nodes) for d, t in enumerate(ax.of(node)) if leaves(t) & mixed}
    found: set[Term] = set()
    for size in sorted({t.n for t in dims.values()}):
        traces = (captured(others) for others, _ in OtherSizes(ax, inputs).among(dims, [size]))
        trace = next((t for t in traces if isinstance(t, Trace)), None)
        there = Axes(trace, trace.rules, ax.joined) if trace is not None else ax
        for name, node in ax.trace.parameters.items():
            other = there.trace.parameters.get(name, node)
            for term, here in zip(ax.of(node), (there if other is not node else ax).of(other), strict=True):
                found |= leaves(term) if repr(here) != repr(term) else set()
    return dict.fromkeys(found - ax.input_atoms, "a size of the inputs stands inside a cut dim")


def _multiplied(term: Term, inputs: set[Term]) -> set[Term]:
    """The atoms of the inputs that multiply others in a dim."""
    factors = atoms(term)
    own = {a for f in factors for a in (leaves(f) if len(factors) > 1 else ())}
    inner = {a for f in factors if f.kind == "S" for s in segments(f) for a in _multiplied(s, inputs)}
    return inner | (own & inputs if own - inputs else set())


def _others(size: int) -> tuple[int, int, int]:
    """Other sizes to try, for not every model takes every size."""
    return size + LONGER, 2 * size, size // 2 or size
