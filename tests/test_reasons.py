"""Every reason for leaving something whole is explained to users, in the words of the plan."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REASON_AT = {
    "block": 2,
    "opaque": 1,
    "ConflictError": 2,
    "UnsupportedError": 0,
    "Fault": 1,
    "fromkeys": 1,
    "UnalignedError": 0,
}
"""The functions that take a reason, and which of their arguments it is."""
INNER = frozenset(["x: x", "x: x, and its forward cannot be written anew: x", "it is seen through"])
"""Texts that only join others, or that nobody sees."""
NAMED = frozenset(["why", "WHY", "HOOK", "FUNCTION", "DIFFERENTIATED", "DEAR", "JOINED"])
"""The names that a reason is given before it is used."""
HELD_IN = frozenset(["rejected", "out", "forbidden"])
"""The dicts that hold reasons by axis."""


def words(node: ast.expr) -> Iterator[str]:
    """The texts an expression may be, with ``x`` in place of what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(p.value) if isinstance(p, ast.Constant) else "x" for p in node.values)
    elif isinstance(node, ast.IfExp):
        yield from words(node.body)
        yield from words(node.orelse)


def reasons_in(path: Path) -> Iterator[str]:
    """The reasons written in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in REASON_AT and len(node.args) > REASON_AT[name]:
                yield from words(node.args[REASON_AT[name]])
        elif isinstance(node, ast.Assign) and _holds_reasons(node.targets[0]):
            yield from words(node.value)


def _holds_reasons(target: ast.expr) -> bool:
    if isinstance(target, ast.Subscript):
        return getattr(target.value, "id", getattr(target.value, "attr", "")) in HELD_IN
    return isinstance(target, ast.Name) and target.id in NAMED


def reasons() -> list[str]:
    """The reasons written in the analysis and in the rules; those that only join others are left out."""
    files = [*(ROOT / "tpconvert/analyze").rglob("*.py"), *(ROOT / "tpconvert/planning").rglob("*.py")]
    found = {r for f in files for r in reasons_in(f)}
    found |= {e["whole"] for e in tomllib.loads((ROOT / "rules/ops.toml").read_text())["op"] if "whole" in e}
    return sorted(r for r in found if " " in r and r not in INNER)


def explained() -> list[re.Pattern[str]]:
    """The phrases in the first column of the page's tables."""
    page = (ROOT / "docs/why-was-this-left-whole.md").read_text()
    phrases = [
        p
        for line in page.splitlines()
        if line.startswith("| `")
        for p in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    ]
    return [re.compile(".*".join(map(re.escape, p.split("...")))) for p in phrases]


def test_reasons_are_found() -> None:
    assert len(reasons()) > 80
    assert "a dim of the model's input" in reasons()
    assert "its x units cannot be dealt to x ranks (x would do)" in reasons()


@pytest.mark.parametrize("reason", reasons())
def test_the_page_explains_it(reason: str) -> None:
    assert any(pattern.fullmatch(reason) for pattern in explained()), reason
