"""A result as a table, worst first."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from tpconvert.verify.result import Result

SHOWN = 12


def proof_text(result: Result, *, every: bool = False) -> str:
    """The table and the verdict, as a terminal shows them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
        ("check", "left"),
        ("mode", "left"),
        ("name", "left"),
        ("error", "right"),
        ("bound", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    checks = result.worst(None if every else SHOWN)
    for c in checks:
        table.add_row(c.kind, c.mode, c.name, f"{c.error:.1e}", f"{c.bound:.0e}", "" if c.equal else "not equal")
    out = io.StringIO()
    console = Console(file=out, width=120, highlight=False)
    console.print(table)
    if len(result.checks) > len(checks):
        console.print(f"... and {len(result.checks) - len(checks)} more, all no worse (--all shows them)")
    console.print(f"\nBound: {result.tolerance.bound:.0e} ({result.tolerance.reason}).", soft_wrap=True)
    for note in result.notes:
        console.print(f"Note: {note}", soft_wrap=True)
    console.print(result.verdict(), soft_wrap=True)
    return out.getvalue().rstrip()
