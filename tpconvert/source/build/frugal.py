"""Building a module without its weights: parameters on the meta device, buffers real."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

FEW = 1 << 16
"""``torch.empty`` with more elements than this is a weight to be."""
MANY = 1 << 24
"""No factory allocates more real elements than this."""

_FACTORIES = frozenset(
    (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.empty_strided, torch.randint)
)
_LIKE = frozenset((torch.zeros_like, torch.ones_like, torch.full_like))


class _FewReal(TorchFunctionMode):
    """Sends large results of factories to the meta device and leaves small ones where they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LIKE and args and args[0].is_meta and args[0].numel() <= MANY:
            return func(*args, **{"device": "cpu"} | kwargs)
        if func in _FACTORIES and torch.device(kwargs.get("device") or "cpu").type != "meta":
            shape_only = func(*args, **{k: v for k, v in kwargs.items() if k not in ("generator", "out")} | _META)
            if shape_only.numel() > (FEW if func in (torch.empty, torch.empty_strided) else MANY):
                return shape_only
        return func(*args, **kwargs)


_META = {"device": "meta", "pin_memory": False}


@contextmanager
def frugal() -> Iterator[None]:
    """Within it, a module's parameters become meta as they are registered, while its buffers keep true values.

    Rotary frequencies, position ids and the like are constants of the forward; without their values it cannot be
    traced, and no file holds them.  Weights are only ever looked at for their shapes.
    """
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        if not isinstance(parameter, nn.Parameter) or parameter.is_meta:
            return None
        # One parameter registered twice stays one; an id may be another's later, hence the reference.
        known = moved.get(id(parameter))
        if known is None or known[0]() is not parameter:
            moved[id(parameter)] = known = (weakref.ref(parameter), _as_meta(parameter))
        return known[1]

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        with _FewReal():
            yield
    finally:
        hook.remove()


def parameters_to_meta(module: nn.Module) -> nn.Module:
    """The same module with every parameter replaced by one on meta; tied ones stay tied."""
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                part._parameters[name] = moved.setdefault(id(parameter), _as_meta(parameter))
    return module


def _as_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def real_inputs(inputs: Any) -> Any:
    """The inputs with seeded numbers in place of tensors that were left on meta."""
    if isinstance(inputs, Tensor):
        return _filled(inputs) if inputs.is_meta else inputs
    if isinstance(inputs, dict):
        return {k: real_inputs(v) for k, v in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(map(real_inputs, inputs))
    return inputs


def _filled(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    seeded = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=seeded).to(tensor.dtype)
