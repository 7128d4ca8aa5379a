"""From a trace to axes: a term for every dim of every tensor, and the facts each op states about them.

Facts are collected on terms while the graph is walked, and resolved to atoms at the end, so that a refinement
made late reaches facts stated early.  The kinds of fact:

* *block*: the dim cannot be cut here, with the reason in words
* *contract*: the op sums products over the dim, so that its result is partial where the dim is cut
* *site*: an integer argument is the size of a term, and must shrink with it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from tpconvert.analyze.axes.chance import block_chance
from tpconvert.analyze.axes.terms import P, Term, UnalignedError, V, atoms, cut, find, leaves, products, unify
from tpconvert.analyze.capture.run import Trace
from tpconvert.analyze.watch.gradients import HOOK
from tpconvert.analyze.watch.unseen import storage_of

Dims = list[Term]
JOINED = "the layer it is from is cut by itself and put together again"


@dataclass(frozen=True, slots=True)
class Site:
    """An integer argument of an op, ``sign`` x the size of ``term``; ``path`` leads to it in ``(args, kwargs)``."""

    path: tuple[Any, ...]
    term: Term
    sign: int = 1


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why a dim cannot be cut at an op."""

    node: fx.Node
    why: str


@dataclass(frozen=True, slots=True)
class Rule:
    """How one op relates the terms of its operands to those of its result."""

    apply: Callable[[Axes, fx.Node, dict[str, Any]], Any]
    args: tuple[str, ...] = ()
    linear: frozenset[str] = frozenset()
    """Operands it is linear in, one at a time: products, contractions, views."""
    joint: frozenset[str] = frozenset()
    """Operands it is linear in together: sums and concatenations."""
    added: str = ""
    """The operand that is added to its contraction: a bias."""
    unless: frozenset[str] = frozenset()
    """Arguments that must be zero, None or left out for it to be linear."""
    through: bool = False
    """A custom autograd function that is recorded as what its forward does: its backward is the derivative of that."""
    origin: str = ""


class Axes:
    """The terms and facts of one trace."""

    def __init__(self, trace: Trace, rules: dict[str, Rule], joined: Set[str] = frozenset()) -> None:
        self.trace, self.rules = trace, rules
        self.joined = joined
        """Modules whose results are put together where they are returned: what uses them sees dims of its own."""
        self.parts: dict[fx.Node, Dims] = {}
        """The dims of such results before they are put together."""
        self.dims: dict[fx.Node, Any] = {}
        """Node -> the term of each dim; for an op with several results, a list of those."""
        self.blocks: list[tuple[Term, Blocked]] = []
        self.contracts: list[tuple[Term, fx.Node]] = []
        self.sites: dict[fx.Node, list[Site]] = defaultdict(list)
        self.grains: list[tuple[Term, int, fx.Node]] = []
        """Dims of which each rank must hold a multiple of some number."""
        self.lookups: set[fx.Node] = set()
        """Contractions done by looking rows up."""
        self.means: dict[fx.Node, list[Term]] = {}
        """Contractions that divide by the number of entries, and the dims they run over."""
        self.factories: set[fx.Node] = set()
        self.constants: set[fx.Node] = set()
        """Values every rank can compute whole."""
        self.written: dict[fx.Node, Dims] = {}
        """The dims of what ``x[...] = value`` writes to."""
        self.splits: dict[fx.Node, int] = {}
        """Ops that deal one dim to several results, and that dim."""
        self.bound: dict[fx.Node, dict[str, Any]] = {}
        for node in trace.nodes:
            self._visit(node)
            if self._is_joined(node):
                self._join(node)
        beyond = [(t, Blocked(n, JOINED)) for n in self.parts for t in self.of(n)]
        self.dims |= self.parts
        for node in trace.read:
            if node not in self.parts or node.meta["call"].asked:  # a hook of its layer's sees it put together
                self.block(flat(self.dims[node]), node, "Python reads its values")
        for call in trace.calls:
            if call.stand_ins:  # which a converted module would read as if they were its own
                for node in (*call.stand_ins, *call.inputs.values()):
                    self.block(flat(self.dims[node]), node, "it meets a value in the place of a module's parameter")
        for node in trace.parameters.values():
            if getattr(node.meta["val"], "_backward_hooks", None) or getattr(
                node.meta["val"], "_post_accumulate_grad_hooks", None
            ):
                self.block(self.of(node), node, HOOK)
        block_chance(self)
        self._resolve()
        for term, blocked in beyond:
            for atom in leaves(term):
                if not self.blocked.get(atom):
                    self.blocked[atom].append(blocked)

    # -- used by rules ------------------------------------------------------------------------------------

    def of(self, node: fx.Node) -> Dims:
        """The terms of a tensor node."""
        return self.dims[node]  # type: ignore[no-any-return]

    def names(self, node: fx.Node) -> tuple[str, ...]:
        """The names of an op's operands, in order."""
        return self.rule(node.meta["op"]).args  # type: ignore[union-attr]

    def rule(self, op: str) -> Rule | None:
        """The rule of an op, or of the op it is the in-place form of."""
        return self.rules.get(op) or self.rules.get(op.rstrip("_"))

    def block(self, terms: Term | Iterable[Term], node: fx.Node, why: str) -> None:
        """State that these dims cannot be cut at ``node``."""
        for term in [terms] if isinstance(terms, Term) else terms:
            self.blocks.append((term, Blocked(node, why)))

    def contract(self, term: Term, node: fx.Node) -> None:
        """State that ``node`` sums over this dim."""
        self.contracts.append((term, node))

    def unify(self, a: Term, b: Term, node: fx.Node) -> None:
        """Make two dims one, or block both where they do not fit."""
        try:
            unify(a, b)
        except UnalignedError as error:
            self.block((a, b), node, f"{node.meta['op']}: {error}")

    def cut(self, term: Term, at: int, node: fx.Node) -> tuple[Term, Term]:
        """Cut a dim in two, or block it where the cut falls inside a factor."""
        try:
            return cut(term, at)
        except UnalignedError as error:
            self.block(term, node, f"{node.meta['op']}: {error}")
            return V(at), V(term.n - at)

    def site(self, node: fx.Node, path: Sequence[Any], term: Term, sign: int = 1) -> None:
        """State that the argument at ``path`` is the size of ``term``."""
        self.sites[node].append(Site(tuple(path), term, sign))

    def broadcast(self, node: fx.Node, operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
        """The dims of an elementwise result, operands aligned from the right."""
        out = []
        for i in range(1, len(shape) + 1):
            terms = [d[-i] for d in operands if len(d) >= i and d[-i].n == shape[-i]]
            for other in terms[1:]:
                self.unify(terms[0], other, node)
            out.append(terms[0] if terms and shape[-i] != 1 else V(shape[-i]))
        return out[::-1]

    def period(self, term: Term) -> Term | None:
        """A dim without the outer factors that come from the inputs' sizes (a batch); None where one is left inside.

        What is dealt is the period: (batch x heads) is dealt as heads, again for each row of the batch.
        """
        factors = atoms(term)
        while factors and leaves(factors[0]) <= self.input_atoms:
            factors = factors[1:]
        if any(leaves(f) & self.input_atoms for f in factors):
            return None
        return P(*factors) if factors else V(1)

    @cached_property
    def input_atoms(self) -> set[Term]:
        """The atoms of the dims of the model's inputs, once all are known."""
        inputs = [n for n in self.trace.nodes if n.meta["op"] == "input"]
        return set().union(*(leaves(t) for n in inputs for t in self.of(n)))

    @cached_property
    def lasting(self) -> set[int]:
        """The memory that was there before the forward and is there after it: parameters, buffers, other tensors."""
        return {storage_of(n.meta["val"]) for n in self.trace.nodes if n.meta["op"] in ("parameter", "constant")}

    def opaque(self, node: fx.Node, why: str) -> Any:
        """Block every dim of every operand and result: right for any op, at the cost of coverage."""
        reason = f"{node.meta['op']}: {why}"
        for operand in node.all_input_nodes:
            self.block(flat(self.dims[operand]), node, reason)
        out = fresh_dims(node)
        self.block(flat(out), node, reason)
        return out

    # -- walking ------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        op = node.meta["op"]
        if op in ("parameter", "constant", "input"):
            self.dims[node] = [V(n) for n in node.meta["shape"]]
            if op == "input":
                self.block(self.dims[node], node, "a dim of the model's input")
        elif op == "item":
            self.dims[node] = self.dims[node.args[0]][node.args[1]]  # type: ignore[index]
        elif op == "alias":
            self.dims[node] = self.dims[node.args[0]]  # type: ignore[index]
        else:
            self.dims[node] = self._apply(node, op)
        if self._is_constant(node):
            self.constants.add(node)
            if not is_many(self.dims[node]):
                self.dims[node] = [V(t.n) if find(t).kind == "S" else t for t in self.dims[node]]

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a value depends on no parameter and no floating input: every rank can compute all of it.

        How such a value was put together binds nobody: slopes joined from 8 and 4 heads may be cut 6 and 6.
        """
        if node.op != "call_function":
            return node.meta["op"] != "parameter" and not node.meta["val"].is_floating_point()
        return all(n in self.constants for n in node.all_input_nodes) and inplace_target(node) is None

    def _apply(self, node: fx.Node, op: str) -> Any:
        rule = self.rule(op)
        if rule is None:
            out = self.opaque(node, node.meta.get("why", "no rule for this op (add one with --rules)"))
        else:
            self.bound[node] = bind(node, rule.args)
            try:
                out = rule.apply(self, node, self.bound[node])
            except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
                out = self.opaque(node, f"this use is not understood ({type(error).__name__}: {error})")
        if inplace_target(node) is not None:
            return self.dims[inplace_target(node)]
        expected = [list(t.shape) for t in tensors(node.meta["val"])]
        got = [[t.n for t in d] for d in (out if is_many(out) else [out])]
        if got != expected:
            out = self.opaque(node, f"its rule gives sizes {got} where it returned {expected}")
        return out if is_many(out) or isinstance(node.meta["val"], torch.Tensor) else [out]

    def _is_joined(self, node: fx.Node) -> bool:
        call = node.meta["call"]
        return call is not None and call.module in self.joined and node in call.outputs.values() and is_float(node)

    def _join(self, node: fx.Node) -> None:
        """Give what uses a result other dims in place of those that are its module's own."""
        call, own = node.meta["call"], set[Term]()
        pending = [node]
        while pending:
            for operand in pending.pop().all_input_nodes:
                if operand.meta["op"] == "parameter":
                    own |= {a for t in self.of(operand) for a in leaves(t)}
                elif operand.meta["call"] is call:
                    pending.append(operand)
        own -= {a for n in call.inputs.values() for t in self.of(n) for a in leaves(t)}
        self.parts[node] = self.of(node)
        self.dims[node] = [V(t.n) if leaves(t) & own else t for t in self.of(node)]

    # -- resolving ----------------------------------------------------------------------------------------

    def _resolve(self) -> None:
        self.blocked: dict[Term, list[Blocked]] = defaultdict(list)
        self.contracted: dict[Term, list[fx.Node]] = defaultdict(list)
        self.multiplies: dict[Term, set[Term]] = defaultdict(set)
        self.carriers: dict[Term, dict[tuple[str, int], None]] = defaultdict(dict)
        seen: set[tuple[int, ...]] = set()
        for node, dims in self.dims.items():
            if is_many(dims):
                continue
            key = tuple(id(find(t)) for t in dims)
            if key in seen:
                continue
            seen.add(key)
            for a, b in products(dims)[1]:
                if a is b:
                    self.blocked[a].append(Blocked(node, "it meets itself in one tensor"))
                else:
                    self.multiplies[a].add(b)
                    self.multiplies[b].add(a)
        for term, blocked in self.blocks:
            for atom in leaves(term):
                self.blocked[atom].append(blocked)
        for term, node in self.contracts:
            for atom in leaves(term):
                self.contracted[atom].append(node)
        for name, node in self.trace.parameters.items():
            for dim, term in enumerate(self.of(node)):
                for atom in leaves(term):
                    self.carriers[atom][name, dim] = None


def bind(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """An op's arguments by name; torch's other spellings of a name count as that name."""
    spelling = {"self": "input", "axis": "dim", "tensor": "input", "x1": "input", "x2": "other", "mat2": "other"}
    spelling |= {"dimension": "dim", "src": "source", "value": "source", "indices": "index"}
    out: dict[str, Any] = {}
    for i, value in enumerate(node.args):
        out[names[i] if i < len(names) else f"*{i}"] = value
    for key, value in node.kwargs.items():
        out[key if key in names else spelling.get(key, key)] = value
    return out


def where(node: fx.Node, names: Sequence[str], name: str) -> tuple[Any, ...]:
    """The path of a named argument in ``(args, kwargs)``."""
    position = names.index(name)
    return (0, position) if position < len(node.args) else (1, name if name in node.kwargs else "axis")


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of an op's result."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, tuple | list) else []


def without_grad(node: fx.Node) -> bool:
    """Whether a value takes no part in differentiation though what it was computed from does: under ``no_grad``."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or node.meta.get("grad"):
        return False
    return any(n.meta.get("grad") for n in node.all_input_nodes)


def stops_gradient(node: fx.Node) -> bool:
    """The same of an op that makes its value, and does not write it into another."""
    return without_grad(node) and inplace_target(node) is None


def inplace_target(node: fx.Node) -> fx.Node | None:
    """The operand an in-place op writes to."""
    from tpconvert.analyze.capture.run import is_inplace

    if not is_inplace(node.meta["op"], node.kwargs):
        return None
    target = node.kwargs.get("out") or node.args[0]
    return target if isinstance(target, fx.Node) else None


def is_float(node: fx.Node) -> bool:
    """Whether a value is one tensor of floating numbers."""
    return isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].is_floating_point()


def is_many(dims: Any) -> bool:
    """Whether these are the dims of several results."""
    return bool(dims) and not isinstance(dims[0], Term)


def flat(dims: Any) -> Dims:
    """The terms of one or several results."""
    return [t for d in dims for t in d] if is_many(dims) else list(dims)


def fresh_dims(node: fx.Node) -> Any:
    """New atoms for every dim of a node's result."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [V(n) for n in value.shape]
    return [[V(n) for n in t.shape] for t in tensors(value)]


def nodes_in(tree: Any) -> list[fx.Node]:
    """The nodes in nested arguments, in order."""
    if isinstance(tree, fx.Node):
        return [tree]
    if isinstance(tree, tuple | list):
        return [n for t in tree for n in nodes_in(t)]
    if isinstance(tree, dict):
        return [n for t in tree.values() for n in nodes_in(t)]
    if isinstance(tree, slice):
        return nodes_in((tree.start, tree.stop, tree.step))
    return []


def product(*terms: Term) -> Term:
    """The product of any number of terms."""
    return P(*terms) if terms else V(1)
