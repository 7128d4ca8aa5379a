"""The curves of one or several runs as a picture, from what they wrote to ``metrics.jsonl``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpconvert.errors import ConfigError

FILE = "metrics.jsonl"
CURVES = {
    "loss": "loss",
    "eval_loss": "loss on what was held out",
    "eval_accuracy": "share of the held-out labels that are right",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_second_per_gpu": "tokens/s of each rank",
    "mfu": "share of the GPU's peak",
    "communication_seconds": "s a step, only communicating",
    "memory_gib": "GiB, peak of rank 0",
}
"""What a line may hold -> how it is called; drawn where some run has it and it is not zero throughout."""

Curve = list[tuple[int, float]]


def plot(runs: Sequence[Path], out: Path) -> list[str]:
    """Draw the curves of all runs into ``out``; the names of those drawn."""
    figure_of = _matplotlib()
    held = {name: read_run(run) for name, run in zip(_names(runs), runs, strict=True)}
    drawn = [key for key in CURVES if any(value for run in held.values() for _, value in run.get(key, ()))]
    rows = (len(drawn) + 1) // 2
    figure = figure_of(figsize=(11, 1 + 3 * rows), layout="constrained")
    for place, key in enumerate(drawn, 1):
        axes = figure.add_subplot(rows, 2, place)
        for name, run in held.items():
            if points := run.get(key):
                axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) == 1 else None)
        axes.set_title(CURVES[key], fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(held) > 1 and place == 1:
            axes.legend(fontsize=8)
    partial = out.with_name(f".partial.{out.name}")
    try:
        figure.savefig(partial, dpi=120, format=None if out.suffix else "png")
        partial.replace(out)
    except (OSError, ValueError) as error:  # ValueError: an ending that names no kind of picture
        raise ConfigError(
            f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}.", hint="Choose another --out."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return drawn


def read_run(run: Path) -> dict[str, Curve]:
    """The curves of a run, by what its lines hold."""
    path = run / FILE if run.is_dir() else run
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        hint = "Name the output folder of a run with logging.jsonl: true."
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).", hint=hint) from None
    curves: dict[str, Curve] = {}
    for line in map(_entry, lines):
        for key in CURVES.keys() & line.keys():
            if isinstance(line[key], int | float):
                curves.setdefault(key, []).append((line["step"], line[key]))
    if not curves:
        raise ConfigError(f"{path}: holds no steps.", hint="Name the output folder of a run that has logged some.")
    return curves


def _entry(line: str) -> Mapping[str, Any]:
    """One line; nothing of one that was cut off by the end of its run."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else {}


def _names(runs: Sequence[Path]) -> list[str]:
    """What runs are called: their folders' names where these differ, else the whole paths."""
    short = [(run if run.is_dir() else run.parent).resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run) for run in runs]


def _matplotlib() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "Curves are drawn with matplotlib, which is missing.", hint="pip install 'tpconvert[plot]'"
        ) from None

    def figure(**options: Any) -> Any:
        made = Figure(**options)
        FigureCanvasAgg(made)
        return made

    return figure
