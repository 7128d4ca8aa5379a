"""Plans and folders as rows, and rows as text: folded over layers, so that 80 alike lines are one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.manifest import Manifest
from tpconvert.spec.plan import Boundary, Plan

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Tensors that differ in nothing but their layer."""

    name: str
    """With ``*`` or ``[0-2,5]`` in place of layer numbers."""
    count: int
    shape: Shape
    local: tuple[Shape, ...]
    """The different shapes that ranks hold."""
    dim: int | None
    pattern: str = ""
    role: str = ""
    reason: str = ""
    kind: str = "parameter"
    tied: str = ""
    """The first name of the same tensor."""


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """The collectives of one layer, or of one module outside of layers, in one direction."""

    place: str
    count: int
    """How many layers are alike."""
    direction: Literal["forward", "backward"]
    collective: str
    calls: int
    """In one layer."""
    bytes: int
    """Of the whole tensors, in one layer."""


@dataclass(frozen=True, slots=True)
class Size:
    """Parameters and their bytes."""

    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything ``tpconvert plan`` shows."""

    name: str
    tp: int
    whole: Size
    ranks: tuple[Size, ...]
    """What each rank holds."""
    cut: int
    """Parameters in cut tensors."""
    tensors: tuple[TensorRow, ...]
    traffic: tuple[TrafficRow, ...]
    edits: tuple[str, ...]
    rewrites: tuple[str, ...]
    notes: tuple[str, ...]
    sequence: str
    """Whether values between regions can be slices of the tokens, or why not."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def plan_report(plan: Plan, *, fold: bool = True) -> PlanReport:
    """The rows of a plan; ``fold=False`` gives every tensor a row of its own."""
    own = [v for v in plan.verdicts if v.kind == "parameter" and not v.tied_to]
    ranks = tuple(_size((v.dtype, _local(v.layout, v.shape, rank, plan.tp)) for v in own) for rank in range(plan.tp))
    described = str(plan.source.get("class", ""))
    name = str(plan.source.get("name", ""))
    forms = dict.fromkeys((r.module, r.reason) for r in plan.rewrites)  # one for each way to call it
    return PlanReport(
        name=f"{name} ({described})" if name and described else name or described or "the module",
        tp=plan.tp,
        whole=_size((v.dtype, v.shape) for v in own),
        ranks=ranks,
        cut=sum(math.prod(v.shape) for v in own if v.layout.cut),
        tensors=_tensor_rows(plan, fold),
        traffic=_traffic_rows(plan),
        edits=_edit_rows(plan),
        rewrites=tuple(f"{name}: {why}" for name, why in _folded(list(forms))),
        notes=plan.notes,
        sequence=_sequence(plan),
    )


def _sequence(plan: Plan) -> str:
    if plan.slices.reason:
        return f"not parallel: {plan.slices.reason}"
    places = ", ".join(f"dim {dim} of {slot.partition('.')[2]}" for slot, dim in plan.slices.inputs)
    shared = ", whole sequences" if plan.slices.sequences else ""
    return f"can be parallel{f' along {places}' if places else ''}{shared}"


def plan_text(report: PlanReport) -> str:
    """The report for a terminal."""
    cut = [row for row in report.tensors if row.dim is not None]
    most = max(report.ranks, key=lambda s: s.bytes)
    share = report.cut / max(report.whole.parameters, 1)
    lines = [
        f"{report.name}, tp={report.tp}",
        f"  whole     {_count(report.whole.parameters)} parameters, {_bytes(report.whole.bytes)}",
        f"  per rank  {_count(most.parameters)} parameters, {_bytes(most.bytes)}"
        + ("" if len(set(report.ranks)) == 1 else " (the fullest rank)"),
        f"  cut       {_percent(share)} of the parameters",
        f"  sequence  {report.sequence}",
    ]
    lines += _titled("Cut", _columns(map(_cut_cells, cut)))
    lines += _titled("Whole", _whole_lines(report.tensors))
    lines += _titled("Collectives of one training step, for the traced shapes", _traffic_lines(report.traffic))
    lines += _titled("Integers that change", list(report.edits))
    lines += _titled("Forwards written anew", list(report.rewrites))
    lines += _titled("Notes", list(report.notes))
    return "\n".join(lines)


def folder_rows(manifest: Manifest, *, fold: bool = True) -> tuple[TensorRow, ...]:
    """The rows of a sharded folder."""
    rows = []
    for name, e in manifest.tensors.items():
        rows.append((name, (e.shape, e.layout, e.dtype)))
    return tuple(
        TensorRow(name, count, shape, _locals(layout, shape, manifest.tp), layout.dim, reason=dtype)
        for name, count, (shape, layout, dtype) in _groups(rows, fold)
    )


def folder_text(manifest: Manifest, rows: Iterable[TensorRow], *, where: str) -> str:
    """What ``tpconvert inspect`` prints."""
    size = sum(file.size for file in manifest.files.values())
    source = manifest.source
    lines = [
        f"{where}: {manifest.tp} {'rank' if manifest.tp == 1 else 'ranks'}, {len(manifest.tensors)} tensors, "
        f"{len(manifest.files)} files, {_bytes(size)}",
        f"  source  {source.get('name', 'unknown')}" + (f" at {source['revision']}" if source.get("revision") else ""),
    ]
    if manifest.groups:
        lines.append(f"  beside  {', '.join(f'{name} ({len(g)})' for name, g in manifest.groups.items())}")
    cells = [(row.name, f"x{row.count}", _shape(row.shape), row.reason, _dim(row), _shapes(row.local)) for row in rows]
    lines += _titled("Tensors", _columns(cells))
    lines += _titled("Tied", [f"{name} is {first}" for name, first in manifest.tied.items()])
    return "\n".join(lines)


# -- rows -------------------------------------------------------------------------------------------------------


def _tensor_rows(plan: Plan, fold: bool) -> tuple[TensorRow, ...]:
    items = []
    for v in plan.verdicts:
        reason, tied = f"the same tensor as {v.tied_to}" if v.tied_to else v.reason, v.tied_to
        if fold:
            reason, tied = _fold(reason), _fold(tied)
        items.append((v.name, (tuple(v.shape), v.layout, v.pattern, v.role, reason, v.kind, tied)))
    return tuple(
        TensorRow(name, count, shape, _locals(layout, shape, plan.tp), layout.dim, *rest)
        for name, count, (shape, layout, *rest) in _groups(items, fold)
    )


def _groups(items: Sequence[tuple[str, Any]], fold: bool) -> list[tuple[str, int, Any]]:
    """``(name, how many, what they share)``; names that differ in numbers only and share everything are one."""
    if not fold:
        return [(name, 1, shared) for name, shared in items]
    members: dict[tuple[str, Any], list[str]] = {}
    for name, shared in items:
        members.setdefault((_fold(name), shared), []).append(name)
    variants: dict[str, int] = {}
    for folded, _ in members:
        variants[folded] = variants.get(folded, 0) + 1
    return [
        (folded if variants[folded] == 1 and len(names) > 1 else _spelled(names), len(names), shared)
        for (folded, shared), names in members.items()
    ]


def _folded(items: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [
        (name if count == 1 else f"{name} x{count}", why)
        for name, count, why in _groups([(name or "the root module", _fold(why)) for name, why in items], True)
    ]


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$|\W)|^\d+(?=\.|$)")


def _fold(name: str) -> str:
    """``model.layers.7.mlp`` -> ``model.layers.*.mlp``."""
    return _NUMBER.sub("*", name)


def _spelled(names: Sequence[str]) -> str:
    """One name for several: the first number that differs as runs, later ones as ``*``."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    varying = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    out = list(parts[0])
    for i in varying:
        out[i] = "*"
    out[varying[0]] = f"[{_runs(sorted({int(p[varying[0]]) for p in parts}))}]"
    return ".".join(out)


def _runs(numbers: Sequence[int]) -> str:
    """``0-2,5``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _edit_rows(plan: Plan) -> tuple[str, ...]:
    items = []
    for e in plan.edits:
        new = [
            _length(e.blocks, rank, plan.tp) // (_length(e.per, rank, plan.tp) if e.per else 1)
            for rank in range(plan.tp)
        ]
        values = str(new[0]) if len(set(new)) == 1 else ", ".join(map(str, new))
        items.append((f"{e.module}.{e.attribute}".lstrip("."), f"{e.value} -> {values}"))
    return tuple(f"{name}: {change}" for name, change in _folded(items))


_VERBS: dict[str, tuple[tuple[Literal["forward", "backward"], str], ...]] = {
    "copy": (("backward", "all-reduce"),),
    "reduce": (("forward", "all-reduce"),),
    "gather": (("forward", "all-gather"),),
    "scatter": (("backward", "all-gather"),),
    "once": (),
    "single": (),
}


def _traffic_rows(plan: Plan) -> tuple[TrafficRow, ...]:
    """The collectives of boundaries and of ``sum_grad`` parameters, added up by layer."""
    moved: list[tuple[str, Literal["forward", "backward"], str, int]] = []
    for b in plan.boundaries:
        each = [(b.module, direction, verb, _boundary_bytes(b)) for direction, verb in _VERBS[b.kind]]
        moved += each * (b.calls if b.call == -1 else 1)
    for v in plan.verdicts:
        if v.sum_grad and not v.tied_to:
            module = v.name.rpartition(".")[0]
            size = math.prod(_local(v.layout, v.shape, 0, plan.tp)) * _itemsize(v.dtype)
            moved.append((module, "backward", "all-reduce of a gradient", size))
    sums: dict[tuple[str, Literal["forward", "backward"], str], list[int]] = {}
    layers: dict[tuple[str, str, str], set[str]] = {}
    for module, direction, verb, size in moved:
        layer = re.match(r"(?:.*?\.)?\d+(?=\.|$)", module)
        key = (_fold(layer.group()) if layer else module or "the root module", direction, verb)
        total = sums.setdefault(key, [0, 0])
        total[0] += 1
        total[1] += size
        layers.setdefault(key, set()).add(layer.group() if layer else module)
    places = list(dict.fromkeys(place for place, _, _ in sums))
    return tuple(
        TrafficRow(key[0], len(layers[key]), key[1], key[2], calls // len(layers[key]), size // len(layers[key]))
        for key, (calls, size) in sorted(
            sums.items(), key=lambda item: (places.index(item[0][0]), item[0][1] == "backward")
        )
    )


def _boundary_bytes(b: Boundary) -> int:
    size = math.prod(b.shape) * _itemsize(b.dtype)
    if b.span is None or b.dim is None or not b.shape:
        return size
    return size * (b.span[1] - b.span[0]) // b.shape[b.dim]


def _size(tensors: Iterable[tuple[str, Shape]]) -> Size:
    counts = [(math.prod(shape), _itemsize(dtype)) for dtype, shape in tensors]
    return Size(sum(n for n, _ in counts), sum(n * size for n, size in counts))


@cache
def _local(layout: Layout, shape: Shape, rank: int, degree: int) -> Shape:
    return layout.local_shape(shape, rank, degree)


def _locals(layout: Layout, shape: Shape, degree: int) -> tuple[Shape, ...]:
    return tuple(dict.fromkeys(_local(layout, tuple(shape), rank, degree) for rank in range(degree)))


def _length(blocks: tuple[Block, ...], rank: int, degree: int) -> int:
    return Layout(0, blocks).local_size(rank, degree)


def _itemsize(dtype: str) -> int:
    """``bfloat16`` -> 2."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1


# -- text -------------------------------------------------------------------------------------------------------


def _cut_cells(row: TensorRow) -> tuple[str, ...]:
    found = f"{row.pattern}: {row.role}" if row.pattern and row.role else row.pattern or row.role
    if row.tied:
        found = f"the same tensor as {row.tied}"
    return row.name, f"x{row.count}", _shape(row.shape), _dim(row), _shapes(row.local), found


def _whole_lines(rows: Iterable[TensorRow]) -> list[str]:
    by_reason: dict[str, list[TensorRow]] = {}
    for row in rows:
        if row.dim is None:
            by_reason.setdefault(row.reason.removeprefix("whole: ") or "no reason given", []).append(row)
    lines = []
    for reason, alike in by_reason.items():
        lines.append(reason)
        cells = ((r.name, f"x{r.count}", _shape(r.shape), "" if r.kind == "parameter" else r.kind) for r in alike)
        lines += [f"  {line}" for line in _columns(cells)]
    return lines


def _traffic_lines(rows: Sequence[TrafficRow]) -> list[str]:
    cells = []
    for row in rows:
        each = f"{row.calls} {row.collective}" + (
            "s" if row.calls > 1 and not row.collective.endswith("gradient") else ""
        )
        cells.append((row.place, f"x{row.count}", row.direction, each, _bytes(row.bytes)))
    for direction in ("forward", "backward"):
        mine = [row for row in rows if row.direction == direction]
        calls, size = sum(r.calls * r.count for r in mine), sum(r.bytes * r.count for r in mine)
        if mine:
            cells.append(("in all", "", direction, str(calls), _bytes(size)))
    return _columns(cells)


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of cells, aligned; a column of nothing is left out."""
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True) if w) for row in table)
    return [line.rstrip() for line in lines]


def _dim(row: TensorRow) -> str:
    return "whole" if row.dim is None else f"dim {row.dim}"


def _shape(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _shapes(shapes: Sequence[Shape]) -> str:
    return " or ".join(map(_shape, shapes))


def _percent(share: float) -> str:
    """``99.8 %``; what is not all is not shown as all."""
    return f"{min(100 * share, 99.9) if share < 1 else 100:.1f} %"


def _count(number: int) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    """``1.5 MB``: powers of a thousand, as disks and networks are sold."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"
