"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.compare.growth import growth
from benchmarks.compare.markup import cells, number, table, told

Row = dict[str, Any]


def short(result: Any) -> str:
    """One result on a line."""
    if isinstance(result, list):
        return f"{len(result)} rows"
    if "ms" in result:
        more = f", exposed {result['exposed_ms']:.1f} ms" if "exposed_ms" in result else ""
        loss = (
            f", loss {result['loss']:.4f}, norm {result.get('grad_norm', float('nan')):.4g}" if "loss" in result else ""
        )
        return (
            f"{result['ms']:.1f} ms, {result['peak_gib']:.2f} GiB{more}{loss}, ready after {result['prepared_s']:.0f} s"
        )
    kept = {k: v for k, v in result.items() if k not in ("part", "job", "checks", "verdict")}
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in kept.items())


def markdown(rows: Sequence[Row], calls: Sequence[Row]) -> str:
    """All tables."""
    out = [
        f"- `{c['command']}`: {c['seconds']} s, torch {c['torch']}, transformers {c['transformers']}, "
        f"{c['gpus']} {'CPUs with gloo' if c['toy'] else 'GPUs'}{': ' * ('gives' in c)}{c.get('gives', '')}."
        for c in calls
    ]
    for part, title in (
        ("steps", "Over NCCL"),
        ("alone", "Rank 0 alone"),
        ("others", "Other models, rank 0 alone"),
    ):
        mine = [r for r in rows if r["part"] == part and "ms" in r]
        wholes = wholes_of(rows)
        for size in dict.fromkeys(r["size"] for r in mine):
            out += ["", f"## {title}: {size}", "", *steps([r for r in mine if r["size"] == size], wholes)]
    out += section(
        "Bandwidth",
        [r for r in rows if r["part"] == "bandwidth" and "MiB" in r],
        (
            "ranks",
            "MiB",
            "all_reduce_ms",
            "reduce_scatter_ms",
            "all_gather_ms",
            "all_reduce_gb_per_s",
            "copied_sum_ms",
            "copied_scatter_ms",
            "copied_gather_ms",
            "copied_sum_gb_per_s",
        ),
    )
    out += section(
        "Proofs on GPUs",
        [r for r in rows if r["part"].startswith("verify") and "model" in r],
        ("model", "tp", "dtype", "sequence_parallel", "collectives", "equal", "checks", "largest", "bound"),
    )
    out += section(
        "Loading",
        [r for r in rows if r["part"].startswith("load") and "way" in r and "seconds" in r],
        ("way", "ranks", "cold", "seconds", "gb_a_rank", "gb_per_s_a_rank", "disk_read_over_own"),
    )
    for row in rows:
        if row["part"] in ("runner", "written") and "error" not in row:
            out += [
                "",
                f"## {row['part'].capitalize()}",
                "",
                *(f"- {k}: {told(v)}" for k, v in row.items() if k not in ("part", "job", "call")),
            ]
    out += growth(rows)
    failed = [r for r in rows if "error" in r]
    if failed:
        out += ["", "## Not measured", "", *(f"- {r.get('job', r.get('name'))}: {r['error']}" for r in failed)]
    return "\n".join(out) + "\n"


def wholes_of(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """The whole models that cases are measured against, those of their own call: GPUs differ from call to call.

    Where a call has none, what is converted for tp=1 is one.
    """
    found = {}
    for way in ("converted", "whole"):
        alike = (r for r in rows if r.get("way") == way and "ms" in r and r["tp"] == 1 and not r["sequence_parallel"])
        found |= {(*size_key(r), graphed(r)): r for r in alike}
    return found


def steps(rows: Iterable[Row], wholes: dict[tuple[Any, ...], Row]) -> list[str]:
    """One row a case; *ideal* is the whole model's time on one GPU over tp, at equal compile settings."""
    lines = table(
        (
            "",
            "ms",
            "tokens/s",
            "peak GiB",
            "ideal / ms",
            "exposed ms",
            "idle ms",
            "collectives",
            "loss",
            "gradient norm",
        )
    )
    for r in sorted(
        rows, key=lambda r: (r["way"] != "whole", r["tp"], r["way"] != "converted", r["compiled"], r["name"])
    ):
        whole = wholes.get((*size_key(r), graphed(r))) or wholes.get((*size_key(r), False))
        ratio = (
            whole["ms"] / r["tp"] / r["ms"] if whole not in (None, r) and r["way"] not in ("whole", "fsdp") else None
        )
        calls = r.get("nccl_kernels") or r.get("collectives") or {}
        lines.append(
            cells(
                (
                    r["name"],
                    f"{r['ms']:.1f}",
                    f"{r['tokens_per_s']:,.0f}",
                    f"{r['peak_gib']:.2f}",
                    number(ratio, 2),
                    number(r.get("exposed_ms"), 1),
                    number(r.get("idle_ms"), 1),
                    ", ".join(f"{n:g} {k}" for k, n in calls.items()),
                    number(r.get("loss") if r["network"] or r["way"] == "whole" else None, 4),
                    number(r.get("grad_norm"), 4),
                )
            )
        )
    return lines


def size_key(row: Row) -> tuple[Any, ...]:
    """What a case shares with the whole model it is measured against."""
    return row.get("call"), *(row[k] for k in ("model", "layers", "width", "tokens", "compiled", "optimizer"))


def graphed(row: Row) -> bool:
    """Whether it was run as a CUDA graph."""
    return "graphed" in dict(row["options"])


def section(title: str, rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """A table of the given keys."""
    names = [name for name in names if any(name in row for row in rows)]
    if not rows:
        return []
    return ["", f"## {title}", "", *table(names), *(cells([told(r.get(n)) for n in names]) for r in rows)]
