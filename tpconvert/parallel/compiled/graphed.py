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
from tpconvert.parallel.comm.mesh import Mesh
from tpconvert.parallel.comm.random import Tape, generator, meshes_of

WARM = 3
"""Steps before the one that is recorded: compilers, allocators and NCCL do things once."""


class GraphedStep:
    """``loss(*batch).backward()`` of ``module``, recorded once for the sizes of ``batch`` and then replayed.

    All ranks make it, and call it, alike.  A call takes tensors of the same sizes, returns what ``loss`` did (the loss,
    or a tuple that begins with it), and leaves gradients in place of those there were, or with ``accumulate`` adds to
    those since :meth:`zero_grad`; what the optimizer does stays outside.  Everything but the tensors of the batch, the
    parameters, the buffers and random numbers is as it was when it was recorded: the mode of the module, numbers from
    Python, hooks.  Raises PlanError for what cannot be recorded: a forward that waits for the GPU, or draws on the CPU.
    """

    def __init__(
        self, module: nn.Module, loss: Callable[..., Any], batch: Sequence[Tensor], *, accumulate: bool = False
    ) -> None:
        if {p.device.type for p in module.parameters()} != {"cuda"}:
            raise PlanError("A step is recorded as a CUDA graph of a module that is on a GPU, which this is not.")
        self.batch = [t.detach().clone() for t in batch]
        self.graph = torch.cuda.CUDAGraph()
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.tapes, self.outputs = _record(self.graph, module, loss, self.batch, accumulate)
        self.grads = [p.grad for p in self.parameters]
        self.places = self._places()

    def __call__(self, *batch: Tensor) -> Any:
        """The loss of another batch; its gradients are in ``.grad``."""
        if self._places() != self.places:
            raise PlanError("The step's parameters have moved since it was recorded.", hint="Record it again.")
        for held, given in zip(self.batch, batch, strict=True):
            if held.shape != given.shape or held.dtype != given.dtype:
                raise PlanError(
                    f"The step was recorded for {_told(held)}, not {_told(given)}.", hint="Record one for each size."
                )
            held.copy_(given)
        for tape in self.tapes:
            tape.seed()
        self.graph.replay()
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        found = tuple(out.clone() for out in self.outputs)
        return found if len(found) > 1 else found[0]

    def zero_grad(self) -> None:
        """Begin to add up anew, where the step was made to ``accumulate``."""
        torch._foreach_zero_([grad for grad in self.grads if grad is not None])

    def _places(self) -> list[tuple[int, torch.Size]]:
        return [(p.data_ptr(), p.shape) for p in self.parameters]


def _record(
    graph: torch.cuda.CUDAGraph, module: nn.Module, loss: Callable[..., Any], batch: list[Tensor], accumulate: bool
) -> tuple[list[Tape], tuple[Tensor, ...]]:
    """``(what cut numbers are drawn from, what the loss returned)``, after a recording into ``graph``."""
    device = next(module.parameters()).device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with unchanged(module), torch.random.fork_rng([device]):
        with torch.cuda.stream(stream):
            begun = _warmed(module, lambda: _run(loss, batch), accumulate)
        if dist.is_initialized():
            dist.barrier()  # no rank waits within its recording for one that still warms up
        torch.cuda.synchronize(device)
        drawn = _drawn()
        tapes = [_tape(graph, mesh, times) for mesh, times in begun]
        try:
            # Other threads, such as NCCL's, may ask for events meanwhile.
            with (
                _drawing_from(begun, tapes),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                outputs = _run(loss, batch)
        except Exception as error:
            _as_before(device)
            raise _why(error) from error
        if _drawn() != drawn:
            raise PlanError(
                "The step draws random numbers on the CPU, which a CUDA graph would repeat.", hint="Run it as it is."
            )
    torch.cuda.current_stream(device).wait_stream(stream)
    return tapes, tuple(out.detach() for out in outputs)


def _run(loss: Callable[..., Any], batch: list[Tensor]) -> tuple[Tensor, ...]:
    """Forward and backward."""
    out = loss(*batch)
    outputs = out if isinstance(out, tuple) else (out,)
    outputs[0].backward()
    return outputs


def _warmed(module: nn.Module, run: Callable[[], Any], accumulate: bool) -> list[tuple[Mesh, int]]:
    """Run some steps, and leave no gradients, or zeros to add to; how often each mesh began to draw cut in a step."""
    meshes = meshes_of(module)
    for _ in range(WARM):
        for parameter in module.parameters():
            parameter.grad = None
        before = [mesh.streams.begun for mesh in meshes]
        run()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if accumulate and parameter.grad is not None else None
    return [(mesh, mesh.streams.begun - first) for mesh, first in zip(meshes, before, strict=True)]


def _tape(graph: torch.cuda.CUDAGraph, mesh: Mesh, times: int) -> Tape:
    """Generators for so many cut regions, which the graph knows of."""
    cuts = tuple(torch.Generator(mesh.device) for _ in range(times))
    for each in cuts:
        graph.register_generator_state(each)
    return Tape(mesh.rank, generator(mesh.device).graphsafe_get_state(), cuts)


@contextmanager
def _drawing_from(begun: Sequence[tuple[Mesh, int]], tapes: Sequence[Tape]) -> Iterator[None]:
    """Within it, the meshes draw from the tapes."""
    for (mesh, _), tape in zip(begun, tapes, strict=True):
        mesh.streams.tape = tape
    try:
        yield
    finally:
        for (mesh, _), tape in zip(begun, tapes, strict=True):
            mesh.streams.tape = None
            tape.turn(False)


def _as_before(device: torch.device) -> None:
    """After a recording that failed torch takes the GPU's random numbers for those of a graph; a copy is free of it."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.graphsafe_set_state(generator.clone_state())


def _why(error: BaseException) -> Exception:
    """What went wrong first, since the end of a recording only says that something did; a full GPU is what it is."""
    while error.__context__ is not None:
        error = error.__context__
    if isinstance(error, torch.OutOfMemoryError):
        return error
    said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return PlanError(f"The step cannot be recorded as a CUDA graph: {said}.", hint="Run it as it is.")


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
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
