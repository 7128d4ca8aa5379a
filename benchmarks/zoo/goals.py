"""What was measured beside what is wanted: the table on top of the page."""

from __future__ import annotations

from collections import Counter
from statistics import mean, median
from typing import Any

OUTCOMES = {
    "equal": "planned and equal",
    "not equal": "planned and NOT equal",
    "undecided": "planned, and the whole model parts as far from itself with other last bits",
    "refused": "refused",
    "crashed": "the check did not end",
    "not built": "not built",
}
Found = dict[str, Any]
GATHERED = "`--set '*=gathered'`"
NO_CLASS = ("exports no such class", "it has no class")


def goals(found: list[Found], missing: list[str]) -> list[str]:
    """The lines of both tables; ``missing`` are the types that were not measured."""
    built = [line for line in found if "class" in line]
    planned = [line for line in found if "cut" in line]
    classless = [line for line in found if _classless(line)]
    linear = [line for line in planned if line.get("linear_cut") is not None]
    neither = [line for line in built if "cut" not in line and line["outcome"] != "refused"]
    reached = linear if all("linear_cut_reached" in line for line in linear) else []  # lines of before have none
    rows = [
        ("types built and run", "600", f"{len(built)} of {len(found) - len(classless)} that have a class"),
        (
            "of those, planned, or refused with a reason",
            "all",
            f"{len(planned)} planned, {_count(built, 'refused')} refused, {len(neither)} neither",
        ),
        ("of the planned, equal at tp=2 in outputs and every gradient", "all", _equal_at_two(planned)),
        (
            f"share of Linear weights that is cut with {GATHERED}",
            "mean 99 %, median 100 %",
            _spread(linear, "linear_cut"),
        ),
        ("the same of a plan without options", "", _spread(linear, "linear_cut_default")),
        *(
            [(f"the same with {GATHERED}, of those that the inputs reach", "", _spread(reached, "linear_cut_reached"))]
            if reached
            else []
        ),
        ("as transformers' own plans cut", "99 % of weights", _agreement(planned)),
        ("equal at tp=3, where little divides", "all", _at_degree(planned, "3")),
        ("equal at tp=4", "all", _at_degree(planned, "4")),
        ("equal on two real ranks", "all", _on_ranks(planned)),
        ("sharded and merged to the same bytes", "all that save", _merged(planned)),
        ("`torch.export` sees the same flow", "all it exports", _second_opinion(planned)),
    ]
    out = ["| what | goal | measured |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows), ""]
    if missing:
        out += [f"{len(missing)} more types were not measured in this run.", ""]
    counts = Counter(line["outcome"] for line in found)
    out += ["| outcome, the worse of lockstep and ranks | types |", "|---|---|"]
    out += [f"| {said} | {counts[name]} |" for name, said in OUTCOMES.items()]
    return [*out, f"| all | {len(found)} |", ""]


def _classless(line: Found) -> bool:
    return line["outcome"] == "not built" and any(said in line["why"] for said in NO_CLASS)


def _count(lines: list[Found], name: str) -> int:
    return sum(line["outcome"] == name for line in lines)


def _equal_at_two(planned: list[Found]) -> str:
    equal, unequal, rest = (_count(planned, name) for name in ("equal", "not equal", "crashed"))
    open_ones = _count(planned, "undecided")
    beside = f", {open_ones} part as the whole model from itself with other last bits" if open_ones else ""
    return f"{equal} equal, **{unequal} not equal**{beside}, {rest} not compared to the end"


def _spread(lines: list[Found], key: str) -> str:
    shares = [100 * line[key] for line in lines] or [0]
    return f"mean {mean(shares):.1f} %, median {median(shares):.1f} %, all of them in {sum(s == 100 for s in shares)}"


def _agreement(lines: list[Found]) -> str:
    total: Counter[str] = Counter(same=0, other=0, whole=0)
    for line in lines:
        total.update(line.get("theirs", {}))
    weights = total.total()
    share = f"{100 * total['same'] / weights:.1f} % of {weights}" if weights else "none"
    compared = [line for line in lines if "theirs" in line]
    more = sum(line.get("more_than_theirs", 0) for line in compared)
    more = more if all("more_than_theirs" in line for line in compared) else 0  # lines of before have none
    beside = f"; {more} more are cut that they leave whole" if more else ""
    types = sum("theirs" in line for line in lines)
    cheap = sum(line.get("theirs_no_cheaper", 0) for line in compared)
    explained = f", {cheap} of them for no more communication for each parameter cut" if cheap else ""
    explained += f" ({100 * (total['same'] + cheap) / weights:.1f} % with these)" if cheap else ""
    along = f"{total['other']} along the other dim{explained}"
    return f"{share} weights in {types} types, {along}, {total['whole']} whole{beside}"


def _at_degree(lines: list[Found], tp: str) -> str:
    at = [line["degrees"][tp] for line in lines if tp in line.get("degrees", {})]
    counts = Counter(d["outcome"] for d in at)
    beside = "".join(f", {counts[name]} {said}" for name, said in OUTCOMES.items() if name != "equal" and counts[name])
    cut = [d for d in at if d.get("matrices_cut")]
    return f"{counts['equal']} of {len(at)} that were asked{beside}; something is cut in {len(cut)}"


def _on_ranks(lines: list[Found]) -> str:
    counts = Counter(line["ranks"]["outcome"] for line in lines if "ranks" in line)
    beside = "".join(f", {counts[name]} {said}" for name, said in OUTCOMES.items() if name != "equal" and counts[name])
    return f"{counts['equal']} of {counts.total()} that were asked{beside}"


def _merged(lines: list[Found]) -> str:
    asked = [line["way_back"] for line in lines if "way_back" in line]
    saved = [said for said in asked if not said.startswith("not saved")]
    return f"{saved.count('identical')} of {len(saved)}; transformers does not save {len(asked) - len(saved)}"


def _second_opinion(lines: list[Found]) -> str:
    counts = Counter(line["export"]["outcome"] for line in lines if "export" in line)
    return f"{counts['agrees']} of {counts['agrees'] + counts['differs']}; it exports no more of {counts.total()}"
