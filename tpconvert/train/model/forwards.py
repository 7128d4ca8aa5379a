"""Other forwards for modules, each as a class that is put before the module's own.

torch.compile takes modules of one class for the same code.  A forward that is set on the module itself it compiles
anew for every module, up to a limit, or, where that is a function of torch's such as checkpoint, not at all.
"""

from __future__ import annotations

import functools
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_DEAR = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product", "_scaled_mm", "_grouped_mm")
"""Products and attention, which selective checkpointing runs once."""


def give_forward(module: nn.Module, before: type[nn.Module]) -> None:
    """Let ``before.forward`` be the module's; its ``super().forward`` is the module's own."""
    own = vars(module).pop("forward", None)
    if own is not None:
        module.__dict__["tp_own_forward"] = own
        _put(module, _Own)
    _put(module, before)


def _put(module: nn.Module, before: type[nn.Module]) -> None:
    module.__class__ = _joined(before, type(module))


@cache
def _joined(before: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (before, kind), names)


class _Own(nn.Module):
    """A forward that had been set on the module itself."""

    tp_own_forward: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.tp_own_forward(*args, **kwargs)


class Checkpointed(nn.Module):
    """Keeps its inputs for backward, and runs again there."""

    tp_draws = True
    """Whether it may draw random numbers, which it then draws again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own returns."""
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=self.tp_draws, **kwargs)


class Selective(nn.Module):
    """Keeps the results of products and attention, and runs the rest again in backward."""

    tp_draws = True
    """Whether it may draw random numbers, which it then draws again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own returns."""
        how = {"use_reentrant": False, "preserve_rng_state": self.tp_draws, "context_fn": _SELECTIVE}
        return checkpoint(super().forward, *args, **how, **kwargs)


class OtherProduct(nn.Module):
    """A linear layer whose input meets the weight in another way than by ``F.linear``."""

    weight: Tensor
    bias: Tensor | None
    product: Any

    def forward(self, x: Tensor) -> Any:
        """``product(x, weight, bias)``."""
        return self.product(x, self.weight, self.bias)


def _keep_or_repeat(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Keep what is dear to compute or to fetch, and run the rest again in backward.

    The place a collective writes to is no output of an op, so it is made again; only what the traced ones
    return is kept.
    """
    name = str(op)
    dear = any(name.startswith(f"aten.{kind}") for kind in _DEAR) or name.startswith("_c10d_functional.")
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _keep_or_repeat)
