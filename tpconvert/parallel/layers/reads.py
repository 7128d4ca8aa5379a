"""Subclasses made on the spot: they keep a module's class and add how its parameters and buffers are read.

A parameter is kept in ``module._parameters``; ``module.weight`` reaches it only because no class attribute is in
the way.  A property of that name is, so the forward reads through it, while ``state_dict``, optimizers and
``named_parameters`` see the parameter itself.  So does a forward that reads it another way, from a list of its own
say: the proof of a plan looks for that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpconvert.parallel.comm.collectives import Parts, copy_own, copy_shared, once
from tpconvert.parallel.comm.mesh import Mesh


@dataclass(frozen=True)
class Read:
    """What a parameter or buffer becomes when the forward asks for it."""

    mesh: Mesh
    sum_grad: bool = False
    once: bool = False
    parts: Parts | None = None
    """How it is cut, if it is."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """The value to compute with."""
        if isinstance(tensor, DTensor):  # FSDP looks at its shard between forwards; in them it puts a plain tensor here
            return tensor
        if self.mesh.dry:  # another tensor that no mode sees being made, so that a proof can tell it from this one
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
            with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(keys):
                return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if self.sum_grad:
            # by no op, or a part that a checkpoint runs again would not do what it did in the forward of the root
            tensor = copy_own(tensor, self.mesh) if self.parts is None else copy_shared(tensor, self.parts, self.mesh)
        return self.summed(tensor)

    def summed(self, tensor: Tensor) -> Tensor:
        """The value to compute with, of one whose gradient is summed already."""
        return once(tensor, self.mesh) if self.once else tensor


def become(
    module: nn.Module,
    layer: type[nn.Module] | None = None,
    reads: Mapping[str, Read] | None = None,
    forward: Callable[..., Any] | None = None,
) -> None:
    """Change the module's class.

    ``layer`` takes the place of its torch base, ``reads`` become properties, ``forward(module, args, kwargs)``
    takes the place of its forward.
    """
    user, old_layer, old_names, _ = getattr(type(module), "_tp_made_of", (type(module), None, (), False))
    layer = layer or old_layer
    if layer is not None and not reads and forward is None and user in layer.__mro__:
        module.__class__ = layer
    elif layer is not None or reads or forward is not None:
        module.__class__ = derived(user, layer, tuple(sorted({*old_names, *(reads or ())})), forward is not None)
    if reads:
        module.__dict__["_tp_reads"] = dict(reads)
        module.__dict__["_tp_summed"] = {}
    if forward is not None:
        module.__dict__["_tp_forward"] = forward


@cache
def derived(
    user: type[nn.Module], layer: type[nn.Module] | None, names: tuple[str, ...], rewritten: bool
) -> type[nn.Module]:
    """A subclass of ``user`` whose ``super().forward`` is the layer's and whose ``names`` are read by ``_tp_reads``.

    Where it is rewritten, ``_tp_forward`` is its forward.  It goes by its base's name, for code that looks at names.
    """
    bases: tuple[type, ...] = (user,)
    if layer is not None:
        bases = (layer,) if user in layer.__mro__ else (user, layer)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        return _blank, (user, layer, names, rewritten), self.__getstate__()

    body: dict[str, Any] = {name: _reading(name) for name in names}
    if rewritten:

        @wraps(bases[0].forward)  # so that its signature stays the user's
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._tp_forward(self, args, kwargs)

        body["forward"] = forward
    body |= {"_tp_made_of": (user, layer, names, rewritten), "_tp_base": bases[0], "__reduce_ex__": reduce_ex}
    body |= {"__module__": bases[0].__module__, "__qualname__": bases[0].__qualname__}
    return type(user)(bases[0].__name__, bases, body)


def chains(user: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether ``user``'s forward is ``base``'s, or ends up there by ``super().forward``."""
    for cls in user.__mro__[: user.__mro__.index(base)]:
        if "forward" in vars(cls):
            code = getattr(inspect.unwrap(vars(cls)["forward"]), "__code__", None)
            if code is None or not {"super", "forward"} <= set(code.co_names):
                return False
    return True


def _reading(name: str) -> property:
    def read(self: nn.Module) -> Any:
        tensor = self._parameters[name] if name in self._parameters else self._buffers[name]
        if tensor is None:
            return None
        held = self._tp_summed.get(name)
        if held is not None and held[0] is tensor and torch.is_grad_enabled():
            return self._tp_reads[name].summed(held[1])
        return self._tp_reads[name](tensor)

    return property(read)


def _blank(*made_of: Any) -> nn.Module:
    cls = derived(*made_of)
    return cls.__new__(cls)
