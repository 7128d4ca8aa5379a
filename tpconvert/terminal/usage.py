"""Commands whose mistakes are one line each, with the way out, as all other errors are."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

SPEAKS = "LOCAL_RANK"
"""Under torchrun all ranks find the same mistake, and the first of each machine tells it."""


def fail(message: str, code: int) -> NoReturn:
    """Say what is wrong, and end."""
    if os.environ.get(SPEAKS, "0") == "0":
        click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(code)


class LocalPath(click.Path):
    """A path of this machine, for what is not a folder that is read once or written once."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if isinstance(value, str) and "://" in value:
            self.fail(f"{value} is a URL; here only a path of this machine will do.", param, ctx)
        return super().convert(value, param, ctx)


class OneLine(click.Command):
    """A command, or a group of them, whose usage errors name the page of help in place of printing its head."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run it; for all but embedding programs this ends the process."""
        run: Callable[[], Any] = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except click.ClickException as error:
            if type(error).__name__ != "NoArgsIsHelpError":  # which click has had since 8.2
                fail(_told(error), error.exit_code)
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            fail("interrupted.", 130)
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is flushed when the process ends
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, but for what is empty, as a variable of a shell is that is not set."""
        mine = () if isinstance(self, click.Group) else args  # a group has its command's too
        for before, arg in zip(["", *mine], mine, strict=False):
            if arg == "" or (arg.startswith("-") and arg.endswith("=")):
                what = arg.removesuffix("=") or (before if before.startswith("-") else "an argument")
                raise click.UsageError(f"{what} is empty; is a variable of the shell not set?", ctx)
        return super().parse_args(ctx, args)


def _told(error: click.ClickException) -> str:
    text = error.format_message()
    text = text if text.endswith((".", "?")) else f"{text}."
    context = getattr(error, "ctx", None)
    return f"{text} See {context.command_path} --help." if context is not None else text
