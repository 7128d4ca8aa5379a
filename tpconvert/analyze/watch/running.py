"""What surrounds a forward while it is recorded."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tpconvert.analyze.trace.call import Call
from tpconvert.errors import SourceError

FOREIGN = frozenset(["torch", "tpconvert", "contextlib"])
"""Packages whose lines are not those of a forward."""


def runs_in(function: Any) -> bool:
    """Whether a call of ``function`` is on the stack, a few frames up."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False


def marks() -> dict[str, bool]:
    """What to mark an op with: whether it is none of a forward's own but of what a conversion adds, as collectives."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "tpconvert.analyze.")) or frame.f_code.co_name == "forward":
            return {"added": True} if name.startswith("tpconvert.parallel.") else {}
        frame = frame.f_back
    return {}


def line() -> str:
    """The innermost line that runs, as ``file:line``, of code that is neither torch's nor this package's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in FOREIGN:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextmanager
def descending_into_functionals(functionals: types.ModuleType = F) -> Iterator[None]:
    """Show a mode what Python-level functionals do inside, instead of the functional as one op.

    They ask ``has_torch_function`` first and hand themselves over whole when a mode is active; for the duration
    that question is answered no.  Builtins do not ask in Python and are shown as ever.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    saved = {n: getattr(functionals, n) for n in names if hasattr(functionals, n)}
    for n in saved:
        setattr(functionals, n, _no)
    try:
        yield
    finally:
        for n, function in saved.items():
            setattr(functionals, n, function)


@contextmanager
def seeing_casts(stack: list[Call]) -> Iterator[None]:
    """Tell the call under way that its own forward turns autocast on or off, or asks whether it is on.

    Under another autocast than the one it is recorded under, it would do something else from there on.
    """
    enter, ask = torch.autocast.__enter__, torch.is_autocast_enabled

    def entering(self: torch.autocast) -> Any:
        if stack:
            stack[-1].casts = True
        return enter(self)

    def asking(*args: Any) -> bool:
        if stack and sys._getframe(1).f_globals.get("__name__", "").split(".")[0] != "torch":
            stack[-1].casts = True  # torch's own layers ask too, on their fast paths
        return ask(*args)

    torch.autocast.__enter__ = entering  # type: ignore[method-assign]
    torch.is_autocast_enabled = asking
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        torch.is_autocast_enabled = ask


@contextmanager
def seeing_gradients(told: Callable[[bool], bool]) -> Iterator[None]:
    """Let a forward that asks whether gradients are on be ``told`` what it is to know in place of the answer."""
    names = ("is_grad_enabled", "is_inference_mode_enabled")
    saved = {name: getattr(torch, name) for name in names}

    def asking(ask: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: told(ask()) if asks() else ask()

    for name, ask in saved.items():
        setattr(torch, name, asking(ask))
    try:
        yield
    finally:
        for name, ask in saved.items():
            setattr(torch, name, ask)


def asks() -> bool:
    """Whether it is a forward's own line that asks, which no line of torch's does in its place."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("tpconvert.", "torch.overrides")):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").split(".")[0] not in FOREIGN


@contextmanager
def seeing_ranks(stack: list[Call], asked: dict[str, list[str]]) -> Iterator[None]:
    """Write down the modules whose own forward asks for what is another thing on each rank: ranks, or a seed.

    Whatever torch.distributed is asked, under whichever name its functions were imported, it asks for its world.
    """

    def note(kind: str) -> None:
        if stack and _asker() not in ("torch", "tpconvert") and stack[-1].module not in asked[kind]:
            asked[kind].append(stack[-1].module)

    def noting(ask: Any, kind: str) -> Any:
        def asking(*args: Any, **kwargs: Any) -> Any:
            note(kind)
            return ask(*args, **kwargs)

        return asking

    names = [(torch, "seed"), (torch.random, "seed"), (torch.cuda, "seed"), (torch.cuda, "seed_all")]
    changes = [(owner, name, getattr(owner, name), noting(getattr(owner, name), "seeds")) for owner, name in names]
    generators = torch.cuda.default_generators  # there are some once a GPU is in use
    watched = tuple(_Watched(g, noting(g.seed, "seeds")) for g in generators)
    changes.append((torch.cuda, "default_generators", generators, watched))
    if dist.is_available():
        world = vars(type(dist.group))["WORLD"]
        changes.append((type(dist.group), "WORLD", world, property(noting(world.fget, "ranks"), world.fset)))
    for owner, name, _, new in changes:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old, _ in changes:
            setattr(owner, name, old)


class _Watched:
    """A generator of a GPU, but for what it does to take a seed from the machine."""

    def __init__(self, generator: torch.Generator, seed: Callable[[], int]) -> None:
        self.generator, self.seed = generator, seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)


def _asker() -> str:
    """The package whose code asked torch.distributed, or for a seed."""
    frame: types.FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").split(".")[0] if frame is not None else ""


def _no(*args: Any) -> bool:
    return False


def forward_failed(module: nn.Module, error: Exception) -> SourceError:
    """Name the deepest line that belongs to neither torch nor this package."""
    where = ""
    tb: types.TracebackType | None = error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        package = tb.tb_frame.f_globals.get("__name__", "").split(".")[0]
        if package not in FOREIGN:
            where = f"{code.co_filename}:{tb.tb_lineno} in {code.co_name}: "
        tb = tb.tb_next
    text = " ".join(str(error).split()) or "no message"
    return SourceError(
        f"{type(module).__name__}'s forward failed while tracing: {where}{type(error).__name__}: {text.rstrip('.')}.",
        hint="Check the example inputs.",
    )
