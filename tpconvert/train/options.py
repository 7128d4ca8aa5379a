"""The options of a training run, the same for ``tpconvert train`` and for ``torchrun -m tpconvert.train``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from tpconvert.terminal.usage import LocalPath

F = TypeVar("F", bound=Callable[..., Any])


def run_options(function: F) -> F:
    """All of them, handed on as ``folder, config, overrides, output, resume, trust_remote_code``."""
    path = LocalPath()
    for option in (
        click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]..."),
        click.option("--trust-remote-code", is_flag=True, help="Run the code that came with the model."),
        click.option(
            "--resume",
            is_flag=False,
            flag_value="auto",
            metavar="[auto|none|STEP]",
            help="Go on from the newest step in --output, or from the step folder given.",
        ),
        click.option("--output", metavar="DIR", type=path, help="Where steps and metrics go. [default: DIR itself]"),
        click.option("--config", required=True, metavar="FILE", type=path, help="The training configuration, in YAML."),
        click.argument("folder", metavar="DIR", type=path),
    ):
        function = option(function)
    return function


def spelled(
    folder: Path,
    config: Path,
    overrides: tuple[str, ...],
    output: Path | None,
    resume: str | None,
    trust_remote_code: bool,
) -> Iterator[str]:
    """The same as arguments again, for the ranks."""
    yield from ("--config", str(config))
    if output is not None:
        yield from ("--output", str(output))
    if resume is not None:
        yield f"--resume={resume}"
    if trust_remote_code:
        yield "--trust-remote-code"
    yield from ("--", str(folder), *overrides)
