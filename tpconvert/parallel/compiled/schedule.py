"""Passes over the graphs that torch.compile makes: what of the network can run beside arithmetic, and what is kept.

A backward of one region, as traced and as run::

    grad, sum, wait, weight gradients      the sum waits for nothing else, and nothing runs meanwhile
    grad, sum, weight gradients, wait      the weight gradients hide it
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy

from tpconvert.parallel.compiled import merged, sums
from tpconvert.parallel.compiled import substitute as substituted
from tpconvert.parallel.compiled.merged import merge_products
from tpconvert.parallel.compiled.substitute import NAMESPACE, Pairs, substitute
from tpconvert.parallel.compiled.sums import LAYOUT, SUM_OF_PRODUCTS, add_in_place, after

FLOPS_PER_BYTE = 3000
"""Arithmetic that takes as long as a byte on its way: some 600 TFLOP/s beside 200 GB/s."""
LATENCY = 4 * 2**20
"""Bytes that go over the wire in the time that any collective takes at least."""

aten = torch.ops.aten


class JointPass(CustomGraphPass):
    """Of a joint graph: narrow products of one value are one product, and what is gathered need not be kept.

    With ``gather_again`` what a forward gathers is gathered again for its backward, which keeps a rank's slice only.
    """

    def __init__(self, gather_again: bool = True) -> None:
        self.gather_again = gather_again

    def __call__(self, graph: fx.Graph) -> None:
        """Merge products, and mark gathers and the same values in another layout for the partitioner."""
        merge_products(graph)
        if self.gather_again:
            self.mark(graph)

    def mark(self, graph: fx.Graph) -> None:
        """What is gathered is made again."""
        backward = after(n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target))
        again: set[fx.Node] = set()
        for node in (n for n in graph.nodes if n not in backward):
            follows = (_waits(node) or node.target in LAYOUT) and node.args[0] in again
            if _gathers(node) or follows:
                again.add(node)
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)  # checkpointing may have its own
                node.meta.setdefault("ac_graph_id", 0)

    def uuid(self) -> Any:
        """What a cache of compiled graphs goes by."""
        return get_hash_for_files((__file__, merged.__file__, sums.__file__), f"gather again {self.gather_again}")


class HideCollectives(CustomGraphPass):
    """Of a forward's or a backward's graph: arithmetic that nobody waits for goes between collectives and their waits.

    Collectives keep their order, which all ranks must share.  A graph that writes into tensors is left as it is, but
    for what it writes into its own inputs at its end.  Those of the groups in ``pairs`` become exchanges of two GPUs.
    """

    def __init__(self, pairs: Pairs | None = None) -> None:
        self.pairs = dict(pairs or {})

    def __call__(self, graph: fx.Graph) -> None:
        """Put the nodes in a new order."""
        keeps = not any(_writes(n) for n in _ops(graph)[0])
        if keeps and not _tuned():
            add_in_place(graph, _starts)
        substitute(graph, self.pairs)
        nodes, last = _ops(graph)
        if not keeps or not any(_starts(n) for n in nodes):
            return
        order = [*_ordered(nodes), *last]
        at = next(n for n in graph.nodes if n.op == "output")
        for node in order:
            at.prepend(node)
        preserve_node_ordering(graph, _held_back(order))

    def uuid(self) -> Any:
        """What a cache of compiled graphs goes by."""
        files = __file__, substituted.__file__, sums.__file__
        return get_hash_for_files(files, f"hide collectives {sorted(self.pairs.items())} {_tuned()}")


def _ops(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The ops of a graph, and apart from them what it writes into its own inputs at its end."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    last = [n for n in nodes if n.target is aten.copy_.default and n.args[0].op == "placeholder"]  # type: ignore[union-attr]
    return [n for n in nodes if n not in set(last)], last


def _tuned() -> bool:
    """Whether torch looks for the fastest kernel for each product, which it must see for that."""
    return bool(config.max_autotune or config.max_autotune_gemm)


def _ordered(nodes: list[fx.Node]) -> list[fx.Node]:
    """What a collective depends on as early as can be, waits as late as can be, and the rest where it hides most."""
    index = {n: i for i, n in enumerate(nodes)}
    starts = [n for n in nodes if _starts(n)]
    first = _before(starts, index)
    spare = [n for n in nodes if flops(n)]
    placed: dict[fx.Node, None] = {}

    def missing(node: fx.Node) -> list[fx.Node]:
        return sorted(_before([node], index, placed), key=index.__getitem__)

    def fill(wait: fx.Node) -> None:
        """Place what can run while the collective does; it may wait for those that were begun before."""
        budget = FLOPS_PER_BYTE * (_bytes(wait) + LATENCY)
        begun = list(placed)
        earlier = set(begun[: begun.index(wait.args[0])])
        for waits in (False, True):
            for node in spare:
                if budget <= 0:
                    return
                needs = [] if node in placed else missing(node)
                if needs and all(not _starts(n) and (not _waits(n) or (waits and n.args[0] in earlier)) for n in needs):
                    placed.update(dict.fromkeys(needs))
                    budget -= flops(node)

    def place(node: fx.Node) -> None:
        for needed in missing(node):
            if _waits(needed) and needed.args[0] in placed and needed not in placed:
                fill(needed)
            placed.setdefault(needed)

    for node in (*(n for n in nodes if n in first and not _waits(n)), *nodes):
        if node not in placed:
            place(node)
    return list(placed)


def _held_back(order: list[fx.Node]) -> dict[fx.Node, OrderedSet[fx.Node]]:
    """Each wait -> the products between its collective and it, which the compiler would else put behind it again.

    Not those that a collective takes: it works in their memory, which something that reads it later would cost.
    """
    index = {n: i for i, n in enumerate(order)}
    found: dict[fx.Node, OrderedSet[fx.Node]] = {}
    for wait in filter(_waits, order):
        between = order[index.get(wait.args[0], index[wait]) + 1 : index[wait]]
        if products := [n for n in between if flops(n) and not any(_starts(u) for u in n.users)]:
            found[wait] = OrderedSet(products)
    return found


def flops(node: fx.Node) -> float:
    """The floating-point operations of a matrix product, 0 of all else."""
    if node.target is SUM_OF_PRODUCTS:
        lefts: Any = node.args[0]
        return 2.0 * _size(node.meta["val"]) * sum(_hint(a.meta["val"].shape[-1]) for a in lefts)
    if node.target not in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default):
        return 0
    a, out = node.args[-2], node.meta.get("val")
    if out is None or not isinstance(a, fx.Node) or a.meta.get("val") is None:
        return 0
    return 2.0 * _size(out) * _hint(a.meta["val"].shape[-1])


def _bytes(node: fx.Node) -> float:
    """What a collective brings or takes, by its wait; all that is known of an unknown size is that it is much."""
    values = [n.meta.get("val") for n in (node, *node.args[0].all_input_nodes)]
    sizes = [_size(v) * v.element_size() for v in values if isinstance(v, torch.Tensor)]
    return max(sizes, default=math.inf)


def _size(value: torch.Tensor) -> float:
    return math.prod(_hint(n) for n in value.shape)


def _hint(n: Any) -> float:
    node = getattr(n, "node", None)
    return float(n) if node is None else float(node.hint if node.has_hint() else 4096)


def _before(nodes: Iterable[fx.Node], among: dict[fx.Node, int], but: Iterable[fx.Node] = ()) -> dict[fx.Node, None]:
    """``nodes`` and all that they need, as far as it is ``among`` others and not in ``but``."""
    found: dict[fx.Node, None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in among and node not in but and node not in found:
            found[node] = None
            waiting += node.all_input_nodes
    return found


def _named(node: Any, words: tuple[str, ...]) -> bool:
    target = getattr(node, "target", None)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("_c10d_functional", NAMESPACE):
        return False
    return any(word in target.name() for word in words)


def _starts(node: Any) -> bool:
    return _named(node, ("all_", "reduce_scatter", "broadcast", "::begin_"))


def _gathers(node: Any) -> bool:
    return _named(node, ("all_gather",))


def _waits(node: Any) -> bool:
    return _named(node, ("wait_tensor", "::end_"))


def _writes(node: fx.Node) -> bool:
    """Whether an op changes a tensor that it is given, or cannot be looked into."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") not in ("_operator", "math", "torch")
    if node.target.namespace == "_c10d_functional":
        return node.target.name().endswith("_")
    return node.target._schema.is_mutable
