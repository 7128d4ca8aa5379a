"""Other ways in which a model is called than with its example inputs: with a mask, and with places given.

Who trains it hides padding (``attention_mask`` of ones and zeros) and keeps packed documents apart (``position_ids``
that begin anew), where its forward has these arguments.  It may take another path then, so it is captured that way
too, and the plan is held to both.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.analyze.capture.run import Inputs
from tpconvert.analyze.trace.call import Turn

MASK, POSITIONS = "attention_mask", "position_ids"
"""The arguments of a forward by which it is told of padding and of places."""


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One other way to call a model."""

    name: str
    """What is other about it, as it goes on after "with" or "without"."""
    inputs: Inputs
    turned: frozenset[Turn] = frozenset()
    """What its forward is told of values in place of what they are."""
    large: bool = False
    """Whether its inputs are so large that it is run without values."""
    asked: bool = False
    """Whether it answers a question of the forward otherwise."""


def ways(module: nn.Module, inputs: Inputs) -> Iterator[Way]:
    """Other ways, of which the first that a forward takes stands for all: they differ in how masks are made.

    Nothing where its forward has no such argument, or no ids are known.
    """
    given = by_name(module, inputs)
    ids = None if given is None else ids_of(given)
    if given is None or ids is None:
        return
    takes = inspect.signature(module.forward).parameters
    mask, places = given.get(MASK), {}
    if POSITIONS in takes and given.get(POSITIONS) is None:
        places = {POSITIONS: restarting(ids)}
    if MASK in takes and not _is_plain(mask):
        left = {name: value for name, value in given.items() if name != MASK}
        yield Way(f"without {MASK}", left)
    elif MASK in takes and ids.shape[1] > 1:
        for more in [places, {}] if places else [{}]:
            yield Way(f"with {' and '.join([MASK, *more])}", given | {MASK: padded(ids, mask)} | more)
        yield Way(f"with {MASK}", given | {MASK: padded(ids, mask, left=False)})
    if places:
        yield Way(f"with {POSITIONS}", given | places)


def by_name(module: nn.Module, inputs: Inputs) -> dict[str, Any] | None:
    """The inputs by the names of the forward's arguments; None where it does not name them."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [n for n, p in inspect.signature(module.forward).parameters.items() if p.kind == kinds[1]]
    return dict(zip(names, inputs, strict=False)) if len(names) >= len(inputs) else None


def ids_of(given: Mapping[str, Any]) -> Tensor | None:
    """The tokens: the first integers in rows that a mask among the inputs fits."""
    mask = given.get(MASK)
    fits = mask.shape if isinstance(mask, Tensor) and mask.dim() == 2 else None
    integers = (torch.int64, torch.int32)
    found = (v for name, v in given.items() if name not in (MASK, POSITIONS) and isinstance(v, Tensor))
    return next((v for v in found if v.dim() == 2 and v.dtype in integers and fits in (None, v.shape)), None)


def padded(ids: Tensor, mask: Tensor | None = None, *, left: bool = True) -> Tensor:
    """A mask that hides a third of each row: the first places of every other one, the last of the rest."""
    made = torch.ones_like(ids) if mask is None else torch.ones_like(mask)
    hidden = max(1, ids.shape[1] // 3)
    made[:, -hidden:] = 0
    if left:
        made[::2] = made[::2].flip(1)
    return made


def restarting(ids: Tensor) -> Tensor:
    """The places of two documents that share each row."""
    first = (ids.shape[1] + 1) // 2
    return (torch.arange(ids.shape[1], device=ids.device) % first).expand_as(ids).clone()


def _is_plain(mask: Any) -> bool:
    """Whether there is no mask, or one of two dims that hides nothing."""
    return mask is None or (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all()))


def packed(module: nn.Module, inputs: Inputs) -> Iterator[Way]:
    """The ways in which two documents that share each row may be kept apart."""
    given = by_name(module, inputs)
    ids = None if given is None else ids_of(given)
    if given is None or ids is None:
        return
    takes = inspect.signature(module.forward).parameters
    given = {name: value for name, value in given.items() if name not in (MASK, POSITIONS)}
    places = {POSITIONS: restarting(ids)} if POSITIONS in takes else {}
    if places:
        yield Way(f"with {POSITIONS}", given | places)
    if MASK in takes:
        number = (restarting(ids) == 0).cumsum(1)
        seen = (number[:, None, :, None] == number[:, None, None, :]).tril()
        yield Way(f"with {MASK} of four dims", given | places | {MASK: seen})
