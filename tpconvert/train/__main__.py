"""``torchrun --nproc-per-node N -m tpconvert.train DIR --config C.yaml [section.key=value ...]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from tpconvert.train.launch import BEGUN, main


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--config", "config_path", metavar="FILE", type=click.Path(path_type=Path), required=True)
@click.option(
    "--output", metavar="DIR", type=click.Path(path_type=Path), help="Where steps and metrics go; default: DIR."
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="auto",
    metavar="[auto|none|STEP]",
    help="Go on from the newest step, or from the folder given.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run the code that came with the model.")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
def command(
    folder: Path,
    config_path: Path,
    output: Path | None,
    resume: str | None,
    trust_remote_code: bool,
    overrides: tuple[str, ...],
) -> None:
    """Train the sharded folder DIR on the ranks that torchrun started."""
    try:
        code = main(
            folder, config_path, overrides, output=output, resume=resume, trust_remote_code=trust_remote_code
        )  # fmt: skip
    except KeyboardInterrupt:
        if BEGUN not in os.environ:  # else who launched this rank says so, once
            click.echo("error: interrupted.", err=True)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    command(prog_name="python -m tpconvert.train")
