"""How time and memory grow with one number at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.markup import cells, table

Row = dict[str, Any]
WHAT = ("layers", "tokens", "width", "tp")


def along(rows: Sequence[Row], what: str) -> list[Row]:
    """The largest set of rows that differ in that number alone, in its order."""
    groups: dict[tuple[Any, ...], dict[float, Row]] = {}
    for row in rows:
        if row["part"] == "costs" and "ms" in row:
            rest = tuple(row[other] for other in WHAT if other != what)
            groups.setdefault(rest, {})[row[what]] = row
    return [row for _, row in sorted(max(groups.values(), key=len, default={}).items())]


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """``(slope, what it starts at)`` of the line with the least squares.

    >>> line([(1, 3), (2, 5), (3, 7)])
    (2.0, 1.0)
    """
    n, xs, ys = len(points), [x for x, _ in points], [y for _, y in points]
    mx, my = sum(xs) / n, sum(ys) / n
    slope = sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x in xs)
    return slope, my - slope * mx


def growth(rows: Sequence[Row]) -> list[str]:
    """One table for each number, and the slopes below."""
    out: list[str] = []
    for what in WHAT:
        mine = along(rows, what)
        if len(mine) < 2:
            continue
        out += ["", f"### {what}", "", *table((what, "ms", "GiB", "tokens/s"))]
        out += [
            cells((f"{r[what]:g}", f"{r['ms']:.1f}", f"{r['peak_gib']:.2f}", f"{r['tokens_per_s']:,.0f}")) for r in mine
        ]
        times, sizes = ([(r[what], r[k]) for r in mine] for k in ("ms", "peak_gib"))
        power = math.log(mine[-1]["ms"] / mine[0]["ms"]) / math.log(mine[-1][what] / mine[0][what])
        said = f"From first to last the time grows as {what} to the power of {power:.2f}."
        if what in ("layers", "tokens"):
            each = 1000 if what == "tokens" else 1
            (ms, ms_start), (gib, gib_start) = line(times), line(sizes)
            unit = "1000 tokens" if what == "tokens" else "layer"
            said += (
                f" A line through all: {ms_start:.1f} ms and {ms * each:.2f} ms a {unit}; "
                f"{gib_start:.2f} GiB and {gib * each:.3f} GiB a {unit}."
            )
        out += ["", said]
    return ["", "## How it grows", *out] if out else []


def plot(rows: Sequence[Row], path: Path) -> None:
    """The same as a picture, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots(2, len(WHAT))
    for column, what in enumerate(WHAT):
        mine = along(rows, what)
        for place, key, unit in zip(axes[:, column], ("ms", "peak_gib"), ("ms a step", "GiB"), strict=True):
            place.plot([r[what] for r in mine], [r[key] for r in mine], "o-")
            place.set(xlabel=what, ylabel=unit, xlim=(0, None), ylim=(0, None))
    figure.savefig(path, dpi=120)
