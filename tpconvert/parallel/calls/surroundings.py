"""What a forward is shown of the world around it: ranks that hold other data, and seeds that ranks of tp share.

A model that was written for data parallelism may ask torch.distributed for its ranks, to compare its examples with
those of all others say (CLIP's loss, arXiv 2103.00020).  Tp ranks are no others: they hold the same examples.  And one
that takes a seed from the machine (Reformer's reversible layers, arXiv 2001.04451) would draw other numbers on each
rank for what is the same on all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function

from tpconvert.parallel.comm.mesh import Mesh
from tpconvert.spec.plan import Plan


@dataclass(eq=False)
class Around:
    """Hooks of a module: its forward runs within a context, also when it fails, and when it calls itself."""

    context: Callable[[], AbstractContextManager[None]]
    entered: list[AbstractContextManager[None]] = field(default_factory=list)

    @torch.compiler.disable
    def enter(self, module: nn.Module, args: Any) -> None:
        """The forward begins."""
        self.entered.append(self.context())
        self.entered[-1].__enter__()

    @torch.compiler.disable
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """It ends."""
        if self.entered:
            self.entered.pop().__exit__(None, None, None)

    def __deepcopy__(self, memo: Any) -> Around:
        return Around(self.context)


def surround(root: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Show the modules that the plan says ask for it the ranks of dp, and seeds that ranks of tp share."""
    if mesh.dry or not (plan.ranks or plan.seeds):
        return
    contexts: list[tuple[Sequence[str], Callable[[], AbstractContextManager[None]]]] = [
        (plan.seeds, partial(shared_seeds, mesh))
    ]
    if plan.ranks and dist.is_available() and dist.is_initialized():
        contexts.append((plan.ranks, DataRanks(mesh.dp_group or _alone())))
    for paths, context in contexts:
        for path in paths:
            module, around = root.get_submodule(path), Around(context)
            module.register_forward_pre_hook(around.enter)
            module.register_forward_hook(around.leave, prepend=True, always_call=True)


def _alone() -> dist.ProcessGroup:
    """The group of this rank; no other is asked for it, so they need not make theirs in any order."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


class DataRanks:
    """Within it, torch.distributed shows ``group`` and no more, also where its collectives are differentiated later."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        from torch.distributed.nn import functional  # which little code needs

        self.group = group
        kinds = [k for k in vars(functional).values() if inspect.isclass(k) and issubclass(k, Function)]
        self.applies = {kind: self.within(kind) for kind in kinds if kind is not Function}

    def within(self, kind: Any) -> Callable[..., Any]:
        """What applies an autograd function whose backward sees the group too.

        Its callers give it the world that there was when they were imported, if it was there then.
        """

        def backward(ctx: Any, *gradients: Any) -> Any:
            with self():
                return kind.backward(ctx, *gradients)

        own: Any = type(kind.__name__, (kind,), {"backward": staticmethod(backward)})
        world, applied = dist.group.WORLD, own.apply
        return lambda *args: applied(*(self.group if a is world else a for a in args))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The context."""
        world, before = dist.group.WORLD, {kind: vars(kind).get("apply") for kind in self.applies}
        dist.group.WORLD = self.group  # type: ignore[assignment]  # a property of its class, with a setter
        for kind, apply in self.applies.items():
            kind.apply = apply
        try:
            yield
        finally:
            dist.group.WORLD = world  # type: ignore[assignment]
            for kind, outer in before.items():
                if outer is None:
                    del kind.apply
                else:
                    kind.apply = outer


@contextmanager
def shared_seeds(mesh: Mesh) -> Iterator[None]:
    """A seed from the machine is a number from the generator that the ranks of tp share."""
    places = [(owner, name) for owner in (torch, torch.random, torch.cuda) for name in ("seed", "seed_all")]
    saved = [(owner, name, getattr(owner, name)) for owner, name in places if hasattr(owner, name)]
    generators = torch.cuda.default_generators
    with mesh.streams.sharing(mesh.rank) as shared:

        def seed() -> int:
            torch.manual_seed(number := shared())
            return number

        for owner, name, _ in saved:
            setattr(owner, name, seed)
        torch.cuda.default_generators = tuple(_Seeded(g, shared) for g in generators)
        try:
            yield
        finally:
            for owner, name, old in saved:
                setattr(owner, name, old)
            torch.cuda.default_generators = generators


class _Seeded:
    """A generator of a GPU, but for the seed that it would take from the machine."""

    def __init__(self, generator: torch.Generator, shared: Callable[[], int]) -> None:
        self.generator, self.shared = generator, shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)

    def seed(self) -> int:
        """A seed that the ranks of tp share."""
        self.generator.manual_seed(number := self.shared())
        return number
