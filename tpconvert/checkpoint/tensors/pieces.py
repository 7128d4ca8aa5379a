"""A rank's part of a tensor, and the tensor put together from all parts: pure functions on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpconvert.errors import CheckpointError
from tpconvert.spec.layout import Layout, Piece


def take_pieces(tensor: Tensor, layout: Layout, rank: int, degree: int) -> Tensor:
    """The part of the whole ``tensor`` that ``rank`` of ``degree`` holds: a view where it is one run, else a copy."""
    if layout.dim is None:
        return tensor
    parts = [tensor.narrow(layout.dim, start, stop - start) for start, stop in layout.pieces(rank, degree)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, layout.dim) if parts else tensor.narrow(layout.dim, 0, 0)


def gather_pieces(parts: Sequence[Tensor], layout: Layout, shape: Sequence[int], *, check: bool = False) -> Tensor:
    """The whole tensor of ``shape`` from the parts of all ranks, in rank order.

    Where ranks share rows the first holder's count; ``check`` raises when another holder's bytes differ.
    """
    if check and (faults := unequal_replicas(parts, layout)):
        rank, other = faults[0]
        raise CheckpointError(f"Ranks {rank} and {other} share rows of a tensor, but hold other values.")
    if layout.dim is None:
        return parts[0]
    degree, runs = len(parts), []
    for rank, (start, stop), local in first_holders(layout, degree):
        runs.append((start, parts[rank].narrow(layout.dim, local, stop - start)))
    if not runs:
        return parts[0].new_empty(tuple(shape))
    return torch.cat([run for _, run in sorted(runs, key=lambda r: r[0])], layout.dim)


def first_holders(layout: Layout, degree: int) -> list[tuple[int, Piece, int]]:
    """``(rank, range of the whole dim, where it starts locally)``, covering the dim once, in order of the dim."""
    runs: list[tuple[int, Piece, int]] = []
    for rank in range(degree):
        at = 0
        for start, stop in layout.pieces(rank, degree):
            runs.append((rank, (start, stop), at))
            at += stop - start
    runs.sort(key=lambda run: (run[1][0], run[0]))
    out: list[tuple[int, Piece, int]] = []
    end = 0
    for rank, (start, stop), at in runs:
        if stop > end:
            skip = max(end - start, 0)
            out.append((rank, (start + skip, stop), at + skip))
            end = stop
    return out


def unequal_replicas(parts: Sequence[Tensor], layout: Layout) -> list[tuple[int, int]]:
    """Pairs of ranks that hold the same rows with other bytes: the first holder, and the one that differs."""
    degree = len(parts)
    if layout.dim is None:
        return [(0, rank) for rank in range(1, degree) if not same_bytes(parts[0], parts[rank])]
    holders = first_holders(layout, degree)
    faults = []
    for rank in range(degree):
        at = 0
        for start, stop in layout.pieces(rank, degree):
            for first, (begin, end), local in holders:
                low, high = max(start, begin), min(stop, end)
                if low >= high or first == rank:
                    continue
                mine = parts[rank].narrow(layout.dim, at + low - start, high - low)
                theirs = parts[first].narrow(layout.dim, local + low - begin, high - low)
                if not same_bytes(mine, theirs):
                    faults.append((first, rank))
            at += stop - start
    return sorted(set(faults))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, shape and bytes; NaNs and signed zeros count by their bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, flat."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
