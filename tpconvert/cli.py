"""The command ``tpconvert``: each command reads its options, calls one function and prints what it returns.

Imports are inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tpconvert.errors import CheckpointError, ConfigError, PlanError, TPConvertError
from tpconvert.options import (
    check_plan_options,
    compared,
    fingerprinted,
    local_folder,
    open_named,
    plan_of,
    plan_of_folder,
    planned,
    say_notes,
    told_as,
    weights_of,
    write_text,
)
from tpconvert.terminal.usage import LocalPath, OneLine, fail
from tpconvert.train.options import run_options, spelled

F = TypeVar("F", bound=Callable[..., Any])

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "your quota of the disk is used up"}
_FORBIDDEN = {errno.EACCES: "permission denied", errno.EPERM: "permission denied", errno.EROFS: "the disk is read-only"}


class Commands(OneLine, click.Group):
    """Turns what users can mend into one line; a traceback is left to faults of tpconvert itself."""

    command_class = OneLine

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except TPConvertError as error:
            if ctx.params.get("traceback"):
                raise
            fail(str(error), error.exit_code)
        except OSError as error:
            told = (_FULL | _FORBIDDEN).get(error.errno or 0)
            if (told is None and error.filename is None) or ctx.params.get("traceback"):
                raise
            where = f"{error.filename}: " if error.filename else ""
            hint = " Make room, or choose another disk." if error.errno in _FULL else ""
            fail(f"{where}{told or error.strerror}.{hint}", 2)
        except KeyboardInterrupt:
            fail("interrupted.", 130)


def source_options(function: F) -> F:
    """The options by which a SOURCE is opened."""
    for option in (
        click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub id."),
        click.option("--trust-remote-code", is_flag=True, help="Run code that lies beside the weights."),
        click.option("--weights", metavar="FILE", help="Safetensors for a SOURCE that is a function."),
        click.option("--task", metavar="TASK", help="The head: causal-lm, masked-lm, ... [default: the config's own]"),
    ):
        function = option(function)
    return function


def plan_options(function: F) -> F:
    """The options by which a plan is made."""
    for option in (
        click.option("--rules", multiple=True, metavar="FILE", help="More rules, in TOML; may be repeated."),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="PATTERN=whole",
            help="Leave whole; PATTERN=gathered cuts layers that would stay whole by themselves. May be repeated.",
        ),
        click.option(
            "--tp", type=click.IntRange(min=1), metavar="N", help="The degree: how many ranks share the model."
        ),
    ):
        function = option(function)
    return function


out_option = click.option("-o", "--out", required=True, metavar="DIR", help="The folder to write, or a URL.")
force_option = click.option("--force", is_flag=True, help="Replace an output that exists.")
check_option = click.option("--check", is_flag=True, help="Compare every file with its hash first.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
all_option = click.option("--all", "every", is_flag=True, help="One line a tensor, not folded over layers.")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tpconvert")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
def main(traceback: bool) -> None:
    """Automatic tensor parallelism for any PyTorch model, proved equal.

    SOURCE is a Hugging Face id or folder, or path/to/file.py:function, or package.module:function, where the function
    returns (module, example inputs).
    """


@main.command()
@click.argument("source")
@plan_options
@source_options
@click.option("-o", "--out", metavar="FILE", type=LocalPath(), help="Write the plan.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["transformers", "dtensor"]),
    help="Print it as a tp_plan of transformers, or as Python code for parallelize_module.",
)
@click.option(
    "--check-against",
    "theirs",
    metavar="TP_PLAN",
    help="Compare with a tp_plan: a JSON file, or own for the one the model brings along.",
)
@click.option("--branches", is_flag=True, help="Look at branches that the example inputs do not take; takes longer.")
@force_option
@json_option
@all_option
def plan(
    source: str,
    tp: int | None,
    overrides: tuple[str, ...],
    rules: tuple[str, ...],
    out: Path | None,
    form: str | None,
    theirs: str | None,
    branches: bool,
    force: bool,
    as_json: bool,
    every: bool,
    **opening: Any,
) -> None:
    """Show what would be cut, what stays whole, and why."""
    if form and (theirs or as_json or every or branches):
        raise click.UsageError(
            "--format prints the plan as others write it: no --check-against, --json, --all or --branches with it."
        )
    if theirs and out:
        raise click.UsageError("--check-against writes no plan: no --out with it.")
    if out and os.path.lexists(out) and not force:
        raise PlanError(f"{out}: exists already.", hint="Use --force to replace it, or choose another output.")
    if form:
        return told_as(form, source, tp, overrides, rules, out, opening)
    opened, made = planned(source, tp, overrides, rules, None, opening, branches=branches)
    made = fingerprinted(made)
    if theirs:
        return compared(opened, made, theirs, as_json)
    if out:
        write_text(out, made.dumps())
    from tpconvert.report import plan_report, plan_text

    report = plan_report(made, fold=not every)
    click.echo(json.dumps(made.to_json() | {"report": report.to_json()}) if as_json else plan_text(report))
    say_notes(opened)


@main.command()
@click.argument("source")
@plan_options
@source_options
@click.option("--plan", "plan_file", metavar="FILE", help="Use this plan.json instead of making one.")
@click.option("--init", is_flag=True, help="Weights as the model draws them at first, whatever SOURCE holds.")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="What --init draws them from. [default: 0]"
)
@out_option
@force_option
def shard(
    source: str,
    tp: int | None,
    overrides: tuple[str, ...],
    rules: tuple[str, ...],
    plan_file: str | None,
    init: bool,
    seed: int | None,
    out: str,
    force: bool,
    **opening: Any,
) -> None:
    """Write one folder of safetensors a rank, with a manifest."""
    if seed is not None and not init:
        raise click.UsageError("--seed is what --init draws weights from; without --init there is nothing to draw.")
    from tpconvert.checkpoint import shard as write
    from tpconvert.checkpoint.files.remote import output_folder
    from tpconvert.terminal.progress import progress_bar

    opened, made = planned(source, tp, overrides, rules, plan_file, opening)
    weights = weights_of(opened, seed or 0 if init else None)
    with output_folder(out, force=force) as target, progress_bar("sharding") as progress:
        manifest = write(weights, made, target, force=force, progress=progress)
    if not init:
        say_notes(opened)
    if extra := manifest.original.extra:
        click.echo(
            f"note: the model has no use for {len(extra)} tensors of {source} ({extra[0]} first); merge keeps them.",
            err=True,
        )
    for pickled, becomes in weights.store.becomes().items():
        click.echo(f"note: {pickled} is a pickle; a merge gives back {becomes} in its place.", err=True)
    click.echo(f"{out}: {len(manifest.tensors)} tensors for {manifest.tp} ranks.")


@main.command()
@click.argument("source")
@click.argument("folder", required=False, callback=local_folder)
@plan_options
@source_options
@click.option("--plan", "plan_file", metavar="FILE", help="Use this plan.json instead of making one.")
@click.option("--twin", is_flag=True, help="Verify a shrunk twin of the same classes, for a model too large to run.")
@click.option("--emulate", is_flag=True, help="All ranks in lockstep in one process, op by op: seconds.")
@click.option(
    "--sequence-parallel", is_flag=True, help="Converted so that between regions ranks have slices of tokens."
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="cuda: each rank on a GPU of its own."
)
@click.option("--dtype", type=click.Choice(["float64", "float32", "bfloat16"]), default="float64", show_default=True)
@click.option(
    "--collectives",
    type=click.Choice(["auto", "copies", "nccl"]),
    default="auto",
    help="How two GPUs sum and gather: copies into each other's memory, or NCCL; auto copies what is very large.",
)
@json_option
@all_option
def verify(
    source: str,
    folder: str | None,
    tp: int | None,
    overrides: tuple[str, ...],
    rules: tuple[str, ...],
    plan_file: str | None,
    twin: bool,
    emulate: bool,
    sequence_parallel: bool,
    device: str,
    dtype: str,
    collectives: str,
    as_json: bool,
    every: bool,
    **opening: Any,
) -> None:
    """Prove that the converted model equals the whole one; exit 0 if so, 1 if not, 2 if it could not be run."""
    from tpconvert.parallel.fits import check_plan
    from tpconvert.verify import proof_text
    from tpconvert.verify import verify as prove

    if collectives == "copies" and device == "cpu":
        raise click.UsageError("--collectives copies is between two GPUs: it needs --device cuda.")
    if emulate and (device, dtype) != ("cpu", "float64"):
        raise click.UsageError("--emulate compares in float64 on the CPU: it takes neither --device nor --dtype.")
    if plan_file and rules and not emulate:  # which finds the axes of the recorded graph anew
        raise click.UsageError("--plan is a plan already made: to verify it, only --emulate takes --rules.")
    if twin and (folder or plan_file):
        raise click.UsageError("--twin verifies a smaller model: neither a folder nor a plan is of its size.")
    if folder:
        made = plan_of_folder(Path(folder), tp, overrides, () if emulate else rules, plan_file)
        opened = open_named(source, opening)
        check_plan(opened.module, made, f"{folder}/plan.json")
    else:
        check_plan_options(tp, overrides, plan_file)
        opened = open_named(source, opening)
        if twin:
            from tpconvert.source import twin as shrink

            opened = shrink(opened)
        made = plan_of(opened, tp, overrides, rules, plan_file, judged=True)
    proof = prove(
        opened,
        made,
        folder=Path(folder) if folder else None,
        emulate=emulate,
        rules=rules,
        sequence_parallel=sequence_parallel,
        device=device,
        dtype=dtype,
        collectives=collectives,
    )
    if os.environ.get("RANK", "0") == "0":  # one of torchrun's ranks speaks for all
        say_notes(opened)
        click.echo(json.dumps(proof.to_json()) if as_json else proof_text(proof, every=every))
    if not proof.equal:
        sys.exit(1)


@main.command()
@run_options
@click.option(
    "--nproc-per-node", type=click.IntRange(min=1), metavar="N", help="Ranks here. [default: the folder's tp]"
)
def train(folder: Path, config: Path, overrides: tuple[str, ...], nproc_per_node: int | None, **how: Any) -> None:
    """Train the sharded folder DIR on this machine's devices.

    SECTION.KEY=VALUE takes the place of what the configuration says, as in training.lr=1e-4.
    """
    from tpconvert.checkpoint import read_complete
    from tpconvert.train.launch import configured, launch

    degree = read_complete(folder)[0].tp
    configured(config, overrides, how["resume"])  # a mistake is told here, once, before any rank starts
    ranks = nproc_per_node or degree
    if ranks % degree:
        raise CheckpointError(
            f"{folder} is cut for {degree} ranks, which do not divide {ranks}.",
            hint=f"Use a multiple of {degree}, or tpconvert reshard.",
        )
    sys.exit(launch([*spelled(folder, config, overrides, **how)], ranks))


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=LocalPath())
@click.option("-o", "--out", default="curves.png", show_default=True, metavar="FILE", type=LocalPath())
@force_option
def plot(runs: tuple[Path, ...], out: Path, force: bool) -> None:
    """Draw the curves of training runs: loss, gradient norm, learning rate, speed."""
    from tpconvert.train.shown.plot import CURVES
    from tpconvert.train.shown.plot import plot as draw

    if out.exists() and not force:
        raise ConfigError(f"{out}: exists already.", hint="Use --force to replace it, or choose another output.")
    click.echo(f"{out}: {', '.join(CURVES[key] for key in draw(runs, out))}")


@main.command()
@click.argument("folder", callback=local_folder)
@out_option
@force_option
@check_option
def merge(folder: str, out: str, force: bool, check: bool) -> None:
    """Write one ordinary checkpoint; for a Hugging Face source, a folder that from_pretrained loads."""
    from tpconvert.checkpoint import merge as write
    from tpconvert.checkpoint.files.remote import output_folder
    from tpconvert.terminal.progress import progress_bar

    with output_folder(out, force=force) as target, progress_bar("merging") as progress:
        write(Path(folder), target, force=force, progress=progress, check=check)
    click.echo(f"{out}: merged.")


@main.command()
@click.argument("folder", callback=local_folder)
@click.option("--tp", required=True, type=click.IntRange(min=1), metavar="M", help="The new degree.")
@out_option
@force_option
@check_option
def reshard(folder: str, tp: int, out: str, force: bool, check: bool) -> None:
    """Write a sharded folder for another number of ranks, without a whole model in between."""
    from tpconvert.checkpoint import reshard as write
    from tpconvert.checkpoint.files.remote import output_folder
    from tpconvert.terminal.progress import progress_bar

    with output_folder(out, force=force) as target, progress_bar("resharding") as progress:
        manifest = write(Path(folder), target, tp=tp, force=force, progress=progress, check=check)
    click.echo(f"{out}: {len(manifest.tensors)} tensors for {manifest.tp} ranks.")


@main.command()
@click.argument("folder", callback=local_folder)
@check_option
@json_option
@all_option
def inspect(folder: str, check: bool, as_json: bool, every: bool) -> None:
    """Show what a sharded folder holds."""
    from tpconvert.checkpoint import inspect as look
    from tpconvert.report import folder_rows, folder_text

    seen = look(Path(folder), check=check)
    if as_json:
        click.echo(json.dumps(seen.manifest.to_json()))
    else:
        click.echo(folder_text(seen.manifest, folder_rows(seen.manifest, fold=not every), where=folder))
    if seen.faults:
        files = "files" if seen.faults[1:] else "file"
        raise CheckpointError(
            f"{folder}: {' '.join(seen.faults)}", hint=f"Restore the {files}, or make the folder again."
        )
    if check:
        click.echo("Every byte is as it was written.", err=True)
