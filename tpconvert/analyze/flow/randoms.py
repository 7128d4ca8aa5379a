"""Where random numbers must differ between ranks: dropout and other draws for a cut value, and nowhere else.

A module whose own forward drops entries of cut values alone draws cut numbers from its input to its output.  One that
drops entries of both kinds is switched at its children's boundaries, between one drop and the next; where no child
lies between them it is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from tpconvert.analyze.axes.terms import leaves
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.flow.run import Flow
from tpconvert.analyze.trace.draws import DROPS, is_random
from tpconvert.spec.plan import Switch

_RATES = {"scaled_dot_product_attention": (4, "dropout_p")}
"""Ops whose rate has another place and name than a dropout's."""


class Random:
    """What :func:`switches` finds."""

    def __init__(self) -> None:
        self.switches: dict[Switch, None] = {}
        self.refused: dict[str, str] = {}
        """Module -> why its draws cannot be told apart."""


def switches(flow: Flow, training: Any) -> Random:
    """The switches, and the modules that need some where none can be."""
    out = Random()
    drawn = _draws(flow, training)
    scopes = {c for c, draws in drawn.items() if all(cut for _, cut in draws)}
    always = any(cut and _in_evaluation(node) for draws in drawn.values() for node, cut in draws)
    for call, draws in drawn.items():
        if any(cut and node.kwargs.get("generator") is not None for node, cut in draws):
            out.refused[call.module] = "it draws numbers for cut values from a generator of its own"
            continue
        inside = any(call.inside(s) for s in scopes if s is not call)
        if call in scopes:
            made: list[Switch] | None = _scope(call, True)
        elif all(not cut for _, cut in draws):
            made = _scope(call, False) if inside else []
        else:
            made = None if inside else _between(flow, call, draws)
        made = None if made is None else [replace(s, always=always) for s in made]
        if made is None or any(replace(s, cut=not s.cut) in out.switches for s in made):
            out.refused[call.module] = "its forward draws numbers for whole and for cut values"
        else:
            out.switches |= dict.fromkeys(made)
    return out


def _draws(flow: Flow, training: Any) -> dict[Call, list[tuple[fx.Node, bool]]]:
    """Call -> what its own forward draws, in order, and whether for cut values.

    One dropout module may be called on a cut value here and on a whole one there; a switch at it would turn both, so
    its draws count as its caller's.
    """
    drawn: dict[Call, list[tuple[fx.Node, bool]]] = defaultdict(list)
    kinds: dict[str, set[bool]] = defaultdict(set)
    for node in random_nodes(flow, training):
        is_cut = _draws_cut(flow, node)
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


def _draws_cut(flow: Flow, node: fx.Node) -> bool:
    """Whether the numbers that an op draws are for parts; one mask for all of a channel is for the channels."""
    if node.meta["op"].startswith("feature_"):
        sliced = node in flow.local and flow.sliced_dims[node] < 2
        return sliced or any(leaves(t) & flow.cut_atoms for t in flow.ax.of(node)[:2])
    return node in flow.local or node in flow.cut or any(n in flow.cut for n in node.all_input_nodes)


def random_nodes(flow: Flow, training: Any) -> Iterable[fx.Node]:
    """The ops that draw random numbers in training."""
    number: dict[Call, int] = {}
    for node in flow.ax.trace.nodes:
        call = node.meta["call"]
        if node.op != "call_function" or call is None:
            continue
        own = number[call] = number.get(call, -1) + 1
        op = node.meta["op"]
        if op in _RATES or op.rstrip("_") in DROPS:
            position, name = _RATES.get(op, (1, "p"))
            differs = training.get(call.module)
            rate = flow.ax.bound.get(node, {}).get(name, _argument(node, position, name))
            if rate != 0.0 or (own, (0, position)) in differs or (own, (1, name)) in differs:
                yield node
        elif is_random(op):
            yield node


def drew(node: fx.Node) -> bool:
    """Whether an op that returns one tensor drew it while it was recorded, or a custom function's body did."""
    op = node.meta["op"]
    if not isinstance(node.meta["val"], torch.Tensor):
        return False
    if isinstance(body := node.kwargs.get("also"), tuple | list) and not node.meta["grad"]:
        return any(isinstance(n, fx.Node) and drew(n) for n in body)
    return op.rstrip("_") not in DROPS and _draws_always(op)


@lru_cache
def _draws_always(op: str) -> bool:
    return op != "scaled_dot_product_attention" and is_random(op)


def _in_evaluation(node: fx.Node) -> bool:
    """Whether an op drew when it was recorded, which is in evaluation."""
    op = node.meta["op"]
    if op == "scaled_dot_product_attention":
        return bool(_argument(node, *_RATES[op]))
    at = DROPS.get(op.rstrip("_"))
    return at is None or bool(_argument(node, at, "train" if "train" in node.kwargs else "training"))


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else 0.0)
