"""What every command is given: a module without weights, inputs for it, and where its weights are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from tpconvert.checkpoint.tensors.weights import Weights

Inputs = Mapping[str, Any] | tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One model, opened."""

    name: str
    """As the user named it."""
    module: nn.Module
    """Parameters on meta, buffers real, in evaluation mode."""
    inputs: Inputs
    """Example inputs: keyword arguments, or a tuple of positional ones; small and real."""
    build: Callable[[], nn.Module]
    """A new real module on the CPU with the source's weights; seeded ones where it has none."""
    weights: Callable[[], Weights]
    """The tensors to shard, read lazily."""
    initial: Callable[[int], Weights] | None = None
    """The same tensors as the model's own initialisation draws them from a seed, in bounded memory."""
    description: dict[str, Any] = field(default_factory=dict)
    """JSON for the plan and the manifest: class, versions, revision, input shapes."""
    has_weights: bool = True
    """Whether ``build`` and ``weights`` give stored weights rather than seeded ones."""
    config: Any = None
    """The configuration of a Hugging Face model."""
    make: Callable[[Any], nn.Module] | None = None
    """For a Hugging Face model: the same class with random weights from another configuration."""
    notes: tuple[str, ...] = ()
    """What was assumed, in words."""
