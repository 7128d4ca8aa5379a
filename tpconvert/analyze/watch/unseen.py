"""What torch functions do not show: script functions, ``torch.vmap``, C++ code.

Their ops are seen one level further down, in a dispatch mode, by tensors that no torch function has shown.  There it is
noted which recorded values each result is computed from.  When such a result comes back into the forward, the graph
gets one *unseen* op over those values.  No rule says what it does to their dims, so all of them stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import maybe_current_level
from torch.utils._python_dispatch import TorchDispatchMode

from tpconvert.analyze.trace.trees import tensors_in

WHY = "its value is computed by code that torch functions do not show (a script function, torch.vmap, C++)"

Sources = dict[fx.Node, None]
"""The recorded values that a tensor is computed from."""


def transforming() -> bool:
    """Whether a transform such as ``torch.vmap`` is under way, whose tensors are its own."""
    return maybe_current_level() is not None


class Below(TorchDispatchMode):
    """Notes what ops that no torch function shows compute, and from what."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder
        self.covered = 0
        """More than 0 while an op that a torch function shows is under way, or the recorder itself computes."""
        self.made: dict[int, Sources] = {}  # id of a tensor -> its sources
        self.stored: dict[int, Sources] = {}  # the same by storage, for its views
        self.alive: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.covered or not isinstance(func, torch._ops.OpOverload):  # torch.cond and its like: their parts come too
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            sources = self.of_all((args, kwargs))
            out = func(*args, **kwargs)
            if sources:
                self.note(func, args, kwargs, out, sources)
        return out

    def note(self, func: Any, args: Any, kwargs: Any, out: Any, sources: Sources) -> None:
        """Keep the sources of an op's results, and of what it writes to."""
        results = tensors_in(out)
        for tensor in results:
            self.keep(tensor, sources)
        if func._schema.is_mutable:
            named = zip(func._schema.arguments, args, strict=False)
            written = [v for a, v in named if a.alias_info is not None and a.alias_info.is_write]
            written += [v for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
                        for v in [kwargs.get(a.name)]]  # fmt: skip
            for tensor in tensors_in(written):
                self.wrote(tensor, sources)
        elif not results:
            self.recorder.read |= set(sources)  # a number, which decides we know not what

    def keep(self, tensor: torch.Tensor, sources: Sources) -> None:
        """A tensor is computed from these."""
        storage = storage_of(tensor)
        self.made[id(tensor)] = self.made.get(id(tensor), {}) | sources
        self.stored[storage] = self.stored.get(storage, {}) | sources
        self.alive.append(tensor)

    def wrote(self, tensor: torch.Tensor, sources: Sources) -> None:
        """A tensor was written to; one that is recorded, or shares its memory with one, has a new version."""
        known = tensor
        if id(tensor) not in self.recorder.nodes and id(tensor) not in self.recorder.names:
            on_it = self.recorder.storages.get(storage_of(tensor), ())
            if not on_it:
                return self.keep(tensor, sources)
            known = on_it[0]
        self.recorder.mutated(known, self.node(known, sources | self.of(known)))
        return None

    def of_all(self, tree: Any) -> Sources:
        """The sources of all tensors in arguments."""
        return {n: None for tensor in tensors_in(tree) for n in self.of(tensor)}

    def of(self, tensor: torch.Tensor) -> Sources:
        """A recorded tensor itself, or what a tensor was computed from as far as that was noted."""
        with torch._C.DisableTorchFunction():  # or looking at it would be recorded
            return self._of(tensor)

    def _of(self, tensor: torch.Tensor) -> Sources:
        nodes, names = self.recorder.nodes, self.recorder.names
        if id(tensor) in nodes:
            return {nodes[id(tensor)]: None}
        if id(tensor) in self.made:
            return self.made[id(tensor)]
        if id(tensor) in names:
            return {self.recorder.node_for(tensor): None}
        storage = storage_of(tensor)
        on_it = {nodes[id(t)]: None for t in self.recorder.storages.get(storage, ())}
        return self.stored.get(storage, {}) | on_it or self.by_history(tensor)

    def by_history(self, tensor: torch.Tensor) -> Sources:
        """The recorded tensors where the autograd history of a tensor begins; for what has no op to be seen."""
        if tensor.grad_fn is None:
            return {}
        recorder = self.recorder
        known = {t.grad_fn: recorder.nodes[id(t)] for t in recorder.alive if t.grad_fn is not None}
        found: Sources = {}
        pending, seen = [tensor.grad_fn], set()
        while pending:
            step = pending.pop()
            if step is None or step in seen:
                continue
            seen.add(step)
            leaf = getattr(step, "variable", None)
            if step in known:
                found[known[step]] = None
            elif leaf is not None and (id(leaf) in recorder.nodes or id(leaf) in recorder.names):
                found[recorder.node_for(leaf)] = None
            else:
                pending += [f for f, _ in step.next_functions]
        return found

    def node(self, tensor: torch.Tensor, sources: Sources) -> fx.Node:
        """The op that stands for all that was done unseen."""
        recorder = self.recorder
        operands = tuple(sources)
        values = [n.meta["val"] for n in operands]
        node: fx.Node = recorder.graph.create_node("call_function", Replayed(tensor, values), operands)
        node.meta.update(op="unseen", call=recorder.stack[-1] if recorder.stack else None, why=WHY, own_backward=True)
        if any(n in recorder.by_data for n in operands):
            recorder.by_data.add(node)
        return node


class Replayed:
    """An op that cannot be run again: it gives what it gave, with the gradients of the recorded run."""

    __name__ = "unseen"

    def __init__(self, result: torch.Tensor, operands: Iterable[torch.Tensor]) -> None:
        self.result, self.operands = result, tuple(operands)

    def __call__(self, *operands: torch.Tensor) -> torch.Tensor:
        """The recorded result, in place of one for these operands, which must equal the recorded ones."""
        return _Replay.apply(self, *operands)  # type: ignore[no-any-return,no-untyped-call]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Replayed, *operands: torch.Tensor) -> torch.Tensor:
        ctx.op = op
        return op.result.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        op: Replayed = ctx.op
        wanted = [t for t in op.operands if t.requires_grad]
        found = iter(torch.autograd.grad(op.result, wanted, grad, retain_graph=True, allow_unused=True))
        return None, *(next(found) if t.requires_grad else None for t in op.operands)


def enclosed(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors that functions among an op's arguments hold: ``torch.cond`` runs them where no mode sees it."""
    pending, seen = [tree], set()
    while pending:
        here = pending.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, torch.Tensor):
            yield here
        elif isinstance(here, nn.Module):
            yield from (*here.parameters(), *here.buffers())
        elif isinstance(here, tuple | list):
            pending += here
        elif isinstance(here, dict):
            pending += here.values()
        elif isinstance(here, partial):
            pending += [here.func, here.args, here.keywords]
        elif isinstance(here, MethodType):
            pending += [here.__self__, here.__func__]
        elif isinstance(here, FunctionType):
            pending += [c.cell_contents for c in here.__closure__ or () if c != _EMPTY]
            pending += [here.__defaults__, here.__kwdefaults__]


_EMPTY = CellType()


def storage_of(tensor: torch.Tensor) -> int:
    """What tensors on the same memory have in common."""
    try:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)
