"""The table of what was found, as Markdown, and the same as a file for machines."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zoo.facts import UNUSED
from benchmarks.zoo.goals import OUTCOMES, Found, goals
from benchmarks.zoo.whole import reasons_table

PAGE_DATA = "coverage.jsonl"
OUT = "out of memory"
WHOLE = 6
"""Reasons of a type that are counted, those of most parameters."""
HOW_TO_READ = """\
## How to read it

Each type is built from its default configuration with random weights, its widths and its counts of layers made small;
it is the class's own code that runs.  `by` in `coverage.jsonl` says how much smaller.  What a default lacks, or what
hangs together in it, is given in `benchmarks/zoo/configs.toml`, type by type.  Every process had at most {limits}.

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
    ("its class has no forward", r"has no forward"),
    ("no inputs were found", r"no example is known"),
    ("its default configuration, or the inputs found, do not fit", r""),
)
"""Kinds of reasons for not being built, the first that fits, by what is said."""


def render(
    source: Path, folder: Path, known: Sequence[str] = (), limits: str = "no limits", *, onto: bool = False
) -> None:
    """Write ``coverage.md`` and ``coverage.jsonl`` into a folder from the lines of a run.

    ``known`` are the types that there are; those without a line are counted as not measured.  ``limits`` are those
    that the run had.  ``onto`` keeps what the folder's own file says of types that the run did not measure.
    """
    text = (folder / PAGE_DATA).read_text() if onto else ""
    lines = [json.loads(line) for line in (text + _plain_errors(source.read_text())).splitlines() if line.strip()]
    for line in lines:
        line["whole"] = line.get("whole", [])[:WHOLE]  # which is what the folder's file keeps
    found = sorted({line["type"]: line for line in lines}.values(), key=lambda line: line["type"])
    for line in found:
        line["outcome"], line["why"] = outcome(line)
        if "linear_cut_default" not in line:  # measured of a plan without options
            line["linear_cut_default"] = line.get("linear_cut")
    missing = sorted(set(known) - {line["type"] for line in found})
    folder.mkdir(exist_ok=True)
    sections = [
        *_head(found),
        *goals(found, missing),
        HOW_TO_READ.format(limits=limits),
        *_troubles(found, missing),
        *_whole(found),
        *_theirs(found),
    ]
    sections += [*_export(found), *_unreached(found), *_never(found), *_table(found), ""]
    (folder / "coverage.md").write_text("\n".join(sections))
    (folder / PAGE_DATA).write_text("".join(json.dumps(_short(line)) + "\n" for line in found))


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
        _commits(found),
        "",
    ]


def _commits(found: list[Found]) -> str:
    """Which code the lines are of: a file that grows holds those of several commits."""
    counts = Counter(line.get("commit", "") for line in found)
    of = [f"{name} ({n})" if name else f"older ones ({n})" for name, n in counts.most_common()]
    return f"Commits that were measured, with their types: {', '.join(of)}."


def _time(found: list[Found]) -> str:
    computed = sum(line.get("cpu_s", 0) for line in found)
    waited = sum(line.get("seconds", 0) for line in found)
    said = f", {computed / 3600:.1f} h of them computing" if all("cpu_s" in line for line in found) else ""
    took = f"{waited / 3600:.1f} h one after another{said}, on a machine with other work to do"
    return f"The types took {took}; `make coverage` measures two at a time."


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
        "Of all parameters that stay whole (most are norms and biases), the reasons given most often, of each type its",
        f"{WHOLE} most frequent; a parameter may have several, one for each dim.",
        "[Why was this left whole?](why-was-this-left-whole.md) explains each, with",
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
    keep += ("untouched", "rewrites", "notes", "seconds", "cpu_s", "torch", "transformers", "date", "commit")
    found = {k: line[k] for k in keep if line.get(k) not in (None, "", [], {})}
    if "ranks" in line:
        found["ranks"] = {"outcome": line["ranks"]["outcome"]}
    return found | {"worst": line["worst"][:1]} if line.get("worst") else found
