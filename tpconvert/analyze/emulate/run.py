"""All ranks in lockstep in one process, on the recorded graph, forward and backward, every op compared.

The graph is run once for each rank, op by op, on local tensors and with local sizes.  After each op the ranks'
results are compared with the recorded whole result: a cut value with its slice, a partial one by its sum.  Collectives
are differentiable functions over the list of ranks with the very backward the runtime has, so that the gradients
are those of a distributed run.  Values come from the capture (``values=True``); float64 makes the comparison sharp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tpconvert.analyze.axes.dealing import Deal
from tpconvert.analyze.axes.run import inplace_target, is_many, stops_gradient, tensors
from tpconvert.analyze.axes.terms import leaves
from tpconvert.analyze.capture.recorder import UNFILLED
from tpconvert.analyze.emulate.lockstep import (
    all_gather,
    copy,
    copy_shared,
    gather,
    masked_lookup,
    reduce,
    reduce_scatter,
    scatter,
    single,
    whole_gradients,
    writable,
    writes_leaf,
    zero_forward,
)
from tpconvert.analyze.emulate.sliced import crossed, lengths, own
from tpconvert.analyze.emulate.ties import DECIDING, settled
from tpconvert.analyze.flow.once import root_parameter
from tpconvert.analyze.flow.randoms import drew
from tpconvert.analyze.flow.run import Flow, Placed
from tpconvert.analyze.flow.states import is_op, reaches_all, seeing
from tpconvert.analyze.trace.trees import Held


@dataclass(slots=True)
class Difference:
    """How far one value or gradient is from the whole model's, relative to its largest entry."""

    name: str
    module: str
    error: float


@dataclass(slots=True)
class Emulation:
    """The outcome: the first op that differs, and the worst output and gradients."""

    forward: list[Difference] = field(default_factory=list)
    outputs: list[Difference] = field(default_factory=list)
    gradients: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def worst(self) -> float:
        """The largest error of all."""
        return max((d.error for d in [*self.forward, *self.outputs, *self.gradients]), default=0.0)


def emulate(flow: Flow, deal: Deal, *, loss_seed: int = 0, floor: float = 1e-6) -> Emulation:
    """Run every rank of ``deal`` and compare.  The trace must hold values.

    A gradient below ``floor`` times the largest one is compared as if it were as large as that.
    """
    return Lockstep(flow, deal, floor).run(loss_seed)


class Lockstep:
    """The environments of all ranks."""

    def __init__(self, flow: Flow, deal: Deal, floor: float = 1e-6) -> None:
        self.flow, self.ax, self.deal, self.floor = flow, flow.ax, deal, floor
        self.ranks = range(deal.tp)
        self.env: dict[fx.Node, list[Any]] = {}
        self.seen: dict[tuple[fx.Node, fx.Node], list[Any]] = {}  # (value, consumer) -> what that consumer sees
        self.leaves: dict[fx.Node, list[torch.Tensor]] = {}
        self.out = Emulation()
        self.copies: dict[fx.Node, list[Placed]] = defaultdict(list)
        self.scatters: dict[fx.Node, list[Placed]] = defaultdict(list)
        self.joins: dict[fx.Node, list[Placed]] = defaultdict(list)
        for found, all_placed in (
            (self.copies, flow.copies),
            (self.scatters, flow.scatters),
            (self.joins, flow.joins),
        ):
            for placed in all_placed:
                found[placed.node].append(placed)

    def run(self, seed: int) -> Emulation:
        """Forward, compare, backward, compare."""
        with torch.enable_grad():
            for node in self.ax.trace.nodes:
                self.step(node)
                self.compare(node)
            self.backward(seed)
        return self.out

    # -- forward ------------------------------------------------------------------------------------------

    def step(self, node: fx.Node) -> None:
        """Run one node on every rank, and the collectives that stand at it."""
        op = node.meta["op"]
        if op in ("parameter", "constant", "input"):
            self.start(node)
        elif op == "item":
            self.env[node] = [e[node.args[1]] for e in self.env[node.args[0]]]  # type: ignore[index]
        elif op == "alias":
            self.env[node] = self.env[node.args[0]]  # type: ignore[index]
        elif drew(node):
            self.env[node] = [self.drawn(node, r) for r in self.ranks]
        else:
            self.env[node] = [self.call(node, r) for r in self.ranks]
            if inplace_target(node) is None and any(is_op(u) and inplace_target(u) is node for u in node.users):
                given = [v for n in node.all_input_nodes for v in self.env[n]]
                self.env[node] = [v if any(v is g for g in given) else writable(v) for v in self.env[node]]
        if node in self.flow.counted:
            self.env[node] = [v if r == 0 else zero_forward(v) for r, v in enumerate(self.env[node])]
        if node in self.flow.reduced:
            placed = self.flow.reduced[node]
            self.env[node] = reduce(self.env[node]) if placed.sliced is None else self.crossed(placed, self.env[node])
        if node in self.flow.gathered:
            self.env[node] = gather(self.env[node], [self.indices(node, r) for r in self.ranks])
        if stops_gradient(node):
            self.env[node] = [v.detach() for v in self.env[node]]
        self.place(node)

    def start(self, node: fx.Node) -> None:
        """Give every rank its part of a parameter, or all of an input."""
        value = node.meta["value"]
        if node.meta["op"] != "parameter":
            parts = [value.clone() for _ in self.ranks]  # which may be written into
            if node.meta["op"] == "input" and node.meta["val"].requires_grad:
                self.leaves[node] = [value.clone().requires_grad_() for _ in self.ranks]
                parts = [leaf.clone() for leaf in self.leaves[node]]  # which may be written into
            self.env[node] = parts
            return
        dims = self.ax.of(node)
        parts = [self.deal.local(value, dims, r) if node in self.flow.cut else value.clone() for r in self.ranks]
        if node.meta["val"].requires_grad:
            parts = [p.requires_grad_(True) for p in parts]
            self.leaves[node] = parts
        if node in self.flow.sum_grad:
            parts = copy_shared(parts, [self.rows(node, r) for r in self.ranks], value.numel())
        if node in self.flow.once:
            parts = [p if r == 0 else zero_forward(p) for r, p in enumerate(parts)]
        self.env[node] = parts

    def place(self, node: fx.Node) -> None:
        """The other collectives of a value: first those that all consumers see, then those that some do."""
        placed = [*self.joins[node], *self.copies[node], *self.scatters[node]]
        some = [p for p in placed if not reaches_all(p)]
        for p in placed:
            if p not in some:
                self.env[node] = self.crossed(p, self.env[node])
        for p in some:
            users = seeing(p)
            values = next((self.seen[node, u] for u in users if (node, u) in self.seen), self.env[node])
            self.seen |= dict.fromkeys(((node, u) for u in users), self.crossed(p, values))

    def crossed(self, placed: Placed, values: list[Any]) -> list[Any]:
        """What is on the other side of a collective."""
        if placed.kind == "copy":
            return copy(values, placed.span)
        if placed.kind == "single":
            return single(values)
        across = {"gather": gather, "scatter": scatter, "all_gather": all_gather, "reduce_scatter": reduce_scatter}
        if placed.sliced is not None:
            return crossed(self.flow, across[placed.kind], placed, values, self.deal.tp)
        return across[placed.kind](values, [self.indices(placed.node, r) for r in self.ranks])

    def call(self, node: fx.Node, rank: int) -> Any:
        """One op on one rank, with its local operands and sizes."""
        args, kwargs = localized(self.flow, node, lambda term: self.deal.size(term, rank))
        if node in self.flow.local:
            args, kwargs = self.shortened(node, args, kwargs, rank)

        def value(n: fx.Node) -> Any:
            return self.seen.get((n, node), self.env[n])[rank]

        def given(x: Any) -> Any:
            return value(x) if isinstance(x, fx.Node) else x.held if isinstance(x, Held) else x

        args, kwargs = fx.node.map_aggregate(args, given), fx.node.map_aggregate(kwargs, given)
        if node in self.ax.lookups and node.args[0] in self.flow.cut and node in self.flow.partial:
            rows = self.deal.index(self.ax.of(node.args[0])[0], rank)  # type: ignore[arg-type]
            return masked_lookup(args[0], args[1], rows, node)
        if node in self.ax.splits and self.is_local(node):
            dim = self.ax.splits[node]
            return torch.split(args[0], [self.deal.size(d[dim], rank) for d in self.ax.dims[node]], dim)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not writes_leaf(node, value)):
            out = node.target(*args, **kwargs)  # type: ignore[operator]
        if node.meta["op"] in UNFILLED:
            out.zero_()
        if node in self.flow.partial and node in self.ax.means:
            for term in self.ax.means[node]:
                out = out * (self.deal.size(term, rank) / term.n)
        if isinstance(node.meta["val"], torch.Tensor) and not isinstance(out, torch.Tensor):
            return args[0]  # __setitem__ returns nothing
        if node.meta["op"] in DECIDING:
            out = settled(node, self.ax.bound.get(node, {}), args, out, self.recorded(node, rank))
        return out if isinstance(out, torch.Tensor) else tensors(out)

    def recorded(self, node: fx.Node, rank: int) -> dict[Any, torch.Tensor]:
        """This rank's part of each result that was recorded."""
        if isinstance(node.meta["val"], torch.Tensor):
            return {None: self.part(node, rank)}
        return {n.args[1]: self.part(n, rank) for n in node.users if n.meta["op"] == "item"}

    def part(self, node: fx.Node, rank: int) -> torch.Tensor:
        """What a rank should have of a value."""
        whole: torch.Tensor = node.meta["value"]
        return self.deal.local(whole, self.ax.of(node), rank) if node in self.flow.cut else whole.clone()

    def drawn(self, node: fx.Node, rank: int) -> torch.Tensor:
        """The numbers that were drawn when the forward was recorded: another draw would be no comparison."""
        value = self.part(node, rank)
        if node in self.flow.partial and rank:
            value.zero_()
        if (target := inplace_target(node)) is None:
            return value
        written: torch.Tensor = self.seen.get((target, node), self.env[target])[rank]
        return written.copy_(value)

    def shortened(self, node: fx.Node, args: Any, kwargs: Any, rank: int) -> tuple[Any, Any]:
        """The arguments with the length of this rank's slice in place of the number of tokens."""
        tree: Any = [args, kwargs]
        for path, size in lengths(self.flow, node, rank, self.deal.tp):
            tree = replaced(tree, path, size)
        return tuple(tree[0]), tree[1]

    def is_local(self, node: fx.Node) -> bool:
        """Whether an op works on parts."""
        return is_local(self.flow, node)

    # -- comparing ----------------------------------------------------------------------------------------

    def compare(self, node: fx.Node) -> None:
        """Every rank's result against the recorded whole one."""
        whole = node.meta.get("value")
        if whole is None or node.meta["op"] == "parameter" or not whole.numel():
            return
        if root_parameter(node) in self.flow.once:
            return  # on the other ranks it is zero
        have = [v.detach() for v in self.env[node]]
        if node in self.flow.partial and node not in self.flow.reduced:
            have = [sum(have[1:], have[0])] if node not in self.flow.cut else have
        dims = self.ax.of(node)
        worst = 0.0
        for rank, value in enumerate(have):
            want = self.deal.local(whole, dims, rank) if node in self.flow.cut else whole
            if node in self.flow.sliced:
                want = own(self.flow, node, self.flow.sliced[node], want, rank, self.deal.tp)
            worst = max(worst, relative(value, want, whole))
        call = node.meta["call"]
        self.out.forward.append(Difference(node.name, call.module if call else "", worst))

    def backward(self, seed: int) -> None:
        """A fixed random sum of the outputs, differentiated on every rank and on the whole model."""
        generator = torch.Generator().manual_seed(seed)
        losses: list[torch.Tensor] = [torch.zeros((), dtype=torch.float64) for _ in self.ranks]
        names = []
        for slot, node in self.ax.trace.outputs.items():
            whole, have = node.meta["value"], self.returned(node)
            self.out.outputs.append(Difference(slot, "", max(relative(v.detach(), whole, whole) for v in have)))
            if whole.is_floating_point() and node.meta["grad"]:
                weight = torch.randn(whole.shape, generator=generator, dtype=torch.float64).to(whole.dtype)
                losses = [total + (v * weight).sum() for total, v in zip(losses, have, strict=True)]
                names.append((node, weight))
        if not names or not self.leaves:
            return
        try:
            reference = whole_gradients(list(self.leaves), names)
        except Exception as error:  # a backward of its own may be for training alone
            self.out.notes.append(f"The whole model has no gradients in eval mode ({type(error).__name__}: {error}).")
            return
        torch.autograd.backward(losses)
        floor = self.floor * max(float(g.abs().max()) if g.numel() else 0.0 for g in reference.values())
        for node, parts in self.leaves.items():
            whole = reference[node]
            worst = 0.0
            for rank, part in enumerate(parts):
                want = self.deal.local(whole, self.ax.of(node), rank) if node in self.flow.cut else whole
                have = part.grad.to_dense() if part.grad is not None else torch.zeros_like(part)
                worst = max(worst, relative(have, want, whole, floor))
            name = f"input {node.meta['slot']}" if node.meta["op"] == "input" else str(node.target)
            self.out.gradients.append(Difference(name, "", worst))

    def returned(self, node: fx.Node) -> list[Any]:
        """What the model returns of a value."""
        return next((self.seen[node, u] for u in node.users if (node, u) in self.seen and not is_op(u)), self.env[node])

    def indices(self, node: fx.Node, rank: int) -> tuple[int, torch.Tensor, int]:
        """``(dim, indices, whole size)`` of the one cut dim of a value."""
        dims = self.ax.of(node)
        dim = next(i for i, t in enumerate(dims) if leaves(t) & self.flow.cut_atoms)
        return dim, self.deal.index(dims[dim], rank), dims[dim].n

    def rows(self, node: fx.Node, rank: int) -> torch.Tensor:
        """Which entries of the whole, flattened tensor a rank's part holds."""
        value = node.meta["value"]
        flat = torch.arange(value.numel()).reshape(value.shape)
        return self.deal.local(flat, self.ax.of(node), rank) if node in self.flow.cut else flat


def is_local(flow: Flow, node: fx.Node) -> bool:
    """Whether an op works on parts: its result, or something it reads, is cut."""
    results = list(node.users) if is_many(flow.ax.dims[node]) else [node]
    seen = [
        n for n in node.all_input_nodes if n in flow.cut or any(p.node is n and _sees(p, node) for p in flow.scatters)
    ]
    return bool(seen) or any(n in flow.cut for n in results)


def _sees(placed: Placed, user: fx.Node) -> bool:
    if placed.host is None:
        return user in placed.consumers
    return user.meta["call"] is not None and user.meta["call"].inside(placed.host.call)


def localized(flow: Flow, node: fx.Node, size: Callable[[Any], Any]) -> tuple[Any, Any]:
    """An op's arguments with ``size(term)`` in place of each integer that is the size of a cut term."""
    args: Any = node.args
    kwargs: Any = dict(node.kwargs)
    if not is_local(flow, node):
        return args, kwargs
    tree: Any = [args, kwargs]
    for site in flow.ax.sites.get(node, ()):
        if leaves(site.term) & flow.cut_atoms:
            local = size(site.term)
            tree = replaced(tree, site.path, local if site.sign == 1 else -local)
    return tuple(tree[0]), tree[1]


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """``tree`` with ``value`` at ``path``."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(tree, slice):
        parts = {k: getattr(tree, k) for k in ("start", "stop", "step")}
        parts[key] = replaced(parts[key], rest, value)
        return slice(parts["start"], parts["stop"], parts["step"])
    if isinstance(tree, dict):
        return {k: replaced(v, rest, value) if k == key else v for k, v in tree.items()}
    return (
        type(tree)([replaced(v, rest, value) if i == key else v for i, v in enumerate(tree)])
        if type(tree) in (list, tuple)
        else tuple(replaced(v, rest, value) if i == key else v for i, v in enumerate(tree))
    )


def relative(value: torch.Tensor, want: torch.Tensor, whole: torch.Tensor, floor: float = 1e-30) -> float:
    """The largest difference over the largest entry of the whole tensor; infinite where shapes differ.

    ``floor`` is the least scale: the gradient of a key's bias is zero but for rounding.
    """
    if value.shape != want.shape:
        return float("inf")
    value, want, whole = (t.to_dense() if t.layout is torch.sparse_coo else t for t in (value, want, whole))
    if not value.numel():
        return 0.0
    if not value.is_floating_point() and not value.is_complex():
        return 0.0 if torch.equal(value, want) else float("inf")
    difference = (value - want).abs()
    difference = difference[~torch.isnan(difference) & ~torch.isinf(difference)]
    if not torch.equal(torch.isfinite(value), torch.isfinite(want)):
        return float("inf")
    scale = whole[torch.isfinite(whole)].abs().max().item() if torch.isfinite(whole).any() else 0.0
    return (difference.max().item() if difference.numel() else 0.0) / max(scale, floor, 1e-30)
