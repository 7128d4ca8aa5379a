"""Which sequences, in which order, on which rank.

The order within a source is a function of seed and epoch; which source comes next, one of how many sequences each has
given.  So the position in the data is a few integers, and training goes on exactly from there, on any number of ranks::

    sources 2 : 1   a a b a a b a a b ...      each goes through all of its sequences before any comes again
    step 0: dp 0 has a a b, dp 1 has a a b; step 1: ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from tpconvert.errors import ConfigError
from tpconvert.train.data.batch import Batch, OwnBatch, collate
from tpconvert.train.examples.objectives import Sequences

Micro = Batch | OwnBatch
Stack = Callable[[Sequence[Any]], Micro]
"""Makes a micro-batch of rows."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next step begins."""

    epoch: int = 0
    """Times that every source was gone through."""
    used: tuple[int, ...] = ()
    """Sequences that each source has given since the run began; empty for none."""
    state: dict[str, Any] | None = None
    """Of a stream: what it goes on from."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "used", tuple(self.used))  # JSON knows lists only


Steps = Iterator[tuple[list[Micro], Position]]
"""``(micro-batches of this dp rank, position after them)`` for each step, without end."""


@dataclass(frozen=True, slots=True)
class Batches:
    """What each dp rank gets at each step."""

    sources: tuple[Sequences, ...]
    seed: int
    micro: int
    accumulation: int
    dp_rank: int
    dp_degree: int
    weights: tuple[float, ...] = ()
    """Of the sources; empty where all are alike."""
    workers: int = 0
    stack: Stack = collate

    def __post_init__(self) -> None:
        if len(self) < self.step_size:
            raise ConfigError(
                f"data.path: the text gives {len(self)} sequences, but one step needs {self.step_size} "
                f"(global_batch_size).",
                hint="Use more text, a smaller seq_len or a smaller global_batch_size.",
            )

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    @property
    def step_size(self) -> int:
        """Sequences of one step, over all dp ranks."""
        return self.micro * self.accumulation * self.dp_degree

    def steps_of(self, epochs: float) -> int:
        """Steps until every source has been gone through so often."""
        shares = self.weights or (1.0,) * len(self.sources)
        whole = max(len(s) * sum(shares) / share for s, share in zip(self.sources, shares, strict=True))
        return max(1, math.ceil(round(epochs * whole / self.step_size, 6)))

    def steps(self, position: Position) -> Steps:
        """All steps from ``position`` on, made ahead by the workers if there are any."""
        if position.used and len(position.used) != len(self.sources):
            raise ConfigError(
                f"The step to resume from was trained on {len(position.used)} sources of data, "
                f"but there are {len(self.sources)} now."
            )
        if not self.workers:
            return self.made(position)
        return iter(loader(_Ahead(self, position), self.workers))

    def made(self, position: Position, first: int = 0, stride: int = 1) -> Steps:
        """Every ``stride``-th step from ``first`` on."""
        used = list(position.used or (0 for _ in self.sources))
        orders = _Orders(self.sources, self.seed)
        number, mine = 0, self.micro * self.accumulation
        while True:
            drawn = [self._draw(used) for _ in range(self.step_size)]
            if number % stride == first:
                own = drawn[self.dp_rank * mine :][:mine]
                micros = [own[i : i + self.micro] for i in range(0, mine, self.micro)]
                epoch = min(u // len(s) for u, s in zip(used, self.sources, strict=True))
                yield [self._batch(micro, orders) for micro in micros], Position(epoch, tuple(used))
            number += 1

    def _draw(self, used: list[int]) -> tuple[int, int]:
        """``(source, which of the sequences it ever gives)``: of the source that is furthest behind its share."""
        shares = self.weights or (1.0,) * len(used)
        due = sum(used) + 1
        source = max(range(len(used)), key=lambda k: due * shares[k] / sum(shares) - used[k])
        used[source] += 1
        return source, used[source] - 1

    def _batch(self, drawn: Sequence[tuple[int, int]], orders: _Orders) -> Micro:
        origins = []
        for source, at in drawn:
            epoch, place = divmod(at, len(self.sources[source]))
            origins.append((source, epoch, orders.number(source, epoch, place)))
        rows = [self.sources[source](number, epoch) for source, epoch, number in origins]
        return replace(self.stack(rows), origins=tuple(origins))


class _Orders:
    """The order of each source in the epoch that it is in."""

    def __init__(self, sources: Sequence[Sequences], seed: int) -> None:
        self._sources, self._seed = sources, seed
        self._held: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}

    def number(self, source: int, epoch: int, place: int) -> int:
        """The sequence at a place of an epoch."""
        if self._held.get(source, (-1, None))[0] != epoch:
            order = np.random.default_rng([self._seed, epoch, *([source] if source else [])])
            self._held[source] = epoch, order.permutation(len(self._sources[source]))
        return int(self._held[source][1][place])


class _Ahead(IterableDataset):
    """The steps of a run, dealt out among the processes of a loader."""

    def __init__(self, batches: Batches, position: Position) -> None:
        self._batches, self._position = batches, position

    def __iter__(self) -> Steps:
        worker = torch.utils.data.get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return self._batches.made(self._position, first, stride)


def loader(dataset: Any, workers: int) -> Any:
    """A loader that gives the items of a dataset as they are, and knows how far it has come."""
    import warnings

    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital.*")  # a function of torch's own that it no longer wants
        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers)
