"""A second opinion on a trace: does ``torch.export`` see the same parameters flow into the same parameters' ops?

Two parameters are related where a value computed from the first enters an op that uses the second, or where the first
reaches the model's output (written as a relation to ``output``).  Both graphs are read this way and compared; sizes,
the order of ops and their decomposition do not matter.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from tpconvert.analyze.capture.run import capture

Relations = frozenset[tuple[str, str]]


SIZED = ("expand_as", "view_as", "reshape_as", "type_as")
"""Ops that take the shape or the dtype of their second operand, and none of its values."""


def relations(order: Iterable[fx.Node], names: Mapping[fx.Node, str], outputs: Iterable[fx.Node]) -> Relations:
    """``(first, second)``: a value that hangs on parameter ``first`` meets parameter ``second`` in an op.

    What is computed from parameters alone (a cast, a transposed weight) counts as those parameters: one graph has such
    ops where the other has none.
    """
    reach: dict[fx.Node, frozenset[str]] = {}
    alone: dict[fx.Node, frozenset[str]] = {}
    found: set[tuple[str, str]] = set()
    for node in order:
        if node in names:
            alone[node] = frozenset([names[node]])
            continue
        operands = _values_of(node)
        own = frozenset[str]().union(*(alone[n] for n in operands if n in alone))
        found |= {(a, b) for a in own for b in own if a != b}
        if own and all(n in alone for n in operands if n in alone or n in reach):
            alone[node] = own
            continue
        given = frozenset[str]().union(*(reach[n] for n in operands if n in reach))
        found |= {(a, b) for a in given for b in own if a != b}
        reach[node] = given | own
    found |= {(a, "output") for n in outputs for a in reach.get(n, alone.get(n, ()))}
    return frozenset(found)


def _values_of(node: fx.Node) -> list[fx.Node]:
    """The operands of which an op reads values."""
    schema = getattr(node.target, "_schema", None)
    op = schema.name.partition("::")[2] if schema is not None else str(node.meta.get("op", ""))
    if op.endswith("_like") or op.startswith("new_"):
        return []
    return node.all_input_nodes[:1] if op in SIZED else node.all_input_nodes


def of_trace(module: nn.Module, inputs: Mapping[str, Any]) -> Relations:
    """What the recorder sees."""
    trace = capture(module, inputs)
    names = {node: name for name, node in trace.parameters.items()}
    return relations(trace.nodes, names, trace.outputs.values())


def of_export(module: nn.Module, inputs: Mapping[str, Any]) -> Relations | None:
    """What ``torch.export`` sees, in-place ops made functional; None where it cannot export the module."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, (), dict(inputs), strict=False).run_decompositions({})
    except Exception:
        return None
    signature = program.graph_signature
    first: dict[int, str] = {}
    for kind in (module.named_parameters, module.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            first.setdefault(id(tensor), name)
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    known = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes = list(program.graph.nodes)
    names = {n: first[id(held[known[n.name]])] for n in nodes if n.name in known and known[n.name] in held}
    (out,) = [n for n in nodes if n.op == "output"]
    user = set(signature.user_outputs)
    return relations((n for n in nodes if n.op != "output"), names, [n for n in out.all_input_nodes if n.name in user])


def disagreement(module: nn.Module, inputs: Mapping[str, Any]) -> list[str] | None:
    """The relations that only one of the two sees, in words; None where ``torch.export`` cannot say."""
    theirs = of_export(module, inputs)
    if theirs is None:
        return None
    mine = of_trace(module, inputs)
    unseen = [f"only torch.export: {a} -> {b}" for a, b in sorted(theirs - mine)]
    return unseen + [f"only the trace: {a} -> {b}" for a, b in sorted(mine - theirs)]
