"""Data parallel with the weights, gradients and optimizer state shared out over dp, by torch's FSDP2.

::

                          weights        gradients              optimizer state
    ddp                   whole          whole                  whole
    reshard_after_forward
      false (ZeRO-1/2)    whole in use   whole until summed     1/dp
      true  (ZeRO-3)      a layer's      a layer's              1/dp

The sum over dp is FSDP's.  What it cannot shard, scalars say, stays whole and is summed as in ddp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tpconvert.errors import ConfigError, TrainError
from tpconvert.parallel import Mesh
from tpconvert.train.settings.config import Parallelism


@dataclass(frozen=True, eq=False)
class Shards:
    """The parts of a model that FSDP shares out; none where each dp rank holds everything."""

    mesh: Mesh
    units: tuple[FSDPModule, ...] = ()
    held: bool = False
    """Whether weights and gradients stay whole from the first micro-batch of a step to the last."""
    _whole: list[dict[str, Tensor]] = field(default_factory=list)
    """For each unit: name -> what FSDP puts in a parameter's place while it is whole."""

    def before_backward(self, module: nn.Module, loss: Tensor, *, last: bool) -> None:
        """Make ready for the backward of one micro-batch, the ``last`` of its step or not."""
        for unit in self.units:
            if self.held:
                unit.set_requires_gradient_sync(last, recurse=False)
                unit.set_reshard_after_backward(last, recurse=False)
        if self.units:
            self._fill(module, loss)

    def _fill(self, module: nn.Module, loss: Tensor) -> None:
        """Give a zero gradient to parameters that this dp rank has not used but another has: all sum the same ones."""
        if not self._whole:
            self._whole.extend(_while_whole(module, unit) for unit in self.units)
        reached, every = _leaves(loss), [p for whole in self._whole for p in whole.values()]
        here = torch.tensor([id(p) in reached for p in every], dtype=torch.uint8)
        anywhere = here.clone()
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.mesh.dp_group)
        missed = {id(p) for p, m in zip(every, (anywhere > here).tolist(), strict=True) if m}
        for whole in self._whole if missed else ():
            self._check_ran(whole, reached, missed)
            for parameter in whole.values():
                if id(parameter) in missed and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def _check_ran(self, whole: dict[str, Tensor], reached: set[int], missed: set[int]) -> None:
        """Raise where others ran a unit that this dp rank did not: FSDP has then joined shards of unlike weights."""
        ids = {id(p) for p in whole.values()}
        if ids & missed and not ids & reached:
            raise TrainError(
                f"The forward of dp rank {self.mesh.dp_rank} left out the layer of {min(whole)}, that of another did "
                "not (layers dropped at random, say); shards of a layer cannot be put together so. No weight was "
                "changed.",
                hint="Use parallelism.data_parallel: ddp.",
            )


def share_out(module: nn.Module, layers: list[nn.Module], mesh: Mesh, settings: Parallelism) -> Shards:
    """Shard each layer, and the rest of the module, over dp, as configured."""
    if settings.cpu_offload and mesh.dp_group is None:
        raise ConfigError("parallelism.cpu_offload needs two dp ranks or more, but dp is 1.", hint="Start more ranks.")
    if settings.data_parallel == "ddp" or mesh.dp_group is None:
        return Shards(mesh)
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    axis = DeviceMesh.from_group(mesh.dp_group, mesh.device.type)
    left = set(_unsharded(module))
    for part in [*_own(module, layers), module]:
        fully_shard(
            part,
            mesh=axis,
            reshard_after_forward=settings.reshard_after_forward and part is not module,
            offload_policy=offload,
            ignored_params=left,
        )
    units = tuple(part for part in module.modules() if isinstance(part, FSDPModule))
    for unit in units:  # the loss is a share of the mean over all dp ranks already
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return Shards(mesh, units, held=not settings.reshard_after_forward)


def _unsharded(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that FSDP does not take: scalars, and those of another dtype than most."""
    every = list(module.parameters())
    usual = Counter(p.dtype for p in every).most_common(1)[0][0] if every else None
    yield from (p for p in every if p.dim() == 0 or p.dtype != usual)


def _own(module: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """The layers, unless they share parameters with one another or with the rest: FSDP shards each once."""
    owners: Counter[nn.Parameter] = Counter(p for layer in layers for p in set(layer.parameters()))
    inside = {part for layer in layers for part in layer.modules()}
    for part in module.modules():
        if part not in inside:
            owners.update(p for p in part._parameters.values() if p is not None and p in owners)
    return layers if all(count == 1 for count in owners.values()) else []


def _while_whole(module: nn.Module, unit: FSDPModule) -> dict[str, Tensor]:
    """Name -> what takes the place of each sharded parameter of a unit; FSDP makes these once."""
    sharded = any(isinstance(p, DTensor) for _, p in _of_unit(module, unit))
    unit.unshard()
    found = {name: p for name, p in _of_unit(module, unit) if p.requires_grad and p.dim()}
    if sharded:
        unit.reshard()
    return found


def _of_unit(module: nn.Module, unit: FSDPModule) -> Iterator[tuple[str, Tensor]]:
    """The parameters that are sharded with ``unit``: its own and its parts', but not those of units within it."""
    seen: set[int] = set()
    pending = [(path, part) for path, part in module.named_modules() if part is unit]
    while pending:
        path, part = pending.pop()
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}".removeprefix("."), parameter
        pending += [(f"{path}.{n}", child) for n, child in part.named_children() if not isinstance(child, FSDPModule)]


def _leaves(loss: Tensor) -> set[int]:
    """The ids of the tensors that the backward of ``loss`` gives a gradient."""
    found: set[int] = set()
    seen, pending = {loss.grad_fn}, [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return found
