"""The best step of a run by what was held out: which one it is, and the link that names it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpconvert.errors import CheckpointError, ConfigError
from tpconvert.train.settings.config import Checkpoint

LINK = "best"
"""``OUTPUT/best``: the step folder, by a link within OUTPUT, so that both can be moved together."""


@dataclass(frozen=True, slots=True)
class Best:
    """A step, and what makes it the best so far."""

    step: int
    metric: str
    value: float

    def told(self) -> str:
        """In words.

        >>> Best(60, "eval_loss", 1.25).told()
        'eval loss 1.2500'
        """
        return f"{self.metric.replace('_', ' ')} {self.value:.4f}"


def best_of(step: int, found: Mapping[str, float], settings: Checkpoint, before: Best | None) -> Best | None:
    """The step with these measures, if it is better than the best ``before`` it."""
    value = found.get(settings.best_metric, math.nan)
    if not math.isfinite(value):
        return None
    fresh = Best(step, settings.best_metric, value)
    if before is None or before.metric != fresh.metric:
        return fresh
    return fresh if (value > before.value if settings.greater else value < before.value) else None


def check_link(output: Path) -> None:
    """Raise where something else has the name of the link."""
    path = output / LINK
    if path.exists() and not path.is_symlink():
        raise ConfigError(
            f"{path}: is no link to a step, which checkpoint.keep_best makes under this name.",
            hint="Remove it, or choose another --output.",
        )


def link_to(output: Path, step: str | None) -> None:
    """Let the link name this step, or nothing; at no time is there another or half a one."""
    link, fresh = output / LINK, output / f".{LINK}"
    try:
        if step is not None:
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(step, target_is_directory=True)
            fresh.replace(link)
        elif link.is_symlink():
            link.unlink()
    except OSError as error:
        raise CheckpointError(f"{link}: cannot be made a link to {step} ({error.strerror}).") from None


def linked(output: Path) -> Path | None:
    """The step that the link names."""
    with contextlib.suppress(OSError):
        return output / (output / LINK).readlink()
    return None
