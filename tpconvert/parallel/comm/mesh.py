"""Where this process stands: its rank on the tp axis and on the dp axis, and the groups it talks to.

World ranks of tp=2, dp=3; tp ranks are neighbours, so that they share the fastest links::

             tp 0  tp 1
    dp 0       0     1
    dp 1       2     3
    dp 2       4     5
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpconvert.errors import PlanError
from tpconvert.parallel.comm.peers import LEAST, Peers, connect
from tpconvert.parallel.comm.random import Streams
from tpconvert.spec.layout import Layout

Ranks = tuple[int, ...]
COLLECTIVES = ("auto", "copies", "nccl")


@dataclass(frozen=True, eq=False)
class Mesh:
    """One process's place.  Without a group and with a degree above 1 it is *dry*: collectives only change shapes."""

    rank: int
    degree: int
    group: dist.ProcessGroup | None
    device: torch.device
    dp_rank: int = 0
    dp_degree: int = 1
    dp_group: dist.ProcessGroup | None = None
    tp_groups: tuple[Ranks, ...] = ()
    """World ranks of the tp group of each dp rank."""
    streams: Streams = field(default_factory=Streams, repr=False)
    subgroups: dict[Ranks, dist.ProcessGroup] = field(default_factory=dict, repr=False)
    """The groups of tp ranks that share a piece with this one, made by :meth:`connect`."""
    connected: set[Ranks] = field(default_factory=set, repr=False)
    """All sets of tp ranks that have such a group."""
    peers: Any = field(default=None, repr=False)
    """The :class:`Peers` of two tp ranks that copy into each other's memory; None where NCCL does all."""

    @property
    def dry(self) -> bool:
        """Whether there is nobody to talk to, though there should be."""
        return self.group is None and self.degree > 1

    def subgroup(self, ranks: Ranks) -> dist.ProcessGroup:
        """The group of these tp ranks, in ascending order; made by :meth:`connect`, never here."""
        if ranks == tuple(range(self.degree)) and self.group is not None:
            return self.group
        if ranks not in self.subgroups:
            raise PlanError(
                f"The mesh has no group of the tp ranks {ranks}.", hint="parallelize() makes the groups a plan needs."
            )
        return self.subgroups[ranks]

    def connect(self, layouts: Iterable[Layout]) -> None:
        """Make the groups of ranks that share pieces of ``layouts``; every rank of the mesh must call it alike."""
        if self.group is None:
            return
        wanted = {
            ranks
            for layout in set(layouts)
            for rank in range(self.degree)
            for _, ranks in layout.shared(rank, self.degree)
            if len(ranks) < self.degree
        }
        wanted -= self.connected
        self.connected.update(wanted)
        self._make(wanted)

    def _make(self, wanted: Iterable[Ranks]) -> None:
        # All ranks make all groups in one order: torch names a group by counting, so one rank that makes fewer
        # would wait under another name (and names it by hash of a count with use_local_synchronization).
        for ranks in sorted(wanted):
            for dp_rank, world in enumerate(self.tp_groups):
                group = dist.new_group([world[r] for r in ranks])
                if dp_rank == self.dp_rank and self.rank in ranks:
                    self.subgroups[ranks] = group

    def __deepcopy__(self, memo: Any) -> Mesh:
        return self  # a copy of a module talks to the same ranks

    def __reduce__(self) -> Any:
        collectives = "nccl" if self.peers is None else "auto" if self.peers.least else "copies"
        return _restore, (self.rank, self.degree, str(self.device), tuple(self.connected), collectives)


def make_mesh(tp: int, *, device: torch.device | str = "cpu", collectives: str = "auto") -> Mesh:
    """The mesh of all ranks of ``torch.distributed``: dp x tp, where dp is what tp leaves.

    A process outside ``torch.distributed`` gets the mesh of degree 1.  ``collectives`` between tp ranks go by ``nccl``,
    or are ``copies`` of two GPUs that reach each other's memory; ``auto`` copies what is very large, where that can be.
    """
    if collectives not in COLLECTIVES:
        raise PlanError(f"collectives is {collectives!r}; it is one of {', '.join(COLLECTIVES)}.")
    device = torch.device(device)
    if not dist.is_available() or not dist.is_initialized():
        if tp != 1:
            raise PlanError(
                f"tp={tp} needs {tp} ranks; torch.distributed is not initialised.", hint="Start with torchrun."
            )
        return Mesh(0, 1, None, device)
    world = dist.get_world_size()
    if tp < 1 or world % tp:
        raise PlanError(f"{world} ranks cannot be dealt into groups of tp={tp} ({world} % {tp} is not 0).")
    axes = dist.init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    peers = None if tp == 1 or collectives == "nccl" else _peers(axes.get_group("tp"), device, collectives)
    return Mesh(
        rank=axes.get_local_rank("tp"),
        degree=tp,
        group=axes.get_group("tp") if tp > 1 else None,
        device=device,
        dp_rank=axes.get_local_rank("dp"),
        dp_degree=world // tp,
        dp_group=axes.get_group("dp") if world > tp else None,
        tp_groups=tuple(tuple(range(d * tp, (d + 1) * tp)) for d in range(world // tp)),
        peers=peers,
    )


def _peers(group: dist.ProcessGroup, device: torch.device, collectives: str) -> Peers | None:
    try:
        return connect(group, device, LEAST if collectives == "auto" else 0)
    except PlanError as error:
        if collectives == "auto":
            return None
        raise PlanError(f"collectives=copies: {error}", hint="Use collectives=nccl.") from None


def dry_mesh(rank: int, degree: int, *, device: torch.device | str = "meta") -> Mesh:
    """A mesh of ``degree`` whose other ranks do not exist, for trying a plan's shapes."""
    return Mesh(rank, degree, None, torch.device(device))


def slice_shape(x: Tensor, dim: int, mesh: Mesh) -> list[int]:
    """The shape of each rank's slice along ``dim``.  Raises PlanError where ranks would not get equally much."""
    size, left = x.shape[dim] // mesh.degree, x.shape[dim] % mesh.degree  # no divmod: it does not compile
    if left:
        raise PlanError(
            f"A sequence of {x.shape[dim]} cannot be shared equally by {mesh.degree} ranks "
            f"({x.shape[dim]} % {mesh.degree} is {left}).",
            hint=f"Pad it to {x.shape[dim] + mesh.degree - left}, or convert without sequence_parallel.",
        )
    return [size if i == dim else n for i, n in enumerate(x.shape)]


def joined_shape(x: Tensor, dim: int, mesh: Mesh) -> list[int]:
    """The shape of :func:`joined_slices`."""
    shape = list(x.shape)
    shape[dim] *= mesh.degree
    return shape


def one_run(x: Tensor, dim: int, rows: bool) -> bool:
    """Whether a rank's slice lies in one run of memory, of rows or of one sequence; else it is copied on its way."""
    return rows or math.prod(x.shape[:dim]) == 1


def dense(x: Tensor) -> Tensor:
    """A value in one run of memory; torch 2.11 compiles no gradient of what ``contiguous`` returns as it was."""
    return x if x.is_contiguous() else x.contiguous()


def shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A value that nobody else holds, in another shape: for autograd no view, so whoever gets it may write into it."""
    return torch.ops.aten._unsafe_view.default(x, shape)


def _restore(rank: int, degree: int, device: str, connected: tuple[Ranks, ...], collectives: str = "auto") -> Mesh:
    """A pickled mesh: connected anew where ``torch.distributed`` runs, dry elsewhere."""
    if degree == 1 or not dist.is_initialized():
        return Mesh(rank, degree, None, torch.device(device))
    mesh = make_mesh(degree, device=device, collectives=collectives)
    mesh.connected.update(connected)
    mesh._make(connected)
    return mesh
