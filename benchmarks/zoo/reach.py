"""Which parameters the output hangs on; and more inputs, for those that it does not reach."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch import nn

from tpconvert.source.inputs.find import Search

ARGUMENTS, FORMS = 16, 3
"""How many more arguments are tried, and forms of each."""
LONG = 3.0
"""Seconds of computing after which no more are tried."""
_OF_NO_USE = re.compile(
    r"cache|past_key|encoder_outputs|(start|end)_positions|^return_|^output_|_targets?$"
    r"|inputs_embeds|position_ids|^(decoder_|cross_)?attention_mask$|head_mask"
)
"""Arguments that stand for what other inputs give, or that no parameter waits for."""
_LAST = re.compile(r"label|hidden_states|_embeds$")
"""Arguments that are tried last: what another model gives, and what is for training."""


def untouched(module: nn.Module, inputs: dict[str, Any], most: int | None = 20) -> list[list[Any]]:
    """Parameters that no output depends on, folded: ``[name with * for numbers, how many]``, the most of them."""
    from tpconvert.verify.compare.checks import call
    from tpconvert.verify.measure.values import loss_of

    try:
        loss = loss_of(call(module, inputs))
        if loss is None:
            return [["all: no output has a gradient", 1]]
        loss.backward()
    except Exception as error:
        return [[f"unknown: {type(error).__name__}: {error}"[:200], 1]]
    found = Counter(_folded(n) for n, p in module.named_parameters() if p.grad is None and p.requires_grad)
    module.zero_grad(set_to_none=True)
    return [[name, n] for name, n in found.most_common(most)]


def _folded(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def enriched(module: nn.Module, search: Search, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with those optional ones that let the output depend on more parameters."""
    end = time.process_time() + LONG
    missing = _count(module, inputs)
    more = [n for n in search.arguments if n not in inputs and not _OF_NO_USE.search(n)]
    more.sort(key=lambda name: bool(_LAST.search(name)))
    for name in more[:ARGUMENTS]:
        if not missing or time.process_time() > end:
            break
        for given in islice(_with(search, name, inputs), FORMS):
            settled = search.settled(module, given, list(search.arguments))
            count = _count(module, settled) if settled is not None else missing
            if settled is not None and count < missing:
                inputs, missing = settled, count
                break
    return inputs


def _with(search: Search, name: str, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The inputs with forms of an argument; at first with those that share its first word too."""
    forms = search.forms(name, inputs)
    if name == "labels" and "input_ids" in inputs:
        forms = chain([{name: inputs["input_ids"].clone()}], forms)
    for form in forms:
        if name in form:
            given = form | inputs
            beside = _beside(search, name, given)
            yield from [search.completed(beside | given)] if beside else []
            yield search.completed(given)


def _beside(search: Search, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The first forms of arguments that go with one: ``future_time_features`` with ``future_values``."""
    first = name.partition("_")[0]
    found: dict[str, Any] = {}
    for other in search.arguments:
        if other not in given and other.startswith(f"{first}_") and not _OF_NO_USE.search(other):
            found = next(search.forms(other, given | found), {}) | found
    return found


def reached(module: nn.Module, inputs: dict[str, Any]) -> tuple[int, float]:
    """How many numbers of parameters some output depends on, and which part of all they are."""
    names = {name for name, _ in untouched(module, inputs, None)}
    sizes = {n: p.numel() for n, p in module.named_parameters()}
    here = sum(size for n, size in sizes.items() if _folded(n) not in names)
    return here, here / max(sum(sizes.values()), 1)


def _count(module: nn.Module, inputs: dict[str, Any]) -> int:
    """How many parameters no output depends on; all of them where that cannot be told."""
    found = untouched(module, inputs, None)
    if found and re.match("all:|unknown:", str(found[0][0])):
        return sum(1 for _ in module.parameters())
    return sum(many for _, many in found)
