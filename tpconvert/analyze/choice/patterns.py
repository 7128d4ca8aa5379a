"""Names for axes: which pattern an axis is, and the role of each parameter in it.

The features are facts of the trace; what combination is called what, and whether it is cut, is data in
``rules/patterns.toml``.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from tpconvert.analyze.axes.run import Axes, is_many
from tpconvert.analyze.axes.terms import Term, atoms, leaves, segments
from tpconvert.analyze.ops.rules import rules_folder
from tpconvert.errors import RuleError

FEATURES = [
    "lookup",
    "positions",
    "returned",
    "column",
    "columns",
    "row",
    "softmax",
    "fused",
    "stacked",
    "gate",
    "convolution",
    "scan",
    "two-inputs",
]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name for axes with these features, and the policy for them."""

    name: str
    features: frozenset[str]
    without: frozenset[str] = frozenset()
    cut: bool = True
    """Whether such axes are cut at all."""
    uneven: bool = True
    """Whether ranks may hold unequal numbers of units."""


def load_patterns(files: Sequence[Path] = ()) -> list[Pattern]:
    """The user's patterns, then the shipped ones.  Raises RuleError naming the file and the entry."""
    out: list[Pattern] = []
    for path in (*files, rules_folder() / "patterns.toml"):
        try:
            entries = tomllib.loads(path.read_text()).get("pattern", ())
        except OSError as error:
            raise RuleError(f"{path}: {error.strerror or error}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RuleError(f"{path} is not TOML: {error}.") from None
        out += [_pattern(path, e) for e in entries]
    return out


KINDS = {"name": (str, "text"), "features": (list, "a list"), "without": (list, "a list")}
KINDS |= {"cut": (bool, "true or false"), "uneven": (bool, "true or false")}


def _pattern(path: Path, entry: dict[str, object]) -> Pattern:
    if not isinstance(entry, dict):
        raise RuleError(f"{path}: {entry!r} is no pattern.", hint="Write [[pattern]], in double brackets.")
    known = set(KINDS)
    if unknown := set(entry) - known:
        raise RuleError(
            f"{path}: a pattern has an unknown key {sorted(unknown)[0]!r}.", hint=f"Known: {', '.join(sorted(known))}."
        )
    if "name" not in entry:
        raise RuleError(f"{path}: a pattern has no name: {entry}.")
    for key, value in entry.items():
        kind, words = KINDS[key]
        if not isinstance(value, kind):
            raise RuleError(f"{path}: {entry['name']}: {key} is {value!r}, but it must be {words}.")
    for key in ("features", "without"):
        for feature in entry.get(key, ()):  # type: ignore[attr-defined]
            if feature not in FEATURES:
                raise RuleError(
                    f"{path}: {entry['name']}: unknown feature {feature!r}.", hint=f"Known: {', '.join(FEATURES)}."
                )
    return Pattern(
        str(entry["name"]),
        frozenset(entry.get("features", ())),  # type: ignore[call-overload]
        frozenset(entry.get("without", ())),  # type: ignore[call-overload]
        bool(entry.get("cut", True)),
        bool(entry.get("uneven", True)),
    )


class Classifier:
    """Finds the pattern of an axis."""

    def __init__(self, ax: Axes, patterns: Sequence[Pattern]) -> None:
        self.ax, self.patterns = ax, patterns
        self.ops: dict[Term, set[fx.Node]] = defaultdict(set)
        """Atom -> the ops whose result carries it."""
        for node, dims in ax.dims.items():
            if node.op == "call_function" and not is_many(dims):
                for term in dims:
                    for atom in leaves(term):
                        self.ops[atom].add(node)
        self.contracting = {n for _, n in ax.contracts}
        self.returned = {a for n in ax.trace.outputs.values() for t in ax.of(n) for a in leaves(t)}

    def pattern(self, atom: Term) -> Pattern:
        """The first pattern that fits; one named ``axis`` where none does."""
        features = self.features(atom)
        for pattern in self.patterns:
            if pattern.features <= features and not pattern.without & features:
                return pattern
        return Pattern("axis", frozenset())

    def features(self, atom: Term) -> set[str]:
        """What is true of an axis."""
        out = set()
        roles = [self.role(name, dim, atom) for name, dim in self.ax.carriers[atom] if self.is_weight(name)]
        columns = roles.count("column")
        out |= {"column"} if columns else set()
        out |= {"columns"} if columns > 1 else set()
        out |= {"row"} if "row" in roles else set()
        out |= {"lookup"} if "vocabulary" in roles else set()
        out |= {"positions"} if "vocabulary" in roles and not self.by_ids(atom) else set()
        out |= {"returned"} if atom in self.returned else set()
        ops = {n.meta["op"] for n in self.ops[atom]}
        out |= {"softmax"} if ops & {"softmax", "_softmax", "scaled_dot_product_attention"} else set()
        out |= {"convolution"} if any(o.startswith("conv") for o in ops) else set()
        out |= {"scan"} if ops & {"cumsum", "cumprod", "__setitem__", "exp"} and "convolution" in out else set()
        out |= {"gate"} if self.gated(atom) else set()
        out |= {"fused"} if any(self.fused(name, dim, atom) for name, dim in self.ax.carriers[atom]) else set()
        out |= (
            {"stacked"}
            if any(len(self.shape(name)) > 2 and self.contracts_weight(name) for name, _ in self.ax.carriers[atom])
            else set()
        )
        out |= {"two-inputs"} if self.inputs(atom) > 1 else set()
        return out

    def role(self, name: str, dim: int, atom: Term) -> str:
        """column: its dim comes out of a contraction; row: its dim is contracted; vocabulary: it is looked up."""
        node = self.ax.trace.parameters[name]
        if len(node.meta["shape"]) < 2:
            return "per-unit"
        contracting = set(self.ax.contracted.get(atom, ())) & self.readers(node)
        if contracting & self.ax.lookups:
            return "vocabulary"
        if contracting:
            return "row"
        return "column" if self.contracts_weight(name) else "per-unit"

    def readers(self, node: fx.Node) -> set[fx.Node]:
        """The ops that use a parameter, through views and casts."""
        out: set[fx.Node] = set()
        pending = [node]
        while pending:
            for user in pending.pop().users:
                if user.op == "output" or user in out:
                    continue
                out.add(user)
                if len(user.all_input_nodes) == 1:
                    pending.append(user)
        return out

    def contracts_weight(self, name: str) -> bool:
        """Whether some op sums over a dim of this parameter (it is a weight and not, say, a table of scales)."""
        node = self.ax.trace.parameters[name]
        readers = self.readers(node)
        return any(n in readers for t in self.ax.of(node) for a in leaves(t) for n in self.ax.contracted.get(a, ()))

    def gated(self, atom: Term) -> bool:
        """Whether two values that both carry the axis are multiplied."""
        products = [
            n for n in self.ops[atom] if n.meta["op"] in ("mul", "__mul__", "mul_") and len(n.all_input_nodes) == 2
        ]
        return any(all(any(atom in leaves(t) for t in self.ax.of(n)) for n in p.all_input_nodes) for p in products)

    def fused(self, name: str, dim: int, atom: Term) -> bool:
        """Whether a parameter's dim holds the axis more than once, in segments."""
        for factor in atoms(self.ax.of(self.ax.trace.parameters[name])[dim]):
            if factor.kind == "S" and sum(atom in leaves(s) for s in segments(factor)) > 1:
                return True
        term = self.ax.of(self.ax.trace.parameters[name])[dim]
        factors = atoms(term)
        return atom in factors and any(f.kind == "S" and len(segments(f)) > 1 and f.n in (2, 3) for f in factors)

    def inputs(self, atom: Term) -> int:
        """How many different whole values enter through column weights of attention."""
        found = set()
        for name, dim in self.ax.carriers[atom]:
            if self.role(name, dim, atom) != "column":
                continue
            for reader in self.readers(self.ax.trace.parameters[name]) & self.contracting:
                others = [
                    n
                    for n in reader.all_input_nodes
                    if n.meta["op"] != "parameter" and len(n.meta.get("shape", ())) > 1
                ]
                found |= {_source(n) for n in others if not any(atom in leaves(t) for t in self.ax.of(n))}
        return len(found)

    def by_ids(self, atom: Term) -> bool:
        """Whether some lookup along the axis takes its indices straight from the model's input."""
        nodes = [n for n in self.ax.contracted.get(atom, ()) if n in self.ax.lookups]
        return any(_source(n.args[1]).meta["op"] == "input" for n in nodes if isinstance(n.args[1], fx.Node))

    def is_weight(self, name: str) -> bool:
        """A parameter rather than a buffer."""
        return bool(self.ax.trace.parameters[name].meta["grad"])

    def shape(self, name: str) -> tuple[int, ...]:
        """Its whole shape."""
        return tuple(self.ax.trace.parameters[name].meta["shape"])


def _source(node: fx.Node) -> fx.Node:
    """The value behind views and casts."""
    while len(node.all_input_nodes) == 1 and node.meta["op"] in (
        "view",
        "reshape",
        "transpose",
        "to",
        "contiguous",
        "alias",
        "permute",
    ):
        node = node.all_input_nodes[0]
    return node
