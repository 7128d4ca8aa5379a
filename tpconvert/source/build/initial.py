"""Weights that are drawn, not read: a module's own initialisation, with files in place of memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpconvert.checkpoint.files.tensorfile import allocate

LEAST = 1 << 20
"""Bytes of a tensor that gets a file."""
RELEASE_EVERY = 256 << 20
"""Bytes written between two releases of the pages written to."""


@contextmanager
def on_files() -> Iterator[None]:
    """Within it, large new tensors lie in files that vanish with them, so that a module of any size can be built.

    Every operation is run as the module asks for it, in the same order and on the same numbers, so random numbers are
    those of a module in memory.
    """
    with _OnFiles():
        yield


class _OnFiles(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._maps: list[mmap.mmap] = []
        self._touched = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fill = _FILL.get(func)
        if fill is not None and kwargs.get("out") is None and _on_cpu(kwargs.get("device")):
            made = func(*args, **{k: v for k, v in kwargs.items() if k not in ("generator", "layout")} | _META)
            if made.nbytes >= LEAST:
                out = self._mapped(made)
                fill(out, args, kwargs)
                self._touch(out)
                return out.requires_grad_(made.requires_grad)
        result = func(*args, **kwargs)
        for value in args:
            if isinstance(value, Tensor) and value.nbytes >= LEAST:
                self._touch(value)
        return result

    def _mapped(self, like: Tensor) -> Tensor:
        """A tensor of zeros that lies in a file without a name; the room is set aside first, so that none is missed."""
        with TemporaryFile() as file:
            size = prod(like.shape) * like.dtype.itemsize
            allocate(file.fileno(), size)
            file.truncate(size)
            held = mmap.mmap(file.fileno(), size)
        self._maps.append(held)
        return torch.frombuffer(held, dtype=like.dtype).view(like.shape)

    def _touch(self, tensor: Tensor) -> None:
        self._touched += tensor.nbytes
        if self._touched >= RELEASE_EVERY:
            self._touched = 0
            for held in self._maps if hasattr(mmap, "MADV_DONTNEED") else ():
                held.madvise(mmap.MADV_DONTNEED)  # what was written stays in the file


_META = {"device": "meta", "pin_memory": False}


def _on_cpu(device: Any) -> bool:
    """Whether a factory makes its tensor on the CPU."""
    return torch.device(device if device is not None else torch.get_default_device()).type == "cpu"


def _nothing(out: Tensor, args: Any, kwargs: Any) -> None:
    """A new file holds zeros."""


def _ones(out: Tensor, args: Any, kwargs: Any) -> None:
    out.fill_(1)


def _full(out: Tensor, args: Any, kwargs: Any) -> None:
    out.fill_(kwargs["fill_value"] if "fill_value" in kwargs else args[1])


def _rand(out: Tensor, args: Any, kwargs: Any) -> None:
    out.uniform_(generator=kwargs.get("generator"))


def _randn(out: Tensor, args: Any, kwargs: Any) -> None:
    out.normal_(generator=kwargs.get("generator"))


_FILL = {
    torch.empty: _nothing,
    torch.zeros: _nothing,
    torch.ones: _ones,
    torch.full: _full,
    torch.rand: _rand,
    torch.randn: _randn,
}
