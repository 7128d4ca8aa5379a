"""What is measured: a case, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """One training step of one model in one way."""

    way: str
    """``whole``, ``converted``, ``transformers``, ``dtensor``, ``megatron`` or ``fsdp``."""
    model: str = "llama"
    layers: int = 8
    width: int = 1
    """The width of the model in parts of its own: 2 doubles hidden and ffn sizes."""
    tokens: int = 4096
    batch: int = 1
    """Sequences that the tokens are of."""
    tp: int = 1
    network: bool = False
    """Whether the other ranks exist; else this is rank 0 of a group in which nobody else is."""
    compiled: bool = False
    sequence_parallel: bool = False
    optimizer: bool = False
    """AdamW after the backward pass."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further settings of the converted model: keywords of ``parallelize``, and those of :mod:`ways`."""

    @property
    def ranks(self) -> int:
        """Processes, each with a GPU."""
        return self.tp if self.network else 1

    @property
    def name(self) -> str:
        """How a table calls it."""
        said = [self.way if self.way in ("whole",) else f"{self.way} {'dp' if self.way == 'fsdp' else 'tp'}={self.tp}"]
        said += ["compiled" if self.compiled else "eager"]
        said += ["sequence parallel"] * self.sequence_parallel + ["AdamW"] * self.optimizer
        said += [k if v is True else f"{k}={v}" for k, v in self.options]
        return ", ".join(said)

    @property
    def size(self) -> str:
        """What is trained."""
        wide = f", width x {self.width}" if self.width != 1 else ""
        return f"{self.model}, {self.layers} layers{wide}, {self.tokens} tokens"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self) | {"name": self.name, "size": self.size}
