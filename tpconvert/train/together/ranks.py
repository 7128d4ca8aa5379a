"""What the ranks of a run say to one another besides gradients of tp: counts, errors, and the sums over dp.

Small things travel as CPU tensors over the mesh's own groups, so that no GPU is made to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpconvert.errors import TPConvertError
from tpconvert.parallel.comm.mesh import Mesh

T = TypeVar("T")


def gathered(mesh: Mesh, item: T) -> list[T]:
    """The items of all ranks, by world rank."""
    rows: list[Any] = [item]
    for group, degree in ((mesh.group, mesh.degree), (mesh.dp_group, mesh.dp_degree)):
        if group is not None:
            parts: list[Any] = [None] * degree
            dist.all_gather_object(parts, rows, group=group)
            rows = [row for part in parts for row in part]
    return rows


def totals(mesh: Mesh, numbers: Sequence[int]) -> list[int]:
    """The sums of each number over all ranks."""
    values = torch.tensor(numbers, dtype=torch.int64)
    for group in (mesh.group, mesh.dp_group):
        if group is not None:
            dist.all_reduce(values, group=group)
    return values.tolist()


def together(mesh: Mesh, act: Callable[[], T]) -> T:
    """What ``act`` returns here, once it is done on all ranks; if it failed on any, all raise that error."""
    error: TPConvertError | None = None
    result: Any = None
    try:
        result = act()
    except TPConvertError as caught:
        error = caught
    failed = [e for e in gathered(mesh, error and (type(error), error.message, error.hint)) if e]
    if failed:
        kind, message, hint = failed[0]
        raise kind(message, hint=hint)
    return result  # type: ignore[no-any-return]


def sum_gradients(module: nn.Module, mesh: Mesh, bucket_bytes: int) -> None:
    """Replace every gradient by its sum over dp; one that only some dp ranks have counts as zero on the others.

    FSDP has summed those of the parameters that it shards.
    """
    parameters = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if mesh.dp_group is None or not parameters:
        return
    there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    dist.all_reduce(there, dist.ReduceOp.MAX, group=mesh.dp_group)
    grads = []
    for parameter, used in zip(parameters, there.tolist(), strict=True):
        if used and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if used:
            grads.append(parameter.grad)
    running = []
    for bucket in _buckets(grads, bucket_bytes):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        running.append((bucket, flat, dist.all_reduce(flat, group=mesh.dp_group, async_op=True)))
    for bucket, flat, work in running:
        work.wait()
        torch._foreach_copy_(
            bucket, [f.view_as(g) for f, g in zip(flat.split([g.numel() for g in bucket]), bucket, strict=True)]
        )


def same_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Give all dp ranks the first one's floating buffers that are part of the state, such as running statistics."""
    if mesh.dp_group is None:
        return
    state = module.state_dict(keep_vars=True)
    source = dist.get_process_group_ranks(mesh.dp_group)[0]
    for tensor in state.values():
        if not isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            dist.broadcast(tensor, source, group=mesh.dp_group)


def summed_over_dp(value: Tensor, mesh: Mesh) -> Tensor:
    """A new tensor: the sum over dp."""
    out = value.detach().clone()
    if mesh.dp_group is not None:
        dist.all_reduce(out, group=mesh.dp_group)
    return out


def _buckets(tensors: Iterable[Tensor], limit: int) -> list[list[Tensor]]:
    """The tensors in order, in runs of one dtype and of about ``limit`` bytes."""
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not buckets or size >= limit or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return buckets
