"""What forwards leave behind on their modules: a regenerated forward would not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tpconvert.analyze.trace.call import Call
from tpconvert.analyze.trace.provenance import held_objects
from tpconvert.analyze.trace.trees import tensors_in


@contextmanager
def watching(module: nn.Module, stack: list[Call], calls: list[Call]) -> Iterator[None]:
    """Tell each call of ``stack`` what its own forward sets, and each of ``calls`` what changed within its module.

    An attribute that is set is seen as it happens.  What is put into a container, or set on a plain object, is seen
    afterwards, so every module around the one that holds it is told.
    """
    known = {id(m) for m in module.modules()}
    original = nn.Module.__setattr__

    def noting(self: nn.Module, name: str, value: Any) -> None:
        same = isinstance(value, Tensor) and value is self._buffers.get(name)  # as after self.count += 1
        if stack and id(self) in known and not same:
            stack[-1].assigned = stack[-1].assigned or name
        original(self, name, value)

    before = [(path, name, held, _items(held)) for path, name, held in _containers(module)]
    nn.Module.__setattr__ = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]
    for path, name, held, items in before:
        now = _items(held)
        if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
            for call in calls:
                if call.module in ("", path) or path.startswith(f"{call.module}."):
                    call.assigned = call.assigned or name


def parameters_of(module: nn.Module) -> dict[int, dict[str, int]]:
    """id of each module -> the ids of its own parameters."""
    return {id(m): {name: id(p) for name, p in m._parameters.items()} for m in module.modules()}


def stand_ins(module: nn.Module, own: dict[int, dict[str, int]]) -> list[Tensor]:
    """What is in the places of a module's own parameters, as ``torch.func.functional_call`` puts it there."""
    places = own.get(id(module), {})
    return [p for name, p in module._parameters.items() if p is not None and id(p) != places.get(name)]


def kept(module: nn.Module) -> Iterator[Tensor]:
    """Every tensor on the modules, by whatever attribute."""
    for m in module.modules():
        for held in (*vars(m).values(), *(vars(other) for _, other in held_objects(m))):
            yield from tensors_in(held)


def _containers(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """``(path, attribute, container)`` of what the modules hold that others may be put into."""
    internal = vars(nn.Module()).keys()
    for path, m in module.named_modules():
        for name, value in vars(m).items():
            if type(value) in (list, dict, set, deque) and name not in internal:
                yield path, name, value
        for name, held in held_objects(m):
            yield path, name, vars(held)


def _items(held: Any) -> list[Any]:
    """What a container holds, keys first."""
    return [*held, *held.values()] if isinstance(held, dict) else list(held)
