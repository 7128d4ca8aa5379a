"""Forward, loss and backward of one size as a CUDA graph, collectives included: launched at once instead of op by op.

A rank of a converted model has a share of the arithmetic and all of the launches, so at small sizes a GPU waits for
the processor.  A graph is launched in microseconds, however many kernels it holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpconvert.errors import PlanError

WARM = 3
"""Steps before the one that is recorded: compilers, allocators and NCCL do things once."""


class GraphedStep:
    """``loss(*batch).backward()`` of ``module``, recorded once for the sizes of ``batch`` and then replayed.

    All ranks make it, and call it, alike.  A call takes tensors of the same sizes, returns the loss, and leaves
    gradients in place of those there were; what the optimizer does stays outside.  Everything but the tensors of the
    batch, the parameters and the buffers is as it was when it was recorded: the mode of the module, numbers from
    Python, hooks.  Raises PlanError for what cannot be recorded: a forward that waits for the GPU, or draws on the CPU.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Tensor]) -> None:
        if {p.device.type for p in module.parameters()} != {"cuda"}:
            raise PlanError("A step is recorded as a CUDA graph of a module that is on a GPU, which this is not.")
        self.batch = [t.detach().clone() for t in batch]
        self.graph = torch.cuda.CUDAGraph()
        self.loss = _record(self.graph, module, loss, self.batch)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.grads = [p.grad for p in self.parameters]
        self.places = self._places()

    def __call__(self, *batch: Tensor) -> Tensor:
        """The loss of another batch; its gradients are in ``.grad``."""
        if self._places() != self.places:
            raise PlanError("The step's parameters have moved since it was recorded.", hint="Record it again.")
        for held, given in zip(self.batch, batch, strict=True):
            if held.shape != given.shape or held.dtype != given.dtype:
                raise PlanError(
                    f"The step was recorded for {_told(held)}, not {_told(given)}.", hint="Record one for each size."
                )
            held.copy_(given)
        self.graph.replay()
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        return self.loss.clone()

    def _places(self) -> list[tuple[int, torch.Size]]:
        return [(p.data_ptr(), p.shape) for p in self.parameters]


def _record(graph: torch.cuda.CUDAGraph, module: nn.Module, loss: Callable[..., Tensor], batch: list[Tensor]) -> Tensor:
    device = next(module.parameters()).device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with _unchanged(module), torch.random.fork_rng([device]):
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                _without_gradients(module)
                loss(*batch).backward()
            _without_gradients(module)
        if dist.is_initialized():
            dist.barrier()  # no rank waits within its recording for one that still warms up
        torch.cuda.synchronize(device)
        drawn = _drawn()
        try:
            # Other threads, such as NCCL's, may ask for events meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = loss(*batch)
                out.backward()
        except Exception as error:
            _as_before(device)
            said = _first(error)
            raise PlanError(f"The step cannot be recorded as a CUDA graph: {said}.", hint="Run it as it is.") from error
        if _drawn() != drawn:
            raise PlanError(
                "The step draws random numbers on the CPU, which a CUDA graph would repeat.", hint="Run it as it is."
            )
    torch.cuda.current_stream(device).wait_stream(stream)
    return out.detach()


def _as_before(device: torch.device) -> None:
    """After a recording that failed torch takes the GPU's random numbers for those of a graph; a copy is free of it."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.graphsafe_set_state(generator.clone_state())


def _first(error: BaseException) -> str:
    """What went wrong first: the end of a recording only says that something did."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _without_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Buffers, such as running statistics, are afterwards as they were."""
    held = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in held:
                buffer.copy_(value)


def _drawn() -> tuple[Any, ...]:
    """The states of the generators that a graph does not know of."""
    of_numpy = numpy.random.get_state(legacy=False)
    return random.getstate(), repr(of_numpy), tuple(torch.default_generator.get_state().tolist())


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
