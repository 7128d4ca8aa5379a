"""Where random numbers must differ between ranks: dropout of a cut value, and nowhere else.

A module whose own forward drops entries of cut values draws cut numbers from its input to its output; one inside it
that drops entries of whole values draws whole ones.  A forward that does both cannot be switched and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from tpconvert.analyze.capture import Call
from tpconvert.analyze.flow import Flow
from tpconvert.spec.plan import Switch

DROPS = frozenset(["dropout", "dropout_", "alpha_dropout", "feature_dropout", "native_dropout", "rrelu"])
DRAWS = frozenset(
    ["rand_like", "randn_like", "bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_", "multinomial"]
)


def switches(flow: Flow, training: Any) -> tuple[list[Switch], dict[str, list[fx.Node]]]:
    """``(switches, modules that draw for whole and for cut values alike)``."""
    cut: dict[str, list[Call]] = {}
    whole: dict[str, list[Call]] = {}
    nodes: dict[str, list[fx.Node]] = {}
    for node in random_nodes(flow, training):
        call = node.meta["call"]
        is_cut = node in flow.cut or any(n in flow.cut for n in node.all_input_nodes)
        (cut if is_cut else whole).setdefault(call.module, []).append(call)
        nodes.setdefault(call.module, []).append(node)
    mixed = {m: nodes[m] for m in cut.keys() & whole.keys()}
    out: list[Switch] = []
    for module in cut:
        out += [Switch(module, "input", True), Switch(module, "output", False)]
    for module, calls in whole.items():
        if module not in mixed and any(_inside(c, cut) for c in calls):
            out += [Switch(module, "input", False), Switch(module, "output", True)]
    return out, mixed


def random_nodes(flow: Flow, training: Any) -> Iterable[fx.Node]:
    """The ops that draw random numbers in training."""
    number: dict[Call, int] = {}
    for node in flow.ax.trace.nodes:
        call = node.meta["call"]
        if node.op != "call_function" or call is None:
            continue
        own = number[call] = number.get(call, -1) + 1
        op = node.meta["op"]
        if op in DROPS:
            if flow.ax.bound.get(node, {}).get("p", _argument(node, 1, "p")) != 0.0:
                yield node
        elif op in DRAWS:
            yield node
        elif op == "scaled_dot_product_attention":
            differs = training.get(call.module)
            if _argument(node, 4, "dropout_p") or (own, (1, "dropout_p")) in differs or (own, (0, 4)) in differs:
                yield node


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else 0.0)


def _inside(call: Call, cut: dict[str, list[Call]]) -> bool:
    parent = call.parent
    while parent is not None:
        if parent.module in cut:
            return True
        parent = parent.parent
    return False
