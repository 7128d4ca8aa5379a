"""What must hold between the entries of one plan, whatever module it is for."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tpconvert.errors import PlanError
from tpconvert.spec.layout import Block, refuse_degree
from tpconvert.spec.reading.typed import WrongError, entry

if TYPE_CHECKING:
    from tpconvert.spec.plan import Axis, Boundary, Edit, Plan, Verdict

SLICED = ("copy", "reduce")
"""The kinds of boundaries that have a sliced form."""
ALONG = ("gather", "scatter", "all_gather", "reduce_scatter")
"""The kinds that need a dim."""


def refuse_inconsistent(plan: Plan) -> None:
    """Raise WrongError for the first entry that contradicts itself, another one, or the degree."""
    verdicts = {v.name: v for v in plan.verdicts}
    axes = {a.name for a in plan.axes}
    dealt: set[tuple[Block, ...]] = set()
    for i, verdict in enumerate(plan.verdicts):
        with at("verdicts", i, verdict):
            _verdict(verdict, verdicts, plan.tp, dealt)
            _axis(verdict.axis, axes)
    _once("axes", plan.axes)
    _boundaries("boundaries", plan.boundaries, axes, plan.tp)
    _boundaries("slices.boundaries", plan.slices.boundaries, axes, plan.tp)
    if plan.slices.rows and plan.slices.sequences:
        raise WrongError("slices are of rows or of whole sequences, not of both", "slices")
    for i, edit in enumerate(plan.edits):
        with at("edits", i, edit):
            _edit(edit, plan.tp)


@contextmanager
def at(name: str, number: int, item: object) -> Iterator[None]:
    """What is wrong within is told of this entry."""
    try:
        yield
    except WrongError as error:
        raise error.within(entry(f"{name}[{number}]", item)) from None
    except PlanError as error:
        raise WrongError(str(error).removesuffix("."), entry(f"{name}[{number}]", item)) from None


def near(name: str, known: Collection[str]) -> str:
    """``; did you mean X?`` for the known name that is most like one."""
    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


def _verdict(v: Verdict, verdicts: dict[str, Verdict], tp: int, dealt: set[tuple[Block, ...]]) -> None:
    _sizes(v.shape, "shape")
    if not v.layout.fits(v.shape):
        raise WrongError(f"the layout {v.layout.to_json()} does not fit its shape {list(v.shape)}{_sum(v)}")
    if v.layout.blocks not in dealt:
        refuse_degree(v.layout.blocks, tp)
        dealt.add(v.layout.blocks)
    if not v.tied_to:
        return
    first = verdicts.get(v.tied_to)
    if first is None or first is v:
        raise WrongError(f"it is tied to {v.tied_to}, for which there is no verdict{near(v.tied_to, verdicts)}")
    if (first.shape, first.layout) != (v.shape, v.layout):
        raise WrongError(f"it is tied to {v.tied_to}, so both must have one shape and one layout")


def _sum(v: Verdict) -> str:
    """What the blocks make up, where they are along a dim that is there."""
    assert v.layout.dim is not None
    if v.layout.dim >= len(v.shape):
        return f", which has no dim {v.layout.dim}"
    return f": its blocks are {_rows(v.layout.blocks)} rows of {v.shape[v.layout.dim]}"


def _boundaries(name: str, boundaries: Sequence[Boundary], axes: set[str], tp: int) -> None:
    for i, boundary in enumerate(boundaries):
        with at(name, i, boundary):
            _boundary(boundary, tp)
            _axis(boundary.axis, axes)


def _boundary(b: Boundary, tp: int) -> None:
    _sizes(b.shape, "shape")
    if not b.slots or len(set(b.slots)) < len(b.slots):
        raise WrongError(f"a {b.kind} needs slots, each once")
    if b.calls < 1 or not -1 <= b.call < b.calls:
        raise WrongError(f"it is call {b.call} of {b.calls}")
    for key, dim in (("dim", b.dim), ("sliced", b.sliced)):
        if dim is not None and (dim < 0 or (b.shape and dim >= len(b.shape))):
            raise WrongError(f"{key} is {dim}, and its shape is {list(b.shape)}")
    if b.dim is None and (b.kind in ALONG or b.span is not None or b.blocks):
        raise WrongError(f"a {b.kind}{' of a span' if b.span else ''} needs a dim")
    if b.sliced is not None and b.kind not in SLICED:
        raise WrongError(f"sliced is of {' and '.join(SLICED)}, and this is a {b.kind}")
    size = b.shape[b.dim] if b.shape and b.dim is not None else None
    if b.span is not None and not (0 <= b.span[0] <= b.span[1] and (size is None or b.span[1] <= size)):
        raise WrongError(f"its span is {list(b.span)} of {size} rows")
    if b.blocks and size is not None and size % max(_rows(b.blocks), 1):  # heads of each sequence of a batch: [24]
        raise WrongError(f"its blocks are {_rows(b.blocks)} rows of {size}")
    refuse_degree(b.blocks, tp)


def _edit(e: Edit, tp: int) -> None:
    refuse_degree(e.blocks, tp)
    refuse_degree(e.per, tp)
    per = _rows(e.per) if e.per else 1
    if not per or _rows(e.blocks) // per != e.value:
        raise WrongError(f"{e.attribute} is {e.value}, and its blocks count {_rows(e.blocks)} / {per}")


def _once(name: str, items: Sequence[Axis]) -> None:
    seen = Counter(item.name for item in items)
    for i, item in enumerate(items):
        if seen[item.name] > 1:
            raise WrongError("there are two of that name", entry(f"{name}[{i}]", item))


def _axis(name: str, axes: set[str]) -> None:
    if name and axes and name not in axes:
        raise WrongError(f"there is no axis {name}{near(name, axes)}")


def _sizes(shape: Iterable[int], key: str) -> None:
    if any(n < 0 for n in shape):
        raise WrongError(f"{key} is {list(shape)}, with a size below 0")


def _rows(blocks: Iterable[Block]) -> int:
    return sum(block.size for block in blocks)
