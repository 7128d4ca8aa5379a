"""What commands share: a SOURCE opened, a plan made or read, as the options say."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpconvert.errors import PlanError, SourceError

if TYPE_CHECKING:
    from tpconvert.checkpoint import Weights
    from tpconvert.source import Source
    from tpconvert.spec.plan import Plan

MADE = "plan"
"""Where a plan has the fingerprint of what it says, beside what it says of its source."""


def local_folder(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A folder to read; of a URL a copy on this machine."""
    if value is None or "://" not in value:
        return value
    from tpconvert.checkpoint.files.remote import fetch_folder

    return str(fetch_folder(value))


def planned(
    source: str,
    tp: int | None,
    overrides: tuple[str, ...],
    rules: tuple[str, ...],
    plan_file: str | None,
    opening: dict[str, Any],
    *,
    branches: bool = False,
) -> tuple[Source, Plan]:
    """The SOURCE, opened, and a plan for it."""
    check_plan_options(tp, overrides, plan_file)
    opened = open_named(source, opening)
    return opened, plan_of(opened, tp, overrides, rules, plan_file, branches=branches)


def told_as(
    form: str,
    source: str,
    tp: int | None,
    overrides: tuple[str, ...],
    rules: tuple[str, ...],
    target: Path | None,
    opening: dict[str, Any],
) -> None:
    """Print or write the plan in the words of another library, and what had to stay whole for that."""
    from tpconvert.formats import dtensor, transformers
    from tpconvert.formats.express import express
    from tpconvert.source.blame import blaming

    check_plan_options(tp, overrides, None)
    opened = open_named(source, opening)
    module = opened.module
    abilities = transformers.abilities(module) if form == "transformers" else dtensor.ABILITIES
    with blaming(f"{opened.name} failed while it was traced"):
        found = express(
            module,
            opened.inputs,
            tp=tp or 1,
            abilities=abilities,
            overrides=overrides,
            rules=rules,
            source=opened.description,
        )
    if form == "transformers":
        text = json.dumps(transformers.tp_plan(module, found), indent=2) + "\n"
    else:
        text = dtensor.dtensor_code(module, found)
    if target:
        write_text(target, text)
    else:
        click.echo(text, nl=False)
    for note in (*found.notes(), *opened.notes):
        click.echo(f"note: {note}", err=True)


def compared(opened: Source, made: Plan, theirs: str, as_json: bool) -> None:
    """Print how a tp_plan agrees with ours; exit 0 where it does, 1 where not."""
    from tpconvert.formats.agreement import OWN, agreement, agreement_text, read_tp_plan

    found = agreement(opened.module, made, None if theirs == OWN else read_tp_plan(Path(theirs)))
    click.echo(json.dumps(found.to_json()) if as_json else agreement_text(found, opened.name))
    say_notes(opened)
    if not found.agree:
        sys.exit(1)


def open_named(source: str, opening: dict[str, Any]) -> Source:
    """The SOURCE, opened."""
    from tpconvert.source import open_source

    return open_source(source, **opening)


def plan_of(
    opened: Source,
    tp: int | None,
    overrides: tuple[str, ...],
    rules: tuple[str, ...],
    plan_file: str | None,
    *,
    judged: bool = False,
    branches: bool = False,
) -> Plan:
    """A plan of an opened SOURCE: that of a file, or a new one; ``judged`` is one that is proved or disproved next."""
    if plan_file and judged:
        from tpconvert.parallel.fits import check_plan

        plan = read_plan(Path(plan_file), tp)
        check_plan(opened.module, plan, plan_file)
        return plan
    if plan_file:
        return given_plan(opened, Path(plan_file), tp, rules)
    from tpconvert.planning import make_plan
    from tpconvert.source.blame import blaming

    with blaming(f"{opened.name} failed while it was traced"):
        return make_plan(
            opened.module,
            opened.inputs,
            tp=tp or 1,
            overrides=overrides,
            rules=tuple(map(Path, rules)),
            source=opened.description,
            branches=branches,
        )


def weights_of(opened: Source, seed: int | None) -> Weights:
    """What is to be sharded: the SOURCE's weights, or those that it draws from a seed."""
    from tpconvert.spec.manifest import NAME

    if seed is not None and opened.initial is not None:
        return opened.initial(seed)
    if not opened.has_weights and not (Path(opened.name) / NAME).is_file():  # of which weights() says what it is
        raise SourceError(f"{opened.name} holds no weights.", hint="Fetch them, or draw new ones with --init.")
    return opened.weights()


def check_plan_options(tp: int | None, overrides: tuple[str, ...], plan_file: str | None) -> None:
    """Refuse options that have no effect beside others."""
    if plan_file and overrides:
        raise click.UsageError("--plan is a plan already made: --set has no effect on it.")
    if tp is None and not plan_file:
        raise click.UsageError("Missing option '--tp'.")


def plan_of_folder(
    folder: Path, tp: int | None, overrides: tuple[str, ...], rules: tuple[str, ...], plan_file: str | None
) -> Plan:
    """The plan a folder was sharded by: what lies there is to be proved, not what would be made today."""
    from tpconvert.checkpoint import read_complete

    if overrides or rules or plan_file:
        raise click.UsageError("A folder brings its own plan: --plan, --set and --rules have no effect on it.")
    held, plan = read_complete(folder)
    degree = held.tp
    if tp not in (None, degree):
        raise PlanError(f"{folder} is cut for {degree} ranks, not {tp}.", hint=f"Leave --tp out, or use --tp {degree}.")
    return plan


def read_plan(path: Path, tp: int | None) -> Plan:
    """A plan from a file."""
    from tpconvert.checkpoint.plans import read_plan_file

    plan = read_plan_file(path)
    if tp not in (None, plan.tp):
        raise PlanError(f"{path} is a plan for tp={plan.tp}, not {tp}.", hint=f"Leave --tp out, or use --tp {plan.tp}.")
    return plan


def given_plan(opened: Source, path: Path, tp: int | None, rules: tuple[str, ...]) -> Plan:
    """A plan from a file, held to the SOURCE; one that was edited is tried out, and that it was is told."""
    from tpconvert.planning.given import hold_given

    plan = read_plan(path, tp)
    changed = plan.source.get(MADE) != fingerprint(plan)
    other = any(plan.source.get(key) != value for key, value in opened.description.items())  # or of another version
    hold_given(opened.module, opened.inputs, plan, str(path), changed=changed or other, rules=tuple(map(Path, rules)))
    if changed:
        click.echo(
            f"note: {path} was edited, or not written by tpconvert plan. It has what the model asks for; "
            "tpconvert verify shows whether the numbers are right.",
            err=True,
        )
    return plan


def fingerprinted(plan: Plan) -> Plan:
    """The plan with a fingerprint of what it says, by which is seen that somebody edited it."""
    return replace(plan, source={**plan.source, MADE: fingerprint(plan)})


def fingerprint(plan: Plan) -> str:
    """Of all that a plan says, but for its own fingerprint."""
    source = {key: value for key, value in plan.source.items() if key != MADE}
    return hashlib.sha256(replace(plan, source=source).dumps().encode()).hexdigest()[:16]


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: a full disk leaves what was there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except FileNotFoundError:
        if path.parent.is_dir():
            raise PlanError(f"{path}: cannot be written there.", hint="Choose another output.") from None
        raise PlanError(f"{path}: there is no folder {path.parent}.") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # not the name that nobody gave
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def say_notes(opened: Source) -> None:
    """Tell what was assumed in opening a SOURCE."""
    for note in opened.notes:
        click.echo(f"note: {note}", err=True)
