"""Parameters and modules that the traced forward did not reach, which are treated as siblings are, if they can be.

What is left of them may run another time, among terms of a sum: an expert that returns its input as
it is, say, where the sum of the experts is made after all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from torch import fx, nn

from tpconvert.analyze.capture.run import Call, Trace
from tpconvert.analyze.flow.run import Flow
from tpconvert.analyze.trace.copies import has_forward
from tpconvert.spec.plan import Plan, Verdict


def twins(root: nn.Module, verdicts: Iterable[Verdict], used: Set[str]) -> dict[str, Verdict]:
    """Parameter that was not used -> the verdict of its like in a sibling, of which all are like those there."""
    by_shape: dict[tuple[str, tuple[int, ...]], list[Verdict]] = defaultdict(list)
    unused = [v for v in verdicts if v.name not in used]
    for v in verdicts:
        if v.name in used:
            by_shape[wild(v.name), v.shape].append(v)
    found: dict[str, Verdict] = {}
    for v in unused:
        like = (t for t in by_shape.get((wild(v.name), v.shape), ()) if one_number_apart(t.name, v.name))
        twin = next(like, None)
        if twin is not None and same_class(root, twin.name, v.name):
            found[v.name] = twin
    roots = {name: f"{roots_of(name, twin.name)[0]}." for name, twin in found.items()}
    unlike = {root for root in roots.values() if any(v.name.startswith(root) for v in unused if v.name not in found)}
    return {name: twin for name, twin in found.items() if roots[name] not in unlike}


def siblings_of(trace: Trace, found: Mapping[str, Verdict], idle: Set[str]) -> dict[str, str]:
    """Module that was not called -> the one it is treated as: those of ``found`` parameters, and ones without any."""
    root = trace.module
    out = dict(roots_of(name, twin.name) for name, twin in found.items())
    known = tuple(f"{path}." for path in out)
    called: dict[str, list[str]] = defaultdict(list)
    for path in dict.fromkeys(call.module for call in trace.calls):
        called[wild(path)].append(path)
    for path in sorted(idle - {""}):
        module = root.get_submodule(path)
        if any(True for _ in module.parameters()) or f"{path}.".startswith(known):
            continue
        like = (other for other in called.get(wild(path), ()) if one_number_apart(path, other))
        other = next((other for other in like if type(root.get_submodule(other)) is type(module)), None)
        out |= {} if other is None else {path: other}
    return out


def with_siblings(plan: Plan, siblings: Mapping[str, str], idle: Set[str]) -> Plan:
    """The boundaries, edits and rewrites of a traced module, again for its sibling among those that were ``idle``."""

    def again(items: Iterable[Any]) -> list[Any]:
        out = []
        for item in items:
            out.append(item)
            for new, old in siblings.items():
                module = new + item.module[len(old) :]
                if (item.module == old or item.module.startswith(f"{old}.")) and module in idle:
                    out.append(replace(item, module=module))
        return out

    return replace(
        plan,
        boundaries=tuple(again(plan.boundaries)),
        edits=tuple(again(plan.edits)),
        rewrites=tuple(again(plan.rewrites)),
        switches=tuple(again(plan.switches)),
    )


def roots_of(new: str, old: str) -> tuple[str, str]:
    """The shortest prefixes of two paths that hold their difference."""
    a, b = new.split("."), old.split(".")
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return ".".join(a[: at + 1]), ".".join(b[: at + 1])


def wild(name: str) -> str:
    """A name without its numbers."""
    return re.sub(r"\d+", "*", name)


def one_number_apart(a: str, b: str) -> bool:
    """Whether two names differ in one of their parts."""
    return sum(x != y for x, y in zip(a.split("."), b.split("."), strict=True)) == 1


def same_class(root: nn.Module, a: str, b: str) -> bool:
    """Whether the modules of two parameters are of one class."""
    return type(root.get_submodule(a.rpartition(".")[0])) is type(root.get_submodule(b.rpartition(".")[0]))


def unknown(trace: Trace, siblings: Container[str]) -> dict[str, list[str]]:
    """Module that was called -> those it holds that were not, whose weights nothing read, and that have no sibling.

    Of one within another, the outer one is named.
    """
    root = trace.module
    called = {id(root.get_submodule(c.module)) for c in trace.calls if not c.module.startswith("?")}
    tensors = dict(root.named_parameters(remove_duplicate=False)) | dict(root.named_buffers(remove_duplicate=False))
    read = {id(tensors[name]) for name in trace.parameters if name in tensors}
    out: dict[str, list[str]] = {}

    def look(path: str, module: nn.Module, caller: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if id(child) in called:
                look(inner, child, inner)
            elif inner in siblings:
                continue
            elif not has_forward(child) or any(id(m) in called for m in child.modules()):
                look(inner, child, caller)
            elif not any(id(t) in read for t in (*child.parameters(), *child.buffers())):
                out.setdefault(caller, []).append(inner)

    look("", root, "")
    return out


def among_terms(flow: Flow, held: dict[str, list[str]], anew: Set[str]) -> tuple[str, ...]:
    """Of the modules ``held`` by others, those whose caller's own forward sees terms of sums, or slices of the tokens.

    What a whole layer is given or gives there would count on every rank, or its gradient on one; a part of a value is
    of another size than it takes.  A forward that is written ``anew`` calls what it was seen to call.
    """
    steps = flow.ax.trace.steps(*(c for c in flow.ax.trace.calls if c.module in held.keys() - anew))
    callers = {call.module for call, done in steps.items() if any(_is_term(flow, call, n) for n in _seen(done))}
    return tuple(path for caller, paths in held.items() if caller in callers for path in paths)


def _seen(steps: Iterable[fx.Node | Call]) -> Iterator[fx.Node]:
    for step in steps:
        if isinstance(step, fx.Node):
            yield from (step, *step.all_input_nodes)
        else:
            yield from (*step.inputs.values(), *step.outputs.values())


def _is_term(flow: Flow, call: Call, node: fx.Node) -> bool:
    """Whether a value is a term of a sum, or a slice, where the own forward of a call sees it."""
    placed = flow.reduced.get(node)
    if node in flow.sliced:
        return True
    if placed is not None and placed.host is not None:
        return call.inside(placed.host.call) is (placed.host.side == "output")
    return node in flow.partial
