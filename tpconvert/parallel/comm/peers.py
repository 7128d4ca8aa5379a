"""Sums, gathers and scatters between two GPUs of one machine, each of which copies into the other's memory.

What is copied goes by the GPUs' copy engines, which take no multiprocessor from the arithmetic beside them, as the
kernels of NCCL do; and those wait for a large product that runs, which copies do not.  With two ranks the bytes are
those of any other way::

    sum       both send all they have, and add
    scatter   both send the half of which the other wants the sum, and add
    gather    both send all they have, and join
    cross     both send all they have, and add it to something else

A flag follows each copy; the receiver waits for it on its GPU.  :mod:`ring` tells which memory is free.
"""

from __future__ import annotations

import ctypes
import functools
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpconvert.errors import PlanError
from tpconvert.parallel.comm.ring import FLAGS, Place, Ring

LEAST = 2**26
"""Bytes from which on copies are faster than NCCL whether a step is recorded or not: they take the processor longer."""
MOST = 2**30
"""Bytes of memory that a rank keeps for what it is sent; what does not fit goes by NCCL."""
STEP = 2**21
PATIENCE_MS = 3_600_000
"""How long a GPU waits for the other before it fails: it may be writing a checkpoint."""
VIEWS = 256
"""Tensors of places that are kept, as making one takes some microseconds."""


@dataclass(eq=False)
class Memory:
    """What two ranks write into, of each other: torch's handle, the tensor it is of, and what of it is free."""

    handle: Any
    buffer: Tensor
    ring: Ring
    views: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    def at(self, rank: int, place: Place, like: Tensor) -> Tensor:
        """A place in a rank's memory, as a tensor."""
        key = rank, place.start, like.shape, like.dtype
        if key not in self.views:
            if len(self.views) >= VIEWS:
                self.views.clear()
            start = place.start // like.element_size()
            self.views[key] = self.handle.get_buffer(rank, like.shape, like.dtype, start)
        return self.views[key]

    def flag(self, rank: int, place: Place) -> Tensor:
        """The flag of a place in the memory of the other ``rank``, which this rank raises."""
        if place.flag not in self.views:
            number = 2 * place.flag + 1 - rank
            self.views[place.flag] = self.handle.get_signal_pad(rank, (1,), torch.int32, number)
        return self.views[place.flag]


@dataclass(eq=False)
class Sent:
    """One exchange under way."""

    x: Tensor
    kind: str
    place: Place | None = None
    memory: Memory | None = None
    done: Any = None
    """This rank's copy is over: the event, or NCCL's work."""
    out: Tensor | None = None
    """What NCCL makes, where it does the work."""
    before: Sent | None = None
    """The exchange that was begun before this one and is still under way."""


class Peers:
    """The two ranks of a group that reach each other's memory.

    Both must make the same calls in the same order, as with any collective.  Made by :func:`connect`.  Tensors of
    fewer than ``least`` bytes go by NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, least: int) -> None:
        self.group, self.device, self.least, self.rank = group, device, least, dist.get_rank(group)
        self.other = 1 - self.rank
        self.memory: Memory | None = None
        self.kept: list[Memory] = []
        """What recorded graphs use."""
        self.under_way: dict[int, Sent] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.one = torch.ones(1, dtype=torch.int32, device=device)
        self.library, self.names = _ops(self)

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor is worth it."""
        return x.is_cuda and x.nbytes >= max(1, self.least)

    @torch.no_grad()
    def send(self, x: Tensor, kind: str) -> Sent:
        """Begin an exchange; ``x`` must stay as it is until :meth:`receive`."""
        x = x.contiguous()
        part = x.chunk(2)[self.other] if kind == "scatter" else x
        found = self._place(part.nbytes) if self.takes(part) else None
        if found is None:
            return self._by_nccl(x, kind)
        memory, place, meet = found
        assert self.stream is not None
        if meet:
            memory.handle.barrier(FLAGS, PATIENCE_MS)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            memory.at(self.other, place, part).copy_(part)
            memory.flag(self.other, place).copy_(self.one)
            done = self.stream.record_event()
        return Sent(x, kind, place, memory, done)

    @torch.no_grad()
    def receive(self, sent: Sent, out: Tensor | None = None, mine: Tensor | None = None) -> Tensor:
        """End it; the result, which is written into ``out`` where that is given.

        What the other sent is added to what was sent, or to ``mine`` where that is given.
        """
        if sent.place is None or sent.memory is None:
            sent.done.wait()
            assert sent.out is not None
            made = sent.out if mine is None else sent.out.chunk(2)[self.other] + mine
            return made if out is None else out.copy_(made)
        if mine is None:
            mine = sent.x.chunk(2)[self.rank] if sent.kind == "scatter" else sent.x
        current = torch.cuda.current_stream(self.device)
        sent.memory.handle.wait_signal(self.other, sent.place.flag, PATIENCE_MS)
        in_place = out is not None and out.data_ptr() == mine.data_ptr()
        if in_place:
            current.wait_event(sent.done)
        theirs = sent.memory.at(self.rank, sent.place, mine)
        if sent.kind == "gather":
            both = (mine, theirs) if self.rank == 0 else (theirs, mine)
            out = torch.cat(both, out=mine.new_empty(_shape(sent.x, "gather")) if out is None else out)
        else:
            out = torch.add(mine, theirs, out=torch.empty_like(mine) if out is None else out)
        sent.memory.ring.end(sent.place)
        if not in_place:  # what was sent is read until then, and may be written after that
            current.wait_event(sent.done)
        return out

    def exchange(self, x: Tensor, kind: str) -> Tensor:
        """Both at once."""
        return self.receive(self.send(x, kind))

    def _place(self, size: int) -> tuple[Memory, Place, bool] | None:
        current = torch.cuda.current_stream(self.device)
        capture = _capture(current)
        context = (capture, current.cuda_stream)
        memory = self.memory
        if not capture and (memory is None or 2 * size > memory.ring.size):
            memory = self._grow(2 * size)
        last = () if memory is None else memory.ring.context
        found = None if memory is None else memory.ring.begin(size, context, capture > 0)
        if found is None and not capture and memory is not None:
            memory, last = self._grow(memory.ring.size + size), ()
            found = None if memory is None else memory.ring.begin(size, context, False)
        if found is None or memory is None:
            return None
        if last[:1] == (0,) == context[:1] and last != context:  # what was read on another stream was read before this
            current.wait_stream(torch.cuda.ExternalStream(last[1], self.device))
        return memory, *found

    def _grow(self, size: int) -> Memory | None:
        """A memory of that size at least, once the GPUs are done with the one there is; None where it is too much."""
        from torch.distributed import _symmetric_memory as symmetric

        size = -(-size // STEP) * STEP
        if size > MOST:
            return None
        torch.cuda.synchronize(self.device)
        if self.memory is not None and self.memory.ring.recorded:
            self.kept.append(self.memory)
        buffer = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        self.memory = Memory(symmetric.rendezvous(buffer, self.group), buffer, Ring(size))
        return self.memory

    def _by_nccl(self, x: Tensor, kind: str) -> Sent:
        out = x.clone() if kind == "sum" else x.new_empty(_shape(x, kind))
        if kind == "sum":
            work = dist.all_reduce(out, group=self.group, async_op=True)
        elif kind in ("gather", "cross"):
            work = gather_into(out, x, self.group, async_op=True)
        else:
            work = scatter_into(out, x, self.group, async_op=True)
        return Sent(x, kind, done=work, out=out)

    # -- as ops of a graph -----------------------------------------------------------------------------------

    def begin(self, x: Tensor, kind: str, after: Tensor | None) -> Tensor:
        """Op: send; what it returns stands for the exchange.  ``after`` is that of the one before, for their order."""
        sent = self.send(x, kind)
        if after is not None:
            sent.before = self.under_way.get(after.data_ptr())
        token = x.new_empty(1)
        self.under_way[token.data_ptr()] = sent
        return token

    def end(
        self, token: Tensor, kind: str, x: Tensor, y: Tensor | None, z: Tensor | None, last: Tensor | None
    ) -> Tensor:
        """Op: receive; of several tensors, sent one after the other, what they give one behind the other.

        With the kind ``cross``, what the other sent is added to ``x``, which was not sent; ``y`` was.
        """
        if kind == "cross":
            return self.receive(self.under_way.pop(token.data_ptr()), None, x)
        given = [t for t in (x, y, z, last) if t is not None]
        sent = [self.under_way.pop(token.data_ptr())]
        while len(sent) < len(given):
            before = sent[-1].before
            assert before is not None
            sent.append(before)
        for key in [k for k, s in self.under_way.items() if s in sent]:
            del self.under_way[key]
        if len(sent) == 1:
            return self.receive(sent[0])
        out = x.new_empty(_joined(given))
        for each, part in zip(reversed(sent), out.split([len(t) for t in given]), strict=True):
            self.receive(each, part)
            each.before = None
        return out


def connect(group: dist.ProcessGroup, device: torch.device, least: int = LEAST) -> Peers:
    """Peers of a group; every rank of it must ask.  Raises PlanError, on all alike, where its ranks are none."""
    if dist.get_world_size(group) != 2:
        raise PlanError(f"copies are between two ranks, and there are {dist.get_world_size(group)}.")
    if device.type != "cuda":
        raise PlanError(f"copies are between GPUs, and the ranks are on {device.type}.")
    if "cuda:nccl" not in str(dist.get_backend_config(group)):
        raise PlanError(f"copies are beside NCCL, and the group has {dist.get_backend_config(group)}.")
    own: Any = (_machine(), str(torch.cuda.get_device_properties(device).uuid))
    places: list[Any] = [None, None]
    dist.all_gather_object(places, own, group)
    other = places[1 - dist.get_rank(group)]
    why: Any = None
    if other[0] != own[0]:
        why = "copies are within one machine, and the ranks are on two."
    elif not _reaches(device, other[1]):
        why = "the GPUs cannot reach each other's memory."
    said: list[Any] = [None, None]
    dist.all_gather_object(said, why, group)
    if told := next((w for w in said if w), None):
        raise PlanError(told)
    return Peers(group, device, least)


# torch 2.13 has new names for these two; the older ones warn there


def gather_into(out: Tensor, x: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Let the library of the group gather the ranks' ``x`` along dim 0 of ``out``."""
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return run(out, x, group, async_op)


def scatter_into(out: Tensor, x: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Let the library of the group give this rank its part along dim 0 of the sum of the ranks' ``x``."""
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return run(out, x, group=group, async_op=async_op)


def _machine() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text() if boot.exists() else ""


def _reaches(device: torch.device, uuid: str) -> bool:
    """Whether this process sees the GPU of that name and may write into its memory."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return number != device.index and torch.cuda.can_device_access_peer(device, number)
    return False


def _capture(stream: Any) -> int:
    """The number of the CUDA graph that the stream is recorded into, or 0."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    return 1 + number.value


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _shape(x: Tensor, kind: str) -> list[Any]:
    rows = {"sum": len(x), "gather": 2 * len(x), "cross": 2 * len(x), "scatter": len(x) // 2}[kind] if x.dim() else 0
    return [rows, *x.shape[1:]] if x.dim() else []


def _joined(given: list[Tensor]) -> list[Any]:
    return [sum(len(t) for t in given), *given[0].shape[1:]]


def _ops(peers: Peers) -> tuple[Any, tuple[str, str]]:
    """The ops of a pair of ranks, which belong to torch.  What is compiled can name an op, but hold no object."""
    library = torch.library.Library("tpconvert_peers", "FRAGMENT")
    number = next(n for n in range(1000) if not hasattr(torch.ops.tpconvert_peers, f"begin_{n}"))
    begin, end = f"begin_{number}", f"end_{number}"
    library.define(f"{begin}(Tensor x, str kind, Tensor? after) -> Tensor")
    library.define(f"{end}(Tensor token, str kind, Tensor x, Tensor? y, Tensor? z, Tensor? last) -> Tensor")
    library.impl(begin, peers.begin, "CompositeExplicitAutograd")
    library.impl(end, peers.end, "CompositeExplicitAutograd")

    def made(token: Tensor, kind: str, x: Tensor, *more: Tensor | None) -> Tensor:
        if kind == "cross":
            return torch.empty_like(x)
        given = [x, *(t for t in more if t is not None)]
        return x.new_empty(_joined(given) if len(given) > 1 else _shape(x, kind))

    torch.library.register_fake(f"tpconvert_peers::{begin}", lambda x, kind, after: x.new_empty(1), lib=library)
    torch.library.register_fake(f"tpconvert_peers::{end}", made, lib=library)
    return library, (begin, end)
