"""Op rules: those of ``rules/ops.toml``, those written as functions, and the user's own."""

from __future__ import annotations

import difflib
import inspect
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tpconvert.analyze.axes.run import Axes, Dims, Rule, nodes_in, tensors
from tpconvert.analyze.axes.terms import Term, V
from tpconvert.analyze.ops import index as ops_index
from tpconvert.analyze.ops import math as ops_math
from tpconvert.analyze.ops import shape as ops_shape
from tpconvert.analyze.ops import space as ops_space
from tpconvert.errors import RuleError


def rules_folder() -> Path:
    """Where the shipped rules are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[2]
    inside = package / "rules"
    return inside if inside.is_dir() else package.parent / "rules"


class Rules(dict[str, Rule]):
    """Op name -> rule; an op that torch tags as pointwise has one without a line anywhere."""

    def get(self, name: str, default: Any = None) -> Any:
        """The rule of an op, or ``default``."""
        if name in self:
            return self[name]
        return POINTWISE if is_tagged_pointwise(name) else default


def load_rules(files: Sequence[Path] = ()) -> Rules:
    """The shipped rules, overridden by those in ``files``.  Raises RuleError naming the file and the entry."""
    rules = Rules()
    for path in (rules_folder() / "ops.toml", *files):
        rules.update(read_rules(path))
    return rules


def read_rules(path: Path) -> dict[str, Rule]:
    """The op rules of one TOML file."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise RuleError(f"{path}: {error.strerror or error}.", hint="--rules takes a file in TOML.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RuleError(f"{path} is not TOML: {error}.") from None
    if not data:
        raise RuleError(f"{path}: holds no rules.", hint="Write [[op]], [[pointwise]], [[function]] or [[pattern]].")
    if unknown := set(data) - {"op", "pointwise", "function", "pattern"}:
        raise RuleError(
            f"{path}: unknown table {sorted(unknown)[0]!r}.",
            hint="Use [[op]], [[pointwise]], [[function]] or [[pattern]].",
        )
    out: dict[str, Rule] = {}
    for entry in data.get("pointwise", ()):
        _check(path, entry, {"names", "linear", "joint", "args", "unless"})
        rule = replace(
            POINTWISE,
            args=tuple(entry.get("args", "input other").split()),
            linear=frozenset(entry.get("linear", "").split()),
            joint=frozenset(entry.get("joint", "").split()),
            unless=frozenset(entry.get("unless", "").split()),
            origin=path.name,
        )
        out.update(dict.fromkeys(entry["names"].split(), rule))
    for entry in data.get("function", ()):
        _check(path, entry, {"names"})
        rule = Rule(lambda ax, node, bound: ax.opaque(node, "it is seen through"), through=True, origin=path.name)
        out.update(dict.fromkeys(entry["names"].split(), rule))
    for entry in data.get("op", ()):
        _check(path, entry, {"names", "dims", "rule", "args", "linear", "joint", "added", "unless", "whole"})
        rule = _rule(path, entry)
        out.update(dict.fromkeys(entry["names"].split(), rule))
    return out


def _rule(path: Path, entry: Mapping[str, Any]) -> Rule:
    """The rule of an [[op]] entry, which says ``dims``, names a ``rule`` function, or why all stays ``whole``."""
    if "whole" in entry:
        why = str(entry["whole"])
        return Rule(lambda ax, node, bound: ax.opaque(node, why), origin=path.name)
    return _function_rule(path, entry) if "rule" in entry else _dims_rule(path, entry)


def _check(path: Path, entry: Any, known: set[str]) -> None:
    """Raise RuleError for an entry without names, with a key that is not known, or a value that is no text."""
    if not isinstance(entry, Mapping):
        raise RuleError(f"{path}: {entry!r} is no entry.", hint="Write [[op]], in double brackets, and names = ...")
    if "names" not in entry:
        raise RuleError(f"{path}: an entry has no names: {dict(entry)}.")
    if unknown := set(entry) - known:
        raise RuleError(
            f"{path}: {entry['names']!r} has an unknown key {sorted(unknown)[0]!r}.",
            hint=f"Known: {', '.join(sorted(known))}.",
        )
    for key, value in entry.items():
        if not isinstance(value, str):
            raise RuleError(f"{path}: {entry['names']!r}: {key} is {value!r}, but it is written as text in quotes.")


OPS = (ops_shape, ops_index, ops_math, ops_space)
"""Where rule functions are."""


def _function_rule(path: Path, entry: Mapping[str, Any]) -> Rule:
    functions = {n: f for m in OPS for n, f in vars(m).items() if inspect.isfunction(f)}
    function = functions.get(entry["rule"])
    if function is None or entry["rule"].startswith("_"):
        near = difflib.get_close_matches(entry["rule"], functions, 1)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise RuleError(f"{path}: {entry['names']!r}: there is no rule function {entry['rule']!r}.", hint=hint)
    return Rule(
        function,
        tuple(entry.get("args", "").split()),
        frozenset(entry.get("linear", "").split()),
        frozenset(entry.get("joint", "").split()),
        entry.get("added", ""),
        origin=path.name,
        unless=frozenset(entry.get("unless", "").split()),
    )


_MARK = re.compile(r"\.\.\.|\w+[+!]*")


def _dims_rule(path: Path, entry: Mapping[str, Any]) -> Rule:
    left, arrow, right = entry.get("dims", "").partition("->")
    operands = [o.partition(":") for o in left.split(",")]
    marks = [mark for dims in (*(o[2] for o in operands), *right.split(";")) for mark in dims.split()]
    if not arrow or not all(colon for _, colon, _ in operands) or not all(_MARK.fullmatch(m) for m in marks):
        raise RuleError(f"{path}: {entry['names']!r}: dims must look like 'input: ... i+, weight: o i -> ... o'.")
    args = tuple(name.strip() for name, _, _ in operands)
    letters = [dims.split() for _, _, dims in operands]
    known = {d.rstrip("+!") for dims in letters for d in dims}
    results = [part.split() for part in right.split(";")]
    named = {n for key in ("linear", "added") for n in entry.get(key, "").split()}
    if unknown := named - set(args):
        raise RuleError(
            f"{path}: {entry['names']!r}: {sorted(unknown)[0]!r} is not one of its operands {', '.join(args)}."
        )
    return Rule(
        _by_letters(args, letters, results, known),
        args,
        frozenset(entry.get("linear", "").split()),
        added=entry.get("added", ""),
        origin=path.name,
    )


def _by_letters(
    args: tuple[str, ...], letters: list[list[str]], results: list[list[str]], known: set[str]
) -> Callable[[Axes, fx.Node, dict[str, Any]], Any]:
    """A rule that unifies dims of one letter; ``+`` contracts, ``!`` blocks, ``...`` broadcasts."""

    def apply(ax: Axes, node: fx.Node, bound: dict[str, Any]) -> Any:
        terms: dict[str, Term] = {}
        batches: list[Dims] = []
        for name, dims in zip(args, letters, strict=True):
            if not isinstance(bound.get(name), fx.Node):
                continue
            own = ax.of(bound[name])
            if "..." in dims:
                rest = len(dims) - 1
                if len(own) < rest:
                    raise ValueError(f"{name} has {len(own)} dims")
                at = dims.index("...")
                batches.append(own[at : len(own) - (rest - at)])
                own = own[:at] + own[len(own) - (rest - at) :]
                dims = [d for d in dims if d != "..."]
            for mark, term in zip(dims, own, strict=True):
                letter = mark.rstrip("+!")
                if letter in terms:
                    ax.unify(terms[letter], term, node)
                terms.setdefault(letter, term)
                if mark.endswith("+"):
                    ax.contract(term, node)
                if mark.endswith("!"):
                    ax.block(term, node, f"{node.meta['op']} needs all of this dim")
        rank = max(map(len, batches), default=0)
        sizes = [max(d[-i].n for d in batches if len(d) >= i) for i in range(rank, 0, -1)]
        batch = ax.broadcast(node, batches, sizes)
        shapes = [list(t.shape) for t in tensors(node.meta["val"])]
        outs = []
        for marks, shape in zip(results, shapes, strict=True):
            out: Dims = []
            for mark in marks:
                letter = mark.rstrip("+!")
                if mark == "...":
                    out += batch
                else:
                    out.append(terms[letter] if letter in known else V(shape[len(out)]))
                    if mark.endswith("!"):
                        ax.block(out[-1], node, f"{node.meta['op']} needs all of this dim")
            outs.append(out)
        return outs if not isinstance(node.meta["val"], torch.Tensor) else outs[0]

    return apply


def pointwise(ax: Axes, node: fx.Node, bound: dict[str, Any]) -> Any:
    """Elementwise: all operands meet, broadcast from the right."""
    operands = [ax.of(n) for n in nodes_in((node.args, node.kwargs))]
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return ax.broadcast(node, operands, value.shape)
    return [ax.broadcast(node, operands, t.shape) for t in tensors(value)]


POINTWISE = Rule(pointwise, ("input", "other"))


def is_tagged_pointwise(name: str) -> bool:
    """Whether torch tags the aten op of this name as pointwise."""
    packet = getattr(torch.ops.aten, name.strip("_"), None)
    overloads = getattr(packet, "overloads", None)
    if overloads is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in overloads())
