"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(names: Sequence[str]) -> list[str]:
    """The head of a table."""
    return [cells([n.replace("_", " ") for n in names]), cells(["---"] * len(names))]


def cells(values: Iterable[str]) -> str:
    """A row."""
    return f"| {' | '.join(values)} |"


def number(value: float | None, digits: int) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:.{digits}f}"


def told(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else ", ".join(f"{k} {told(v)}" for k, v in value.items())
        if isinstance(value, dict)
        else str(value)
    )
