"""Builds of a source that other processes can be given: there the source is opened anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tpconvert.source.source import Source


@dataclass(frozen=True, slots=True)
class Anew:
    """``build`` of a source; pickled, it is how to open that source, whose own build it becomes.

    What a user's file defines cannot be pickled: no other process has it as a module before it has opened the file.
    """

    build: Callable[[], nn.Module]
    open: Callable[[], Source]
    """Picklable: a function of a module and plain arguments."""

    def __call__(self) -> nn.Module:
        """A new real module."""
        return self.build()

    def __reduce__(self) -> Any:
        return _build_of, (self.open,)


def anew(source: Source, open: Callable[[], Source]) -> Source:
    """The source whose ``build`` other processes can be given."""
    return replace(source, build=Anew(source.build, open))


def _build_of(open: Callable[[], Source]) -> Callable[[], nn.Module]:
    return open().build
