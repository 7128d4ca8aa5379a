"""Where code of the user's own sees gradients: custom autograd functions, hooks, and derivatives taken in a forward.

What it does to them need not be linear, so it must see all of each gradient, as it would in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointFunction

from tpconvert.analyze.trace.trees import tensors_in
from tpconvert.analyze.watch.running import marks
from tpconvert.analyze.watch.unseen import WHY, enclosed

FUNCTION = "it has a backward of its own, which need not be linear (a rule says that it is)"
HOOK = "a hook on its gradient must see all of it"
DIFFERENTIATED = "the forward differentiates through it"

WATCHING = {
    "register_hook": HOOK,
    "retain_grad": HOOK,
    "register_post_accumulate_grad_hook": HOOK,
    ".grad_fn": HOOK,
    "grad": DIFFERENTIATED,
    "backward": DIFFERENTIATED,
}
"""Calls after which somebody else sees the gradient of a value; the op that notes them gives the value as it is."""


def watches(func: Any, name: str) -> bool:
    """Whether an op lets code see gradients, or runs functions that it is given, such as ``torch.cond``."""
    return name in WATCHING or isinstance(func, torch._ops.HigherOrderOperator)


def watch(recorder: Any, func: Any, name: str, args: Any, kwargs: Any) -> None:
    """Note that the gradient of a value is seen here: of the first argument, or of all that it is computed from.

    Of an op that runs functions, all the tensors that these hold.
    """
    values = [recorder.node_for(t) for t in tensors_in((args, kwargs))]
    if isinstance(func, torch._ops.HigherOrderOperator):
        values = [recorder.node_for(t) for t in enclosed((args, kwargs))]
    elif WATCHING[name] is HOOK:
        values = values[:1]
        if has_own_backward(values[0]):
            return  # it sees all of it anyway; torch's own module hooks stand at such values
    else:
        values = _upstream(values)
    if not values:
        return
    tensor = values[0].meta["val"]
    node = recorder.graph.create_node("call_function", Watched(name, args), tuple(values))
    node.meta.update(
        op=name.strip("."), call=recorder.stack[-1] if recorder.stack else None, why=WATCHING.get(name, WHY)
    )
    node.meta.update(val=tensor, shape=tuple(tensor.shape), grad=False, watches=True)
    if any(n in recorder.by_data for n in values):
        recorder.by_data.add(node)


def watchers(node: fx.Node) -> list[fx.Node]:
    """The places where the gradient of a value is seen."""
    return [u for u in node.users if u.meta.get("watches")]


def has_own_backward(node: fx.Node) -> bool:
    """Whether the backward of an op was written by hand."""
    made_by = node.args[0] if node.meta["op"] == "item" else node
    return bool(made_by.meta.get("own_backward"))  # type: ignore[union-attr]


def is_foreign(func: Any) -> bool:
    """Whether an op is of a library of its own, or runs functions that it is given, and so may have any backward."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        return True
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name.partition("::")[0] not in ("aten", "prim", "prims")
    return isinstance(func, torch._ops.OpOverload) and func.namespace not in ("aten", "prim", "prims")


def _upstream(values: list[fx.Node]) -> list[fx.Node]:
    """All that differentiable values are computed from."""
    found: dict[fx.Node, None] = {}
    pending = list(values)
    while pending:
        node = pending.pop()
        value = node.meta.get("val")
        if node in found or not (node.meta.get("grad") or not isinstance(value, torch.Tensor)):
            continue
        found[node] = None
        pending += node.all_input_nodes
    return [n for n in found if isinstance(n.meta.get("val"), torch.Tensor)]


class Watched:
    """Gives its first operand, with the hook on its gradient where there was one."""

    def __init__(self, name: str, args: Any) -> None:
        self.__name__, self.args = name.strip("."), args

    def __call__(self, value: torch.Tensor, *others: Any) -> torch.Tensor:
        """The value as it is."""
        if self.__name__ == "register_hook" and value.requires_grad:
            value.register_hook(*self.args[1:])  # type: ignore[no-untyped-call]
        return value


# -- custom functions -------------------------------------------------------------------------------------------


@contextmanager
def showing_functions(recorder: Any) -> Iterator[None]:
    """Show ``torch.autograd.Function.apply`` to the recorder: no torch function does.

    A class may have been asked for its ``apply`` long before, so that is left alone; all end in that of this base.
    """
    base: Any = torch.autograd.function._SingleLevelFunction

    def apply(cls: Any, *args: Any) -> Any:
        return applied(recorder, cls, super(base, cls).apply, args)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


def applied(recorder: Any, cls: Any, run: Any, args: Any) -> Any:
    """Run a custom function and record it as one op.

    With a rule that is the whole of it.  Without one its body is recorded too, and the op takes in all that the body
    itself computes, so that nothing of it is cut; modules that the body calls are recorded as ever.  Functions that
    are seen through have only a body: those that a rule names so, and activation checkpointing.
    """
    names = [f"{cls.__module__}.{cls.__qualname__}.apply", f"{cls.__name__}.apply"]
    op = next((name for name in names if recorder.rules.get(name) is not None), names[-1])
    rule = recorder.rules.get(op)
    through = cls is CheckpointFunction or (rule is not None and rule.through)
    if through or recorder.blind() or recorder.below.covered:
        return run(*args)
    call = recorder.stack[-1] if recorder.stack else None
    given, start, calls = recorder.map(tuple(args)), len(recorder.graph.nodes), len(recorder.calls)
    recorder.hiding += rule is not None
    try:
        out = run(*args)
    finally:
        recorder.hiding -= rule is not None
    outs = tensors_in(out)
    if not outs:
        return out
    kwargs: dict[str, Any] = {}
    modules = len(recorder.calls) > calls
    inplace = {id(t) for t in tensors_in(args)} & {id(t) for t in outs}
    if rule is None:
        new = list(islice(reversed(recorder.graph.nodes), len(recorder.graph.nodes) - start))
        kwargs["body"] = [recorder.nodes.get(id(t)) or recorder.node_for(t) for t in outs]
        kwargs["also"] = [n for n in new if n.op == "call_function" and n.meta["call"] is call]
        if modules:
            for tensor in outs:
                recorder.node_for(tensor)  # marks what the modules compute as differentiable
    node = recorder.graph.create_node("call_function", Applied(cls, args, modules or bool(inplace)), given, kwargs)
    if rule is not None and (reads := [n for n in recorder.below.of_all(outs) if n not in node.all_input_nodes]):
        node.kwargs = {"also": reads}
    node.meta |= {"op": op, "call": call, "val": out, "why": FUNCTION, "own_backward": rule is None} | marks()
    for tensor, item in recorder.results(node, out, outs):
        (recorder.mutated if id(tensor) in inplace else recorder.bind)(tensor, item)
    return out


class Applied:
    """A custom function with its arguments; one that cannot be run by itself gives what its recorded body gave."""

    def __init__(self, cls: Any, args: Any, by_body: bool) -> None:
        self.cls, self.args, self.by_body = cls, args, by_body
        self.__name__ = f"{cls.__name__}.apply"

    def __call__(self, *args: Any, body: Any = (), also: Any = ()) -> Any:
        """Apply it, with the recorded arguments in place of those that are neither tensors nor numbers."""
        if self.by_body:
            return body[0] if len(body) == 1 else tuple(body)
        pairs = zip(args, self.args, strict=True)
        return self.cls.apply(*(kept if isinstance(a, str | tuple | list | dict) else a for a, kept in pairs))


def mark_differentiable(node: fx.Node) -> None:
    """Mark a node, and all it was computed from, as taking part in differentiation."""
    pending, several = [node], set[fx.Node]()
    while pending:
        node = pending.pop()
        value = node.meta.get("val")
        if isinstance(value, tuple | list) and node not in several:  # of which an item is one
            several.add(node)
            pending += node.all_input_nodes
        if node.meta.get("grad") or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        node.meta["grad"] = True
        pending += node.all_input_nodes
