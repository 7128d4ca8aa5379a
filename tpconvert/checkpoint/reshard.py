"""shard, merge and reshard: one function that reads pieces at one degree and writes them at another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpconvert.spec.plan import Plan

if TYPE_CHECKING:
    from tpconvert.checkpoint.weights import Weights
    from tpconvert.spec.manifest import Manifest

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def shard(
    source: Weights, plan: Plan, out: Path, *, force: bool = False, progress: Progress | None = None
) -> Manifest:
    """Write OUT: one folder of safetensors a rank, plan.json, the source's other files, and manifest.json last."""
    raise NotImplementedError


def merge(folder: Path, out: Path, *, force: bool = False, progress: Progress | None = None) -> None:
    """Write OUT: one ordinary checkpoint with the source's names, dtypes, file split and header bytes."""
    raise NotImplementedError


def reshard(folder: Path, out: Path, *, tp: int, force: bool = False, progress: Progress | None = None) -> Manifest:
    """Write OUT: the same tensors, optimizer state included, at degree ``tp``."""
    raise NotImplementedError


def load_rank(
    folder: Path,
    rank: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    check: bool = False,
) -> dict[str, Tensor]:
    """The local tensors of one rank by module name, tied names included."""
    raise NotImplementedError
