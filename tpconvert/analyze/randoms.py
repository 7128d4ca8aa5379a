"""Where random numbers must differ between ranks: dropout of a cut value, and nowhere else.

A module whose own forward drops entries of cut values alone draws cut numbers from its input to its output.  One that
drops entries of both kinds is switched at its children's boundaries, between one drop and the next; where no child
lies between them it is refused.
"""

from __future__ import annotations

from collections import defaultdict
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


def switches(flow: Flow, training: Any) -> tuple[list[Switch], list[str]]:
    """``(switches, modules that draw for whole and for cut values with nothing between)``."""
    drawn = _draws(flow, training)
    scopes = {c for c, draws in drawn.items() if all(cut for _, cut in draws)}
    out: dict[Switch, None] = {}
    refused: list[str] = []
    for call, draws in drawn.items():
        inside = any(call.inside(s) for s in scopes if s is not call)
        if call in scopes:
            made: list[Switch] | None = _scope(call, True)
        elif all(not cut for _, cut in draws):
            made = _scope(call, False) if inside else []
        else:
            made = None if inside else _between(flow, call, draws)
        if made is None or any(Switch(s.module, s.side, not s.cut) in out for s in made):
            refused.append(call.module)
        else:
            out |= dict.fromkeys(made)
    return list(out), refused


def _draws(flow: Flow, training: Any) -> dict[Call, list[tuple[fx.Node, bool]]]:
    """Call -> what its own forward draws, in order, and whether for cut values.

    One dropout module may be called on a cut value here and on a whole one there; a switch at it would turn both, so
    its draws count as its caller's.
    """
    drawn: dict[Call, list[tuple[fx.Node, bool]]] = defaultdict(list)
    kinds: dict[str, set[bool]] = defaultdict(set)
    for node in random_nodes(flow, training):
        is_cut = node in flow.cut or any(n in flow.cut for n in node.all_input_nodes)
        drawn[node.meta["call"]].append((node, is_cut))
        kinds[node.meta["call"].module].add(is_cut)
    out: dict[Call, list[tuple[fx.Node, bool]]] = defaultdict(list)
    order = {n: i for i, n in enumerate(flow.ax.trace.graph.nodes)}
    for call, draws in drawn.items():
        own = len(kinds[call.module]) == 1 or len({cut for _, cut in draws}) > 1 or call.parent is None
        out[call if own else call.parent] += draws  # type: ignore[index]
    return {call: sorted(draws, key=lambda d: order[d[0]]) for call, draws in out.items()}


def _scope(call: Call, cut: bool) -> list[Switch]:
    return [Switch(call.module, "input", cut), Switch(call.module, "output", not cut)]


def _between(flow: Flow, call: Call, draws: list[tuple[fx.Node, bool]]) -> list[Switch] | None:
    """Switches at children's outputs that lie between draws of different kinds; a forward begins and ends whole."""
    order = {n: i for i, n in enumerate(flow.ax.trace.graph.nodes)}
    children = [c for c in flow.ax.trace.calls if c.parent is call]
    out = []
    now, after = False, call.position
    for node, cut in [*draws, (None, False)]:
        at = order[node] if node is not None else call.end
        if cut != now:
            child = next((c for c in reversed(children) if after <= c.position and c.end <= at), None)
            if child is None:
                return None
            out.append(Switch(child.module, "output", cut))
            now = cut
        after = at
    return out


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
