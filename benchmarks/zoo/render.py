"""The table of what was found, as Markdown, and the same as a file for machines."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.zoo.facts import UNUSED
from benchmarks.zoo.whole import reasons_table

OUTCOMES = {
    "equal": "planned and equal",
    "not equal": "planned and NOT equal",
    "refused": "refused",
    "crashed": "the check did not end",
    "not built": "not built",
}
Found = dict[str, Any]
GATHERED = "`--set '*=gathered'`"
OUT = "out of memory"
WHOLE = 6
"""Reasons of a type that the file for machines keeps."""
NO_CLASS = ("exports no such class", "it has no class")
HOW_TO_READ = """\
## How to read it

Each type is built from its default configuration with random weights, its widths and its counts of layers made small;
it is the class's own code that runs.  `by` in `coverage.jsonl` says how much smaller.  Every process had {limits}.

- **cut %**: the share of all parameters that is on one rank only; **Linear cut %**: of the weights of Linear, Conv1D
  and expert layers, which are most of a large model.  Small models have proportionally more embeddings and norms.
  Plans were made with `--set '*=gathered'`: layers that no axis runs through are cut along their columns, and what they
  return is put together at once, where that pays.  What a plan without options cuts stands in the table of goals.
- **of reached %**: the same share of the weights that the traced forward uses.  Of the others, those that no forward
  can use are listed below: a checkpoint holds them for `generate()` alone.
- **as transformers**: of the Linear weights that transformers' own tp plan of the class cuts, how many are cut along
  the same dim.  Empty: transformers has no plan for it.
- **unreached**: parameters that no output depends on with the inputs that were found.  They are planned, and nothing
  can be compared of them.
- **tp=2**: equal means that all ranks, run in lockstep in float64 on the recorded graph, agreed with the whole model in
  every op, every output and every gradient; the number is the largest relative error found.  What exceeds its bound is
  held to what other last bits of the whole model's own parameters and sums do to it.
- **ranks**: the converted model on two real processes (gloo): outputs, losses and gradients in eval and train mode, and
  two optimizer steps.
- **tp=3**, **tp=4**: planned and compared as in the column tp=2; heads and widths rarely divide by 3.
  These, and ranks, are empty where they were not asked for in this run.
- **merged**: a checkpoint saved by transformers, sharded and merged, has the same bytes.
- **export**: `torch.export` sees the same parameters flow into each other's ops as the recorded graph does.  Empty: it
  cannot export the model.
"""
WHY_NOT = (
    ("transformers exports no class for it", r"exports no such class|it has no class"),
    ("needs a package that was not installed", r"requires the \w+ library"),
    (
        "too large, or too slow, to be built or compared",
        r"takes longer|longer than|M parameters|M numbers|out of memory",
    ),
    ("no inputs were found", r"no example is known"),
    ("its default configuration, or the inputs found, do not fit", r""),
)
"""Kinds of reasons for not being built, the first that fits, by what is said."""


def render(source: Path, folder: Path, known: Sequence[str] = (), limits: str = "no limits") -> None:
    """Write ``coverage.md`` and ``coverage.jsonl`` into a folder from the lines of a run.

    ``known`` are the types that there are; those without a line are counted as not measured.  ``limits`` are those
    that the run had.
    """
    lines = [json.loads(line) for line in _plain_errors(source.read_text()).splitlines() if line.strip()]
    found = sorted({line["type"]: line for line in lines}.values(), key=lambda line: line["type"])
    for line in found:
        line["outcome"], line["why"] = outcome(line)
        if "linear_cut_default" not in line:  # measured of a plan without options
            line["linear_cut_default"] = line.get("linear_cut")
    missing = sorted(set(known) - {line["type"] for line in found})
    folder.mkdir(exist_ok=True)
    sections = [
        *_head(found),
        *_goals(found, missing),
        HOW_TO_READ.format(limits=limits),
        *_troubles(found, missing),
        *_whole(found),
        *_theirs(found),
    ]
    sections += [*_export(found), *_unreached(found), *_never(found), *_table(found), ""]
    (folder / "coverage.md").write_text("\n".join(sections))
    (folder / "coverage.jsonl").write_text("".join(json.dumps(_short(line)) + "\n" for line in found))


def _plain_errors(text: str) -> str:
    """Without the places of a machine, and allocations that failed in fewer words."""
    text = re.sub(r"[^\s\"\\]*/(site-packages|coverage-\w+)/", "", text)
    return re.sub(
        r"\[enforce fail at [^\"\\]*?can't allocate memory[^\"\\]*?bytes\.( Error code 12 [^\"\\]*?\))?", OUT, text
    )


def outcome(line: Found) -> tuple[str, str]:
    """The outcome on the recorded graph, or that on real ranks where it is worse."""
    ranks = line.get("ranks", {})
    if line["outcome"] == "equal" and ranks.get("outcome", "equal") != "equal":
        return ranks["outcome"], f"on ranks: {ranks['why']}"
    if line["outcome"] == "refused" and OUT in line["why"]:
        return "crashed", line["why"]
    return line["outcome"], line.get("why", "")


def _head(found: list[Found]) -> list[str]:
    last = max(found, key=lambda line: line["date"])
    dates = sorted({line["date"] for line in found})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return [
        "# Which models of transformers are cut, and equal?",
        "",
        "Every model type of transformers that has a class, built small, planned, and held to the whole model.",
        "Generated by `make coverage`; do not edit.",
        "",
        f"torch {last['torch']}, transformers {last['transformers']}, {days}.  " + _time(found),
        "",
    ]


def _time(found: list[Found]) -> str:
    computed = sum(line.get("cpu_s", 0) for line in found)
    waited = sum(line.get("seconds", 0) for line in found)
    said = f", {computed / 3600:.1f} h of them computing" if all("cpu_s" in line for line in found) else ""
    took = f"{waited / 3600:.1f} h one after another{said}, on a machine with other work to do"
    return f"The types took {took}; `make coverage` measures two at a time."


# -- the goals --------------------------------------------------------------------------------------------------


def _goals(found: list[Found], missing: list[str]) -> list[str]:
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
    return f"{equal} equal, **{unequal} not equal**, {rest} not compared to the end"


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


# -- what is not as it should be --------------------------------------------------------------------------------


def _troubles(found: list[Found], missing: list[str]) -> list[str]:
    out = []
    for name, said in OUTCOMES.items():
        these = [line for line in found if line["outcome"] == name]
        if name == "not built" and these:
            out += [
                "## Not built",
                "",
                "With the first error: the one of the size that is nearest to the model's own.",
                "",
            ]
            out += _not_built(these)
        elif name != "equal" and these:
            out += [f"## {said[0].upper()}{said[1:]}", ""]
            out += [f"- **{line['type']}** {_plain(line['why'])}" for line in these] + [""]
    for tp in ("3", "4"):
        these = [line for line in found if line.get("degrees", {}).get(tp, {}).get("outcome", "equal") != "equal"]
        if these:
            out += [f"## Not equal, or not compared, at tp={tp}", ""]
            out += [f"- **{line['type']}** {_of_degree(line['degrees'][tp])}" for line in these] + [""]
    back = [line for line in found if line.get("way_back", "identical") != "identical"]
    if back:
        out += ["## Not merged to the same bytes", ""]
        out += [f"- **{line['type']}** {_plain(line['way_back'])}" for line in back] + [""]
    if missing:
        out += ["## Not measured", "", ", ".join(missing), ""]
    return out


def _not_built(lines: list[Found]) -> list[str]:
    """The types that were not built, by the kind of reason."""
    by_kind: dict[str, list[str]] = {said: [] for said, _ in WHY_NOT}
    for line in lines:
        first = line["why"].partition(" || ")[0]
        kind = next(said for said, pattern in WHY_NOT if re.search(pattern, first))
        by_kind[kind].append(f"- **{line['type']}** {_plain(first)}")
    out = []
    for kind, these in by_kind.items():
        out += [f"{len(these)}: {kind}.", "", *these, ""] if these else []
    return out


def _of_degree(at: Found) -> str:
    return f"{OUTCOMES[at['outcome']]}: {_plain(at.get('why', ''))}"


def _whole(found: list[Found]) -> list[str]:
    planned = [line for line in found if line.get("whole")]
    head = [
        "## What stays whole, and why",
        "",
        "Of all parameters that stay whole (most are norms and biases), the reasons given most often; a parameter may",
        "have several, one for each dim.  [Why was this left whole?](why-was-this-left-whole.md) explains each, with",
        "the remedy.",
        "",
    ]
    return [*head, *reasons_table(planned), ""] if planned else []


def _theirs(found: list[Found]) -> list[str]:
    differ = [line for line in found if line.get("theirs_differ")]
    if not differ:
        return []
    out = ["## Where transformers' own plan cuts otherwise", "", "| type | weight | here |", "|---|---|---|"]
    for line in differ:
        differing = [(name, said) for name, said in line["theirs_differ"] if UNUSED not in said]
        out += [f"| {line['type']} | {name} | {_plain(said)} |" for name, said in differing]
    return [*out, ""]


def _export(found: list[Found]) -> list[str]:
    differ = [line for line in found if line.get("export", {}).get("outcome") in ("differs", "crashed")]
    if not differ:
        return []
    out = [
        "## Where torch.export sees another flow",
        "",
        "A relation `a -> b` is a value that hangs on parameter a and meets parameter b in an op.",
        "",
    ]
    for line in differ:
        why = line["export"]["why"]
        out.append(f"- **{line['type']}** {_plain('; '.join(why[:2]) if isinstance(why, list) else why)}")
    return [*out, ""]


def _unreached(found: list[Found]) -> list[str]:
    these = [(line, sum(n for _, n in line["untouched"])) for line in found if line.get("untouched") and "cut" in line]
    if not these:
        return []
    out = [
        "## Parameters that no output depends on",
        "",
        "Some are used in training alone or with arguments that are rarely given, some lie before an op that has no",
        "gradient (the codes of a quantizer), and for some no inputs were found.",
        "",
        "| type | how many | among them |",
        "|---|--:|---|",
    ]
    for line, many in these:
        names = ", ".join(f"`{name}`" for name, _ in line["untouched"][:3])
        out.append(f"| {line['type']} | {many} | {names} |")
    return [*out, ""]


def _never(found: list[Found]) -> list[str]:
    if not (these := [line for line in found if line.get("linear_never")]):
        return []
    out = [
        "## Linear weights that no forward uses",
        "",
        "No code that the forward of the class can call names them.",
        "",
    ]
    for line in these:
        names = [f"`{name}`" for name in line["linear_never"]]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        out.append(f"- **{line['type']}** {', '.join(names[:3])}{more}")
    return [*out, ""]


# -- every type -------------------------------------------------------------------------------------------------


def _table(found: list[Found]) -> list[str]:
    columns = ("type", "class", "parameters", "cut %", "Linear cut %", "of reached %", "as transformers", "unreached")
    columns += ("rewrites", "tp=2", "ranks", "tp=3", "tp=4", "merged", "export")
    head = ["## Every type", "", f"| {' | '.join(columns)} |", f"|---|---|{'--:|' * 7}{'---|' * 6}"]
    return [*head, *(_row(line) for line in found), ""]


def _row(line: Found) -> str:
    share = [f"{100 * line[key]:.1f}" if key in line else "" for key in ("cut", "linear_cut", "linear_cut_reached")]
    theirs = line.get("theirs")
    agree = f"{theirs['same']}/{sum(theirs.values())}" if theirs else ""
    unreached = sum(n for _, n in line.get("untouched", [])) or ""
    worst = (line.get("worst") or [["", "", "", 0.0]])[0][3]
    lockstep = f"equal {worst:.0e}" if line["outcome"] == "equal" else line["outcome"]
    degrees = [line.get("degrees", {}).get(tp, {}).get("outcome", "") for tp in ("3", "4")]
    export = line.get("export", {}).get("outcome", "").removeprefix("no export")
    merged = {"identical": "same", "": ""}.get(line.get("way_back", ""), "no")
    cells = [line["type"], line.get("class", ""), f"{line.get('parameters', 0):,}", *share, agree, unreached]
    cells += [len(line.get("rewrites", [])) or "", lockstep, line.get("ranks", {}).get("outcome", ""), *degrees]
    return f"| {' | '.join(map(str, [*cells, merged, export]))} |"


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;").replace("\n", " ")[:400]


def _short(line: Found) -> Found:
    keep = ("type", "class", "by", "parameters", "inputs", "outcome", "why", "cut", "matrices_cut", "linear_cut")
    keep += ("linear_cut_default", "linear_cut_reached", "linear_never")
    keep += ("whole", "linear_whole", "theirs", "theirs_differ", "theirs_no_cheaper", "more_than_theirs")
    keep += ("degrees", "way_back", "export")
    keep += ("untouched", "rewrites", "notes", "seconds", "cpu_s")
    found = {k: line[k] for k in keep if line.get(k) not in (None, "", [], {})} | {
        "ranks": line.get("ranks", {}).get("outcome", "")
    }
    return found | {"whole": line["whole"][:WHOLE]} if "whole" in line else found
