"""Micro-batches: rows stacked, counted, and told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpconvert.errors import ConfigError
from tpconvert.train.examples.rows import IGNORE

Origin = tuple[int, int, int]
"""Where a row comes from: its source, the time that the source is gone through, and its number there."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of text; ``[B, T]`` unless said otherwise.  A label stands where the output predicts it."""

    ids: Tensor
    labels: Tensor
    """Of classes ``[B]``; of targets as long as those."""
    attention: Tensor
    """1 where there is a token, 0 where there is padding."""
    documents: Tensor | None = None
    """Where documents are packed and kept apart: the number of each position's."""
    types: Tensor | None = None
    """Of two texts that belong together: which of them each position is of, for a model that is told."""
    origins: tuple[Origin, ...] = ()
    """Of each row."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        there = {name: tensor.to(device, non_blocking=True) for name, tensor in self.named().items()}
        return replace(self, **there)

    def filled(self, tensors: Sequence[Tensor]) -> Batch:
        """The same batch with others in place of the tensors that are :meth:`named`."""
        return replace(self, **dict(zip(self.named(), tensors, strict=True)))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All there is in it."""
        return self.ids, self.labels, self.attention, self.documents, self.types

    def named(self) -> dict[str, Tensor]:
        """The tensors by their names."""
        names = ("ids", "labels", "attention", "documents", "types")
        return {name: tensor for name, tensor in zip(names, self.tensors(), strict=True) if tensor is not None}

    @property
    def examples(self) -> int:
        """Rows."""
        return len(self.ids)

    @property
    def size(self) -> int:
        """Tokens, padding included."""
        return self.ids.numel()

    @property
    def predicted(self) -> int:
        """Positions that are to be predicted."""
        return int((self.labels != IGNORE).sum())

    @property
    def positions(self) -> Tensor:
        """The place of each token in its own document."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        if self.documents is None:
            return places
        first = torch.ones_like(self.documents, dtype=torch.bool)
        first[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return places - torch.where(first, places, 0).cummax(1).values


@dataclass(frozen=True, slots=True)
class OwnBatch:
    """One micro-batch of a user's dataset, whatever that is."""

    content: Any
    examples: int
    origins: tuple[Origin, ...] = ()
    """Of each example."""

    def to(self, device: torch.device) -> OwnBatch:
        """The same batch with its tensors on a device."""
        return replace(self, content=moved(self.content, device))

    def filled(self, tensors: Sequence[Tensor]) -> OwnBatch:
        """The same batch with others in place of its tensors, in their order."""
        return replace(self, content=_with(self.content, iter(tensors)))

    def tensors(self) -> tuple[Any, ...]:
        """All there is in it."""
        return tuple(leaves(self.content))

    def named(self) -> dict[str, Tensor]:
        """The tensors by their names or numbers."""
        items = self.content.items() if isinstance(self.content, Mapping) else enumerate(self.tensors())
        return {str(name): value.contiguous() for name, value in items if isinstance(value, Tensor)}

    @property
    def size(self) -> int:
        """What may be taken for tokens: the numbers of the largest tensor of whole numbers, else the examples."""
        whole = [t.numel() for t in self.tensors() if isinstance(t, Tensor) and not t.is_floating_point()]
        return max(whole, default=self.examples)

    @property
    def labels(self) -> Tensor:
        """What is under the key ``labels``."""
        labels = self.content.get("labels") if isinstance(self.content, Mapping) else None
        if not isinstance(labels, Tensor):
            raise ConfigError(
                "data.dataset: its examples have no labels for the loss.",
                hint="Give dicts of the forward's arguments with 'labels' beside them, or set data.loss.",
            )
        return labels

    @property
    def predicted(self) -> int:
        """The labels that are not to be ignored."""
        return int((self.labels != IGNORE).sum())


def moved(value: Any, device: torch.device) -> Any:
    """The same with every tensor in it on a device."""
    there = [v.to(device, non_blocking=True) for v in leaves(value) if isinstance(v, Tensor)]
    return _with(value, iter(there))


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same with other tensors in it."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {k: _with(v, tensors) for k, v in value.items()}
    return type(value)(_with(v, tensors) for v in value) if isinstance(value, tuple | list) else value


def leaves(value: Any) -> Iterator[Any]:
    """What is in nested lists and dicts."""
    if isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(item)
    else:
        yield value


@dataclass(frozen=True, slots=True)
class Shortened:
    """:func:`collate` without the padding that all rows share, but for what a ``multiple`` needs."""

    multiple: int
    pairs: bool
    """Whether labels are targets with a length of their own."""

    def __call__(self, rows: Sequence[Any]) -> Batch:
        """One batch."""
        batch = collate(rows)
        width = _up(int(batch.attention.sum(1).max()), self.multiple)
        labels = batch.labels
        if labels.dim() == 2:
            longest = _up(int((labels != IGNORE).sum(1).max()), self.multiple) if self.pairs else width
            labels = labels[:, :longest]
        ids, attention, types = (
            None if t is None else t[:, :width].contiguous() for t in (batch.ids, batch.attention, batch.types)
        )
        assert ids is not None and attention is not None
        return Batch(ids, labels.contiguous(), attention, types=types)


def _up(length: int, multiple: int) -> int:
    return -(-max(length, 1) // multiple) * multiple


def collate(rows: Sequence[Any]) -> Batch:
    """Sequences of equal lengths as one batch."""
    ids, labels = (torch.from_numpy(np.stack([r[name] for r in rows])) for name in ("ids", "labels"))
    length = torch.tensor([r["used"] for r in rows])
    attention = (torch.arange(ids.shape[1]) < length[:, None]).long()
    there = [name for name in ("documents", "types") if name in rows[0]]
    more = {name: torch.from_numpy(np.stack([r[name] for r in rows])) for name in there}
    return Batch(ids, labels, attention, **more)


def count_labels(batches: Sequence[Batch | OwnBatch]) -> int:
    """Positions that are to be predicted."""
    return sum(batch.predicted for batch in batches)


def fingerprint(batches: Sequence[Batch | OwnBatch]) -> str:
    """A hash that is equal exactly when the batches are."""
    digest = hashlib.sha256()
    for part in _parts(batches):
        digest.update(part)
    return digest.hexdigest()


def _parts(batches: Sequence[Batch | OwnBatch]) -> Iterator[bytes]:
    for batch in batches:
        for value in batch.tensors():
            if isinstance(value, Tensor):
                yield repr((value.dtype, value.shape)).encode()
                yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            else:
                yield repr(value).encode()


def origins_of(batches: Sequence[Batch | OwnBatch]) -> tuple[Origin, ...]:
    """Where all rows of the batches come from."""
    return tuple(origin for batch in batches for origin in batch.origins)


def check_shares(shares: Sequence[tuple[str, Sequence[Origin]]], tp: int) -> None:
    """Raise unless the tp ranks of each dp rank have one batch and no two dp ranks share a row.

    ``shares`` has by world rank what :func:`fingerprint` and :func:`origins_of` say of each rank's batches.  Rows of
    different origins may well be equal: data may hold an example twice.
    """
    for rank, (text, _) in enumerate(shares):
        first = rank // tp * tp
        if text != shares[first][0]:
            raise ConfigError(
                f"Ranks {first} and {rank} are tp ranks of one dp rank, but their first batches differ.",
                hint="Give every node the same files.",
            )
    owners: dict[Origin, int] = {}
    for rank in range(0, len(shares), tp):
        for origin in shares[rank][1]:
            other = owners.setdefault(origin, rank)
            if other != rank:
                raise ConfigError(
                    f"Ranks {other} and {rank} are different dp ranks, but sequence {origin[2]} of source {origin[0]} "
                    "is in the first batches of both.",
                    hint="Give every node the same files.",
                )
