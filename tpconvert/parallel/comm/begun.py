"""Collectives of eager code that run while something else is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from tpconvert.parallel.comm.collectives import copies, joined_slices
from tpconvert.parallel.comm.mesh import Mesh, joined_shape, one_run
from tpconvert.parallel.comm.peers import gather_into


def begin_sum(x: Tensor, mesh: Mesh) -> Callable[[], object]:
    """Begin to turn ``x`` into its sum over tp ranks, in place; call what is returned before it is used."""
    if copies(x, mesh):
        sent = mesh.peers.send(x, "sum")
        return partial(mesh.peers.receive, sent, x)
    return dist.all_reduce(x, group=mesh.group, async_op=True).wait


def begin_join(x: Tensor, dim: int, mesh: Mesh, rows: bool) -> Callable[[], Tensor]:
    """Begin joined_slices, of eager code; what is returned gives the tensor, once it is there."""
    if mesh.group is None:
        return lambda: joined_slices(x, dim, mesh, rows)
    part = x.contiguous()
    shape, whole = joined_shape(x, dim, mesh), one_run(x, dim, rows)
    out = x.new_empty(shape if whole else [mesh.degree, *x.shape])
    wait: Callable[[], object]
    if copies(x, mesh):
        sent = mesh.peers.send(part.unsqueeze(0), "gather")
        wait = partial(mesh.peers.receive, sent, out.view(mesh.degree, *x.shape))
    else:
        wait = gather_into(out.view(-1), part.view(-1), mesh.group, async_op=True).wait

    def end() -> Tensor:
        wait()
        return out if whole else out.movedim(0, dim).reshape(shape).contiguous()

    return end
