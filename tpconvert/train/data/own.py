"""Datasets and losses of the user's own, each named as ``file.py:function``.

``data.dataset`` returns a set with a length and numbered examples (a list, a torch ``Dataset``, a set of ``datasets``),
which is shuffled, dealt out and resumed as text is; or something to iterate over, which is taken as it comes.
``data.loss`` is called with the model and a batch, and returns the mean over the examples of that batch.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from tpconvert.errors import ConfigError, SourceError
from tpconvert.source.callables import find_function, is_callable_name
from tpconvert.train.data.batch import Origin, OwnBatch
from tpconvert.train.data.order import Position, Steps, loader


def function_of(key: str, name: str) -> Callable[..., Any]:
    """The function that a key of the configuration names."""
    if not is_callable_name(name):
        raise ConfigError(f"{key}: {name} names no function.", hint=f"Write {key}: file.py:function.")
    try:
        return find_function(name)
    except SourceError as error:
        raise ConfigError(f"{key}: {error.message}", hint=error.hint) from None


def open_dataset(key: str, name: str, seed: int) -> Any:
    """What the function of a key returns, if examples can be had of it; what it draws is alike on all ranks."""
    function = function_of(key, name)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    found = function()
    if not is_numbered(found) and not hasattr(found, "__iter__"):
        raise ConfigError(
            f"{key}: {name} returned {type(found).__name__}, of which no examples can be had.",
            hint="Return a dataset with __len__ and __getitem__, or one with __iter__.",
        )
    if is_numbered(found) and len(found) == 0:
        raise ConfigError(f"{key}: {name} returned a dataset without examples.")
    return found


def is_numbered(dataset: Any) -> bool:
    """Whether a dataset has a length and examples by their number."""
    whole = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return whole and not isinstance(dataset, IterableDataset)


@dataclass(frozen=True, slots=True)
class Numbered:
    """A numbered dataset as a set of sequences."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __call__(self, index: int, epoch: int) -> Any:
        """One example."""
        return self.dataset[index]


def collate_own(rows: Sequence[Any]) -> OwnBatch:
    """Examples stacked as torch does it."""
    try:
        return OwnBatch(default_collate(list(rows)), len(rows))
    except (TypeError, RuntimeError, ValueError) as error:
        told = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"data.dataset: its examples cannot be stacked into a batch ({told}).",
            hint="Give tensors of equal shapes, numbers, or dicts and tuples of these.",
        ) from None


@dataclass(frozen=True, slots=True)
class Stream:
    """Examples in the order in which a dataset gives them: every rank goes through all of them and takes its own."""

    dataset: Any
    micro: int
    accumulation: int
    dp_rank: int
    dp_degree: int
    workers: int = 0

    @property
    def step_size(self) -> int:
        """Examples of one step, over all dp ranks."""
        return self.micro * self.accumulation * self.dp_degree

    def steps(self, position: Position) -> Steps:
        """All steps from ``position`` on; after its end the dataset begins again."""
        source = loader(_Kept(self.dataset), min(self.workers, 1))  # two would both go through all of it
        if position.state is not None:
            source.load_state_dict(position.state)
        epoch, used = position.epoch, sum(position.used)
        mine = self.micro * self.accumulation
        items: Iterator[Any] = iter(source)
        while True:
            taken = list(itertools.islice(items, self.step_size))
            while len(taken) < self.step_size:
                epoch, items = epoch + 1, iter(source)
                more = list(itertools.islice(items, self.step_size - len(taken)))
                if not more:
                    raise _no_examples(again=used > 0 or bool(taken))
                taken += more
            own = [(taken[i], (0, 0, used + i)) for i in range(self.dp_rank * mine, (self.dp_rank + 1) * mine)]
            used += self.step_size
            micros = [_stacked(own[i : i + self.micro]) for i in range(0, mine, self.micro)]
            yield list(micros), Position(epoch, (used,), _plain(source.state_dict()))


def _no_examples(*, again: bool) -> ConfigError:
    return ConfigError(
        f"data.dataset: the dataset gives no examples{' when it is gone through again' if again else ''}.",
        hint="Return what can be gone through many times, as a class with __iter__; a generator ends." if again else "",
    )


def _stacked(examples: Sequence[tuple[Any, Origin]]) -> OwnBatch:
    """A batch of examples of a stream, whose number in it is all that is known of where they come from."""
    return replace(collate_own([e for e, _ in examples]), origins=tuple(origin for _, origin in examples))


class _Kept(IterableDataset):
    """A user's iterable as torch's kind; it can be told where to go on if the user's can."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


def _plain(state: Any) -> Any:
    """The state, if a checkpoint can hold it."""
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError):
        raise ConfigError(
            "data.dataset: the state_dict of the dataset holds more than numbers, strings, lists and dicts.",
            hint="Return a state_dict of these, or none: then examples are skipped to resume.",
        ) from None
