"""A module that can be run, changed and thrown away in another's place."""

from __future__ import annotations

import copy
import gc
import resource
import sys
from collections.abc import Mapping
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpconvert.errors import SourceError

LARGE, MUCH = 2**24, 2**31
"""Bytes of parameters, and of what the process has held at once: from either on, what is not needed is let go."""


def copied(module: nn.Module, parameters: Mapping[int, nn.Parameter] | None = None) -> nn.Module:
    """A deep copy; ``parameters`` gives those of the copy in place of some of the module's, by their ids.

    A tensor that a forward computed and left on the module (a loss for later, the weight that ``weight_norm``
    puts together before each call) has a history, which cannot be copied: the copy holds its value alone, until a
    forward computes it anew.  A view of a parameter is a view of the copy's.  Hooks on the gradients of parameters,
    which torch does not copy, and what refuses to be copied (a lock, a file, a Python module) are shared.
    """
    if not gc.isenabled():
        _make_room(module)
    shared: dict[int, Any] = {}
    while True:
        try:
            with torch.no_grad(), _WithoutHistory():
                made = copy.deepcopy(module, {**(parameters or {}), **shared})
            return _trained_alike(made, module)
        except Exception as error:  # whatever the parts of a module raise
            culprit = _refusing(error)
            if isinstance(culprit, nn.Module | Tensor) or id(culprit) in shared:
                raise SourceError(
                    f"{type(module).__name__} cannot be copied: its {type(culprit).__name__} raises "
                    f"{type(error).__name__}: {' '.join(str(error).split())}"
                ) from error
            shared[id(culprit)] = culprit


def _make_room(module: nn.Module) -> None:
    """Free copies and graphs of before where they are many bytes: they hang in cycles, and no collector runs now."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if held >= MUCH or sum(p.nbytes for p in module.parameters() if not p.is_meta) >= LARGE:
        gc.collect()


def _trained_alike(made: nn.Module, module: nn.Module) -> nn.Module:
    """The copy with what torch does not copy: hooks on gradients, and that a script module's parameters need any.

    Those are cloned, and with grad mode on they would be results of the module's own.
    """
    for new, old in zip(made.parameters(), module.parameters(), strict=True):
        if new.requires_grad is not old.requires_grad:
            new.requires_grad_(old.requires_grad)
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if new is not old and getattr(old, hooks) is not None:
                setattr(new, hooks, getattr(old, hooks))
    return made


class _WithoutHistory(TorchFunctionMode):
    """Copies of tensors that were computed are their values, but views of leaves stay that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        base = tensor._base
        if base is None or not base.is_leaf:
            return tensor.detach().clone()
        with torch.enable_grad():
            return copy.deepcopy(base, memo).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _refusing(error: Exception) -> Any:
    """What ``copy.deepcopy`` was at when it failed: the innermost one."""
    culprit, tb = None, error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code is copy.deepcopy.__code__:
            culprit = tb.tb_frame.f_locals["x"]
        tb = tb.tb_next
    return culprit


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called, as lists of modules cannot; a scripted one must not be asked itself."""
    return getattr_static(type(module), "forward", None) is not nn.Module.forward


MANY = 50_000_000
"""Parameters from which a forward is run without their values rather than with them."""


def light(module: nn.Module) -> nn.Module:
    """The module itself if it is small, else a copy whose parameters are on meta: planning copies and runs it."""
    if sum(p.numel() for p in module.parameters() if not p.is_meta) <= MANY:
        return module
    return without_values(module)


def without_values(module: nn.Module) -> nn.Module:
    """A copy whose parameters are on meta."""
    memo = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in module.parameters()}
    return copied(module, memo)
