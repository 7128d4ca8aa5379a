"""A small real module of a model type, with inputs it runs on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.small import ATTEMPTS, small
from benchmarks.zoo.types import class_names
from tpconvert.source import Source, twin
from tpconvert.source.frugal import frugal
from tpconvert.source.huggingface import _from_config, quiet
from tpconvert.source.inputs import example_inputs

MANY = 12_000_000
"""Parameters above which checking takes too long."""
CLASSES = 4
QUICK, SLOW = 0.6, 3.0
"""Seconds that one forward of a twin, or of a small model, may take."""
TWIN_SECONDS, SMALL_SECONDS = 10, 16
"""How long a twin may take, and how long all other attempts with one class."""


class NotBuiltError(Exception):
    """No class of the type could be built and run."""


class _OutOfTimeError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Built:
    """A module that runs on its inputs."""

    module: nn.Module
    inputs: dict[str, Any]
    by: str
    """``twin``, or ``small`` and how much smaller."""


def build(model_type: str) -> Built:
    """A small module of the first class of a type that runs."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        with quiet():
            config = CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise NotBuiltError(f"its default configuration fails: {told(error)}") from error
    errors = []
    for name in class_names(model_type, pair=bool(getattr(config, "is_encoder_decoder", False)))[:CLASSES]:
        kind = getattr(transformers, name, None)
        if kind is None:
            errors.append(f"{name}: transformers exports no such class")
            continue
        make = partial(_from_config, kind, trust=False)
        for way, seconds in ((_by_twin, TWIN_SECONDS), (_by_small, SMALL_SECONDS)):
            try:
                with limit(seconds):
                    return way(model_type, make, config)
            except Exception as error:
                errors.append(f"{name} {way.__name__.removeprefix('_by_')}: {told(error)}")
    raise NotBuiltError(" || ".join(errors[:4]) or "it has no class")


def _by_twin(model_type: str, make: Any, config: Any) -> Built:
    source = twin(
        Source(name=model_type, module=nn.Module(), inputs={}, build=nn.Module, weights=_none, config=config, make=make)
    )
    count = sum(p.numel() for p in source.module.parameters())
    if count > MANY:
        raise NotBuiltError(f"the twin has {count / 1e6:.0f} M parameters")
    built = _run(source.build(), dict(source.inputs), "twin", QUICK)
    return built


def _none() -> Any:
    raise NotImplementedError


def _by_small(model_type: str, make: Any, config: Any) -> Built:
    errors: list[Exception] = []
    for attempt in ATTEMPTS:
        try:
            smaller = small(config, attempt)
            with quiet(), frugal():
                count = sum(p.numel() for p in make(smaller).parameters())
            if count > 3 * MANY:
                errors.append(NotBuiltError(f"{count / 1e6:.0f} M parameters"))
                continue
            module = make(smaller).eval()
            inputs = example_inputs(module, smaller)
            built = _run(module, inputs, f"small: widths / {attempt.width}, images / {attempt.image}", SLOW)
            return built
        except _OutOfTimeError as error:
            errors.append(error)
            break
        except Exception as error:
            errors.append(error)
    # The first is the one nearest to the model; the last one may only say that it is too large.
    raise errors[0]


def _run(module: nn.Module, inputs: dict[str, Any], by: str, seconds: float) -> Built:
    module.eval()
    start = time.monotonic()
    with torch.no_grad():
        module(**inputs)
    if time.monotonic() - start > seconds:
        raise NotBuiltError(f"one forward takes longer than {seconds} s")
    return Built(module.float(), inputs, by)


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Within it, an alarm goes off after a while."""

    def ring(*_: Any) -> None:
        raise _OutOfTimeError(f"takes longer than {seconds} s")

    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def told(error: BaseException) -> str:
    """The type and the first line of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()[:300]}" if lines else type(error).__name__
