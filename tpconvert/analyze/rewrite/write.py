"""A module's forward as data: its recorded ops, with local sizes and collectives in place.

Ops are written under their public torch names and rebuilt from that closed set, so a plan never holds code.  Sizes
that came from a tensor's shape are read from the tensor again; sizes that count something cut become ``local``
entries; children stay calls, so that their own hooks and parallel layers run.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import fx

from tpconvert.analyze.axes.run import is_many, without_grad
from tpconvert.analyze.axes.terms import P, Term, blocks, leaves
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.emulate.run import is_local
from tpconvert.analyze.flow.run import Flow, Placed
from tpconvert.analyze.rewrite.decisions import hindrance, idle, questions
from tpconvert.analyze.rewrite.edits import spell
from tpconvert.analyze.rewrite.spelling import Limit, UnsupportedError, constant, limited, target_name
from tpconvert.analyze.trace.provenance import Int, dims_read, evaluate, reads_shape
from tpconvert.spec.layout import Block
from tpconvert.spec.plan import Rewrite


def rewrite(
    flow: Flow,
    call: Call,
    nested: dict[Term, Term],
    why: str,
    training: dict[tuple[int, Any], Any] | None = None,
    fixed: Set[Term] = frozenset(),
) -> Rewrite:
    """The forward of one call, as data.

    ``training`` holds, by (op number, path), what differs in train mode; ``fixed`` are sizes of the inputs that were
    never seen to be others.
    """
    return _Writer(flow, call, nested, training or {}, fixed).write(why)


class _Writer:
    def __init__(
        self,
        flow: Flow,
        call: Call,
        nested: dict[Term, Term],
        training: dict[tuple[int, Any], Any],
        fixed: Set[Term],
    ) -> None:
        self.flow, self.ax, self.call, self.nested, self.training = flow, flow.ax, call, nested, training
        self.nodes: list[dict[str, Any]] = []
        self.names: dict[fx.Node, str] = {n: slot for slot, n in call.inputs.items()}
        self.seen: dict[tuple[fx.Node, fx.Node], str] = {}
        self.checks = questions(self.ax, self.call, fixed)
        self.chosen = {*flow.cut_atoms, *nested}
        self.placed: dict[fx.Node, list[Placed]] = {}
        for p in flow.placed:
            if p.host is None and p.call is call:
                self.placed.setdefault(p.node, []).append(p)

    def write(self, why: str) -> Rewrite:
        if reason := hindrance(self.ax, self.call):
            raise UnsupportedError(reason)
        for node in dict.fromkeys(self.call.inputs.values()):
            self.collectives(node)
        self.same()
        number = 0
        steps = self.ax.trace.steps(self.call)[self.call]
        unused = idle(self.call, steps)
        for step in steps:
            self.check()
            if isinstance(step, Call):
                self.child(step)
            else:
                if step not in unused:
                    self.op(step, number)
                number += 1
        self.check(last=True)
        signature = dict.fromkeys(self.call.inputs, "tensor")
        signature |= {slot: {"const": constant(value)} for slot, value in self.call.constants.items()}  # type: ignore[dict-item]
        return Rewrite(self.call.module, why, signature, tuple(self.nodes), self.encode(self.call.result))

    # -- checks: what must be as it was recorded ----------------------------------------------------------

    def check(self, last: bool = False) -> None:
        """Check what can be by now; a check that fails says which calls the forward was recorded for."""
        for question in list(self.checks):
            known = all(n in self.names for side in question[1:3] for n, _ in dims_read(side))
            if known or last:
                self.checks.remove(question)
                asked, left, right, answer = question
                args = [self.side(left), self.side(right)]
                target = f"operator.{asked.__name__}"
                self.add(
                    "check",
                    target=target,
                    args=args,
                    value=answer,
                    says=spell((asked, left, right)).replace("the literal ", ""),
                )

    def side(self, expr: Any) -> Any:
        """One side of a comparison."""
        return expr if isinstance(expr, int | float) else self.size(expr, _whole(expr, self.ax))

    def same(self) -> None:
        """Check that what was one tensor in two arguments is one again."""
        first: dict[fx.Node, str] = {}
        for slot, node in self.call.inputs.items():
            other = first.setdefault(node, slot)
            if other != slot:
                says = f"{other} is {slot}"
                self.add("check", target="operator.is_", args=[{"$": other}, {"$": slot}], value=True, says=says)

    # -- nodes --------------------------------------------------------------------------------------------

    def add(self, op: str, name: str | None = None, **fields: Any) -> str:
        name = name or f"t{len(self.nodes)}"
        self.nodes.append({"name": name, "op": op, **fields})
        return name

    def child(self, call: Call) -> None:
        """A child's call; each tensor it returns becomes a value."""
        prefix = f"{self.call.module}." if self.call.module else ""
        if not call.module.startswith(prefix) or call.module.startswith("?"):
            raise UnsupportedError(f"it calls {call.module}, which is not its child")
        args, kwargs = call.arguments
        out = self.add(
            "module",
            target=call.module[len(prefix) :],
            args=[self.encode(a) for a in args],
            kwargs={k: self.encode(v) for k, v in kwargs.items()},
            **_grad(call.grad or any(n.meta.get("grad") for n in call.outputs.values())),
        )
        for slot, node in call.outputs.items():
            value = out
            for key in slot.split(".") if slot else ():
                value = self.add("item", args=[{"$": value}, int(key) if key.isdigit() else key])
            self.names[node] = value
            self.collectives(node)

    def op(self, node: fx.Node, number: int) -> None:
        """One op of the module's own."""
        op = node.meta["op"]
        if op == "alias":
            self.names[node] = self.name(node.args[0])  # type: ignore[arg-type]
        elif op == "item":
            self.names[node] = self.add("item", node.name, args=[{"$": self.name(node.args[0])}, node.args[1]])  # type: ignore[arg-type]
        elif node in self.ax.lookups and node.args[0] in self.flow.cut and node in self.flow.partial:
            self.lookup(node)  # which sums, so the reduce placed here is done
            self.placed[node] = [p for p in self.placed.get(node, ()) if p.kind != "reduce"]
        else:
            self.plain(node, number)
        self.collectives(node)

    def plain(self, node: fx.Node, number: int) -> None:
        args, kwargs = self.arguments(node, number)
        target = target_name(node)
        if node in self.ax.splits and is_local(self.flow, node) and self.is_dealt(node):
            dim = self.ax.splits[node]
            sizes = [self.local(d[dim], d[dim].n) for d in self.ax.dims[node]]
            target, args, kwargs = "torch.Tensor.split", [args[0], sizes], {"dim": dim}
        name = self.add("call", node.name, target=target, args=args, kwargs=kwargs, **_grad(not without_grad(node)))
        if node in self.flow.partial and node in self.ax.means:
            name = self.scaled(name, node)
        if node.meta["op"] == "__setitem__":
            name = self.name(node.args[0])  # type: ignore[arg-type]
        self.names[node] = name

    def is_dealt(self, node: fx.Node) -> bool:
        """Whether a split is along a cut dim: along another, such as the sequence, its sizes are those it was given."""
        dim = self.ax.splits[node]
        return any(leaves(dims[dim]) & self.flow.cut_atoms for dims in self.ax.dims[node])

    def scaled(self, name: str, node: fx.Node) -> str:
        """A mean over this rank's entries as this rank's term of the mean over all."""
        for term in self.ax.means[node]:
            if leaves(term) & self.flow.cut_atoms:
                args = [{"$": name}, self.local(term, term.n)]
                name = self.add("call", target="torch.Tensor.mul", args=args, kwargs={})
                name = self.add("call", target="torch.Tensor.div", args=[{"$": name}, term.n], kwargs={})
        return name

    def lookup(self, node: fx.Node) -> None:
        """A lookup in a cut table, summed at once."""
        weight, ids = node.args[0], node.args[1]
        padding = node.kwargs.get("padding_idx", node.args[2] if len(node.args) > 2 else -1)
        extra = {"padding_idx": int(padding)} if isinstance(padding, int) and padding >= 0 else {}
        term = self.ax.of(weight)[0]  # type: ignore[arg-type]
        rows = [b.to_json() for b in blocks(term, self.chosen)]
        if self.flow.reduced.get(node) is None or self.flow.reduced[node].host is not None:
            raise UnsupportedError("the lookup in its forward is summed elsewhere")
        self.names[node] = self.add(
            "lookup", node.name, args=[self.encode(weight), self.encode(ids)], blocks=rows, **extra
        )

    def collectives(self, node: fx.Node) -> None:
        """The collectives that stand right after a value inside this forward."""
        for p in sorted(self.placed.get(node, ()), key=lambda p: ("reduce", "gather", "copy", "scatter").index(p.kind)):
            fields: dict[str, Any] = {}
            if p.kind in ("gather", "scatter"):
                dims = self.ax.of(node)
                dim = next(i for i, t in enumerate(dims) if leaves(t) & self.flow.cut_atoms)
                dealt = self.ax.period(dims[dim]) or dims[dim]
                fields = {"dim": dim, "blocks": [b.to_json() for b in blocks(dealt, self.chosen)]}
            elif p.span is not None:
                fields = {"dim": p.span[0], "span": list(p.span[1:])}
            name = self.add(p.kind, args=[{"$": self.name(node)}], **fields)
            if p.consumers:
                self.seen |= {(node, c): name for c in p.consumers}
            else:
                self.names[node] = name

    def name(self, node: fx.Node, user: fx.Node | None = None) -> str:
        """What holds a value now, for this consumer."""
        if user is not None and (node, user) in self.seen:
            return self.seen[node, user]
        if node in self.names:
            return self.names[node]
        if node.meta["op"] == "parameter":
            self.names[node] = self.add("param", target=self.own_name(node))
            return self.names[node]
        raise UnsupportedError(f"its forward uses a tensor that is neither an input nor its own ({node.name})")

    def own_name(self, node: fx.Node) -> str:
        """The path of a parameter from this module, under whichever of its names lies below it."""
        root = self.ax.trace.module
        prefix = f"{self.call.module}." if self.call.module else ""
        tensor = node.meta["val"]
        for path, value in [
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        ]:
            if value is tensor and path.startswith(prefix):
                return path[len(prefix) :]
        raise UnsupportedError(f"its forward reads {node.target}, which belongs to another module")

    # -- arguments ----------------------------------------------------------------------------------------

    def arguments(self, node: fx.Node, number: int) -> tuple[list[Any], dict[str, Any]]:
        local = {}
        if is_local(self.flow, node):
            local = {s.path: s for s in self.ax.sites.get(node, ()) if leaves(s.term) & self.flow.cut_atoms}

        def encode(tree: Any, path: tuple[Any, ...]) -> Any:
            either = (tree, self.training.get((number, path), tree))
            if either[0] is not either[1] and is_local(self.flow, node) and any(type(v) in (int, Int) for v in either):
                raise UnsupportedError("a number that may count something cut is another one in training")
            if path in local and isinstance(tree, int) and tree != -1:
                site = local[path]
                value = self.site(site.term, tree)
                return (
                    value if site.sign == 1 else {"$": self.add("call", target="operator.neg", args=[value], kwargs={})}
                )
            if (number, path) in self.training and isinstance(tree, torch.dtype):
                return {
                    "$": self.add(
                        "call",
                        target="torch.Tensor.dtype",
                        args=[{"$": self.name(_dtype_source(node, tree))}],
                        kwargs={},
                    )
                }
            if isinstance(limit := self.training.get((number, path)), Limit):
                of = self.name(limited(node, limit, tree))
                return {"$": self.add("limit", target=limit.name, args=[{"$": of}])}
            if (number, path) in self.training:
                return {"$": self.add("training_else", args=[constant(self.training[number, path]), constant(tree)])}
            if isinstance(tree, tuple | list):
                inner = [encode(t, (*path, i)) for i, t in enumerate(tree)]
                return {"tuple": inner} if isinstance(tree, tuple) else inner
            if isinstance(tree, dict):
                return {"dict": {k: encode(v, (*path, k)) for k, v in tree.items()}}
            if isinstance(tree, slice):
                return {"slice": [encode(getattr(tree, k), (*path, k)) for k in ("start", "stop", "step")]}
            return self.encode(tree, node)

        args = [encode(a, (0, i)) for i, a in enumerate(node.args)]
        return args, {k: encode(v, (1, k)) for k, v in node.kwargs.items()}

    def site(self, term: Term, value: int) -> Any:
        """A term's local size for any size of the inputs: ``batch * heads`` is ``batch * heads // whole * local``."""
        period = self.ax.period(term)
        if period is None:
            raise UnsupportedError("a size of the inputs stands inside a cut dim")
        here = self.local(period, period.n)
        if period.n == term.n:
            return here
        if not isinstance(value, Int) or not reads_shape(value.expression):
            raise UnsupportedError("the size of its inputs is a literal in its forward")
        if _reads_cut(value.expression, self.flow):
            if value.expression[0] != "dim":
                raise UnsupportedError("a size in its forward is made of a cut dim and a size of its inputs")
            return self.size(value.expression, int(value))
        outer = self.add(
            "call", target="operator.floordiv", args=[self.size(value.expression, int(value)), period.n], kwargs={}
        )
        return {"$": self.add("call", target="operator.mul", args=[{"$": outer}, here], kwargs={})}

    def local(self, term: Term, whole: int) -> dict[str, Any]:
        """An entry for the local size of a term."""
        if not leaves(term) & self.flow.cut_atoms:
            return whole  # type: ignore[return-value]
        per: list[Any] = []
        inner = leaves(term) & set(self.nested)
        if inner and not leaves(term) & {self.nested[a] for a in inner}:
            outer = self.nested[next(iter(inner))]
            term, per = P(outer, term), [Block(outer.n).to_json()]
        return {"$": self.add("local", value=whole, blocks=[b.to_json() for b in blocks(term, self.chosen)], per=per)}

    def encode(self, tree: Any, user: fx.Node | None = None) -> Any:
        """Any argument or result as JSON."""
        if isinstance(tree, fx.Node):
            if is_many(self.ax.dims[tree]) or tree in self.names or tree.meta["op"] == "parameter" or user is not None:
                return {"$": self.name(tree, user)}
            return {"$": self.name(tree)}
        if isinstance(tree, Int):
            return self.size(tree.expression, int(tree))
        if isinstance(tree, tuple):
            return {"tuple": [self.encode(t, user) for t in tree]}
        if isinstance(tree, list):
            return [self.encode(t, user) for t in tree]
        if isinstance(tree, dict):
            return {"dict": {k: self.encode(v, user) for k, v in tree.items()}}
        if isinstance(tree, slice):
            return {"slice": [self.encode(t, user) for t in (tree.start, tree.stop, tree.step)]}
        return constant(tree)

    def size(self, expr: Any, value: int) -> Any:
        """An integer made from shapes is made from them again; one made from attributes alone stays what it was."""
        if not reads_shape(expr):
            return value
        if expr[0] == "dim" and expr[1] in self.flow.cut and leaves(self.ax.of(expr[1])[expr[2]]) & self.flow.cut_atoms:
            return self.whole_size(expr[1], expr[2])
        if expr[0] == "dim":
            if expr[1] not in self.names and expr[1].meta["op"] != "parameter":
                raise UnsupportedError("its forward uses a size of a tensor it was not given")
            return {"$": self.add("size", args=[{"$": self.name(expr[1])}, expr[2]])}
        sides = [self.size(e, e if isinstance(e, int) else _whole(e, self.ax)) for e in expr[1:]]
        return {"$": self.add("call", target=f"operator.{expr[0].__name__}", args=sides, kwargs={})}

    def whole_size(self, node: fx.Node, dim: int) -> Any:
        """The whole size of a cut dim, for any size of the inputs; where a part is meant, the op's sizes say so."""
        term = self.ax.of(node)[dim]
        period = self.ax.period(term)
        if period is None or period.n == term.n:
            return term.n
        if node not in self.names:
            raise UnsupportedError("its forward uses a size of a tensor it was not given")
        here = {"$": self.add("size", args=[{"$": self.name(node)}, dim])}
        outer = self.add("call", target="operator.floordiv", args=[here, self.local(period, period.n)], kwargs={})
        return {"$": self.add("call", target="operator.mul", args=[{"$": outer}, period.n], kwargs={})}


def _dtype_source(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The tensor whose dtype its forward asked for last, of those that have this one."""
    for source, found in node.meta.get("dtypes", ()):
        if found is dtype:
            return source  # type: ignore[no-any-return]
    raise UnsupportedError(f"{node.meta['op']} in its forward is given a dtype that moves with the model's")


def _grad(on: bool) -> dict[str, bool]:
    """What a node says of gradients: nothing where they are on."""
    return {} if on else {"grad": False}


def _reads_cut(expr: Any, flow: Flow) -> bool:
    """Whether an expression reads a dim that is smaller on a rank."""
    if not isinstance(expr, tuple):
        return False
    if expr[0] == "dim":
        return expr[1] in flow.cut and bool(leaves(flow.ax.of(expr[1])[expr[2]]) & flow.cut_atoms)
    return any(_reads_cut(e, flow) for e in expr[1:])


def _whole(expr: Any, ax: Any) -> int:
    def value(a: Any) -> int:
        held = getattr(ax.trace.owners[a.owner], a.name)
        return int(held if a.item is None else held[a.item])

    return evaluate(expr, value, lambda node, i: int(node.meta["shape"][i]))
