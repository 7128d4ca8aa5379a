"""The command ``tpconvert``: each command reads its options, calls one function and prints what it returns."""

from __future__ import annotations

import click


@click.group()
@click.version_option(package_name="tpconvert")
def main() -> None:
    """Automatic tensor parallelism for any PyTorch model, proved equal."""
