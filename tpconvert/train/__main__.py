"""``torchrun --nproc-per-node N -m tpconvert.train DIR --config C.yaml [section.key=value ...]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from tpconvert.terminal.usage import OneLine
from tpconvert.train.launch import BEGUN, main
from tpconvert.train.options import run_options


@click.command(cls=OneLine, context_settings={"help_option_names": ["-h", "--help"]})
@run_options
def command(
    folder: Path,
    config: Path,
    overrides: tuple[str, ...],
    output: Path | None,
    resume: str | None,
    trust_remote_code: bool,
) -> None:
    """Train the sharded folder DIR on the ranks that torchrun started."""
    try:
        code = main(folder, config, overrides, output=output, resume=resume, trust_remote_code=trust_remote_code)
    except KeyboardInterrupt:
        if BEGUN not in os.environ:  # else who launched this rank says so, once
            click.echo("error: interrupted.", err=True)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    command(prog_name="python -m tpconvert.train")
