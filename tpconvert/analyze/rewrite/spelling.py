"""How ops of torch and constants are spelled where a forward is written as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.overrides import resolve_name


class UnsupportedError(Exception):
    """This forward cannot be written as data, for this reason."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A number that is a limit of a dtype: ``min``, ``max``, ``eps`` or ``tiny`` of ``torch.finfo``."""

    name: str


def limited(node: fx.Node, limit: Limit, value: float) -> fx.Node:
    """The tensor of an op's whose dtype has this limit."""
    for source in node.all_input_nodes:
        made = source.meta["val"]
        floats = isinstance(made, torch.Tensor) and made.is_floating_point()
        if floats and getattr(torch.finfo(made.dtype), limit.name) == value:
            return source
    raise UnsupportedError(f"{node.meta['op']} in its forward is given a dtype that moves with the model's")


def target_name(node: fx.Node) -> str:
    """The public name of an op."""
    op = node.meta["op"]
    if op.startswith("."):
        return f"torch.Tensor.{op[1:]}"
    name = resolve_name(node.target) or ""  # type: ignore[arg-type]
    if not name.startswith("torch."):
        name = f"torch.nn.functional.{op}" if hasattr(F, op) else f"torch.{op}" if hasattr(torch, op) else ""
    if not name and getattr(node.target, "__module__", "") == "torch._C._nn" and hasattr(torch.ops.aten, op):
        name = f"torch.ops.aten.{op}"  # kernels of torch that it lists by no other name
    if not name:
        raise UnsupportedError(f"its forward calls {op}, which is no op of torch")
    return name


def constant(value: Any) -> Any:
    """A value that is no tensor, as JSON."""
    if value is ...:
        return {"ellipsis": 1}
    if isinstance(value, bool | int | str) or value is None:
        if isinstance(value, str) and value.startswith("<"):
            raise UnsupportedError(f"its forward is given {value}")
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": 1}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    raise UnsupportedError(f"its forward is given a {type(value).__name__}")
