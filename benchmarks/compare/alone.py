"""A group in which nobody else is, for what a rank computes and launches without a network."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpconvert.parallel.comm.peers import scatter_into


def join_alone(ranks: int, device: torch.device) -> torch.library.Library:
    """Become rank 0 of so many, of which the others are not there.

    Sums leave what they are given and gathers repeat it.  Scatters take this rank's part of it: torch 2.11 leaves what
    they make undefined, and a GPU multiplies zeros faster than numbers, as it needs less power for them.  In compiled
    code that holds for as long as what is returned is held.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    library = torch.library.Library("_c10d_functional", "IMPL")
    made, given = torch.full((1,), 1.0), torch.full((ranks,), 2.0)
    scatter_into(made, given, None)
    if made.item() != given[0].item():
        dist.reduce_scatter_tensor = _scattered
        library.impl("reduce_scatter_tensor", _scattered_op, device.type.upper())
    return library


def _scattered(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> None:
    """What ``dist.reduce_scatter_tensor`` would do if the others sent zeros."""
    output.copy_(input.view(-1, *output.shape)[0])


def _scattered_op(input: Tensor, op: str, ranks: int, group: str) -> Tensor:
    """The same in compiled code."""
    return input.chunk(ranks)[0].clone()
