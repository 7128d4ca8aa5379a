"""Reasons for leaving parameters whole, brought to a form in which they can be counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

MOST = 30
"""Reasons that are shown."""


def reasons_of(text: str) -> list[str]:
    """The reasons in a verdict, without the places where they arose."""
    found = []
    for part in re.split(r"; (?=dim [\d*]+: )", text.removeprefix("whole: ")):
        part = re.sub(r"^dim [\d*]+: ", "", part)
        part = re.sub(r" \(in (?:[^()]|\([^()]*\))*\)", "", part)
        part = re.sub(r"^(?:[\w*]+\.)+[\w*]+: ", "", part)
        found.append(re.sub(r"[\d*]+", "*", part))
    return list(dict.fromkeys(found))


def reasons_table(lines: Iterable[dict[str, Any]]) -> list[str]:
    """The reasons that most parameters have, with how many types have them, and an example."""
    parameters: Counter[str] = Counter()
    types: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for line in lines:
        here: Counter[str] = Counter()
        for text, many, example in line["whole"]:
            for reason in reasons_of(text):
                here[reason] += many
                examples.setdefault(reason, f"{example} of {line['type']}")
        parameters.update(here)
        types.update(here.keys())
    out = ["| reason | parameters | types | for example |", "|---|--:|--:|---|"]
    for reason, many in parameters.most_common(MOST):
        said = reason.replace("|", "/").replace("<", "&lt;")[:220]
        out.append(f"| {said} | {many} | {types[reason]} | {examples[reason]} |")
    left = len(parameters) - MOST
    return [*out, "", f"{left} rarer reasons are in `coverage.jsonl`."] if left > 0 else out
