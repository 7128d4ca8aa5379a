"""Which parameters the output hangs on; and more inputs, for those that it does not reach."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import nn

from tpconvert.source.inputs import Search

ARGUMENTS, FORMS = 16, 3
"""How many more arguments are tried, and forms of each."""
LONG = 3.0
"""Seconds of computing after which no more are tried."""
_OF_NO_USE = re.compile(
    r"label|cache|past_key|encoder_outputs|hidden_states|(start|end)_positions|^return_|^output_|_targets?$"
    r"|inputs_embeds|position_ids|^(decoder_|cross_)?attention_mask$|head_mask"
)
"""Arguments that stand for what other inputs give, or that no parameter waits for."""


def untouched(module: nn.Module, inputs: dict[str, Any]) -> list[list[Any]]:
    """Parameters that no output depends on, folded: ``[name with * for numbers, how many]``."""
    from tpconvert.verify.checks import call
    from tpconvert.verify.modes import loss_of

    try:
        loss = loss_of(call(module, inputs))
        if loss is None:
            return [["all: no output has a gradient", 1]]
        loss.backward()
    except Exception as error:
        return [[f"unknown: {type(error).__name__}: {error}"[:200], 1]]
    found = Counter(_folded(n) for n, p in module.named_parameters() if p.grad is None and p.requires_grad)
    module.zero_grad(set_to_none=True)
    return [[name, n] for name, n in found.most_common(20)]


def _folded(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def enriched(module: nn.Module, search: Search, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with those optional ones that let the output depend on more parameters."""
    end = time.process_time() + LONG
    missing = _count(module, inputs)
    more = [n for n in search.arguments if n not in inputs and not _OF_NO_USE.search(n)]
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
    for form in search.forms(name, inputs):
        if name in form:
            yield search.completed(form | inputs)


def _count(module: nn.Module, inputs: dict[str, Any]) -> int:
    """How many parameters no output depends on; all of them where that cannot be told."""
    found = untouched(module, inputs)
    if found and re.match("all:|unknown:", str(found[0][0])):
        return sum(1 for _ in module.parameters())
    return sum(many for _, many in found)
