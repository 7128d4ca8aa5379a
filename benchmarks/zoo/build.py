"""A small real module of a model type, with inputs it runs on."""

from __future__ import annotations

import gc
import signal
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.zoo.mend import divisible, fit, lessen, mend
from benchmarks.zoo.reach import enriched, reached
from benchmarks.zoo.small import ATTEMPTS, Attempt, small
from benchmarks.zoo.types import class_names
from tpconvert.analyze.trace.copies import copied
from tpconvert.analyze.trace.trees import tensor_slots
from tpconvert.source import Source, twin
from tpconvert.source.build.frugal import frugal
from tpconvert.source.huggingface.open import _from_config, quiet
from tpconvert.source.inputs.documented import parts
from tpconvert.source.inputs.find import Refusal, Search, media_in

MANY = 12_000_000
"""Parameters above which checking takes too long."""
CLASSES = 4
MENDED = 12
"""Numbers of a configuration that are supplied at most, and the rounds of it."""
NARROWED = 3
"""How often a model with many parameters is made narrower."""
REFUSALS = 8
"""How many refused inputs are looked at for what a configuration lacks."""
AGAIN = 6
"""How often what is said again is mended: several numbers may hang together, but not endlessly many."""
MORE = 3
"""Attempts after the first that runs, while images or sounds are missing."""
SAME = 4
"""After so many attempts that fail alike, others are not made."""
NEARLY_ALL = 0.98
"""The share of parameters that some output depends on, from which on no other class is tried."""
QUICK, SLOW = 0.6, 3.0
"""Seconds that one forward of a twin, or of a small model, may take."""
LIGHT, HEAVY = 20_000_000, 200_000_000
"""Numbers that one forward may make: all are kept, in float64, for the whole model and for every rank."""
SIDES = (128, 64)
"""Sides that images are cropped to, where they still are too many numbers."""
SMALLER = (4, 16)
"""What the sides of images are divided by, once more, where a model that runs is not light."""
SHORT, SHORTENED = 5, 3
"""Below which inputs are not made shorter, and how often they are."""
TWIN_SECONDS, SMALL_SECONDS = 8, 24
"""How long a twin may take, and all other attempts with one class; no other class is begun after that much."""


class NotBuiltError(Exception):
    """No class of the type could be built and run."""


class TooLargeError(NotBuiltError):
    """With the module on meta that is too large."""

    def __init__(self, text: str, module: nn.Module) -> None:
        super().__init__(text)
        self.module = module


class _OutOfTimeError(BaseException):
    """No plain exception, or whoever tries one thing after another would go on."""


@dataclass(frozen=True, slots=True)
class Built:
    """A module that runs on its inputs."""

    module: nn.Module
    inputs: dict[str, Any]
    by: str
    """``twin``, or ``small`` and how much smaller."""
    made: int = 0
    """How many numbers one forward makes."""


def build(model_type: str) -> Built:
    """A small module of the first class of a type that runs; of that which reaches most, where it leaves much out."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        supplied = tomllib.loads((Path(__file__).parent / "configs.toml").read_text())
        with quiet():
            config = CONFIG_MAPPING[model_type](**supplied.get(model_type, {}))
    except Exception as error:
        raise NotBuiltError(f"its default configuration fails: {told(error)}") from error
    errors = []
    names = class_names(model_type, pair=bool(getattr(config, "is_encoder_decoder", False)))
    kinds = {name: getattr(transformers, name, None) for name in names}
    names.sort(key=lambda name: _own(kinds[name], config) is not config)
    best: tuple[int, float, Built] | None = None
    began = time.process_time()
    for name in names[:CLASSES]:
        left = SMALL_SECONDS - int(time.process_time() - began)
        if best is not None and (best[1] > NEARLY_ALL or left <= 0):
            break
        kind = kinds[name]
        if kind is None:
            errors.append(f"{name}: transformers exports no such class")
            continue
        make = partial(_from_config, kind, trust=False)
        for way, seconds in ((_by_small, SMALL_SECONDS), (_by_twin, TWIN_SECONDS)):
            try:
                with limit(seconds if best is None else min(seconds, left)):
                    built = way(model_type, make, _own(kind, config))
                    here = (*reached(built.module, built.inputs), built)
                    best = here if best is None else max(best, here, key=lambda one: one[0])
                    break
            except (Exception, _OutOfTimeError) as error:
                errors.append(f"{name} {way.__name__.removeprefix('_by_')}: {told(error)}")
            finally:
                gc.collect()  # what was tried hangs in cycles with the errors it raised, and holds gigabytes
    if best is not None:
        return best[2]
    raise NotBuiltError(" || ".join(errors[:4]) or "it has no class")


def _cropped(built: Built, side: int) -> Built:
    """The same module on the corners of its images; a copy, since some keep what they make of the size of an image."""
    inputs = {n: v[..., :side, :side] if getattr(v, "ndim", 0) >= 4 else v for n, v in built.inputs.items()}
    return _run(copied(built.module), inputs, f"{built.by.partition(', cropped')[0]}, cropped to {side}", SLOW)


def _shorter(built: Built) -> Built:
    """The same module on inputs that are a quarter as long along one size that they have, the first that it takes."""
    tensors = {n: v for n, v in built.inputs.items() if isinstance(v, torch.Tensor)}
    for size in sorted({n for v in tensors.values() for n in v.shape[1:] if n > SHORT}, reverse=True):
        inputs = dict(built.inputs)
        for name, value in tensors.items():
            at = tuple(slice(max(n // 4, SHORT)) if n == size else slice(None) for n in value.shape[1:])
            inputs[name] = value[(slice(None), *at)]
        with suppress(Exception):  # whatever a model says of inputs that are too short
            other = _run(copied(built.module), inputs, f"{built.by.partition(', shortened')[0]}, shortened", SLOW)
            if other.made < built.made:
                return other
    return built


def _own(kind: Any, config: Any) -> Any:
    """The configuration that a class takes: the whole one, or the first in it that is of its own kind."""
    wanted = getattr(kind, "config_class", None) or object
    return next((part for part in parts(config) if isinstance(part, wanted)), config)


def _by_twin(model_type: str, make: Any, config: Any) -> Built:
    source = twin(
        Source(name=model_type, module=nn.Module(), inputs={}, build=nn.Module, weights=_none, config=config, make=make)
    )
    count = _parameters(source.module)
    if count > MANY:
        raise NotBuiltError(f"the twin has {count / 1e6:.0f} M parameters")
    return _run(source.build(), dict(source.inputs), "twin", QUICK)


def _none() -> Any:
    raise NotImplementedError


def _by_small(model_type: str, make: Any, config: Any) -> Built:
    """The first attempt that runs; others go on while images or sounds are refused, and the richest counts."""
    errors: list[Exception] = []
    best: tuple[Attempt, Built] | None = None
    more = MORE
    try:
        for attempt in ATTEMPTS:
            found, poor = _by_attempt(make, config, attempt, errors)
            if found is not None and (best is None or media_in(found.inputs) > media_in(best[1].inputs)):
                best = attempt, found
            more -= best is not None
            if (best is not None and not poor) or more < 0 or _alike(errors):
                break
        if best is not None:
            return _lighter(make, config, *best)
    except _OutOfTimeError:
        if best is None:
            raise
        return best[1]
    # The first is the one nearest to the model; the last one may only say that it is too large.
    raise errors[0]


def _alike(errors: list[Exception]) -> bool:
    return bool(errors) and [str(e) for e in errors].count(str(errors[-1])) > SAME


def _by_attempt(make: Any, config: Any, attempt: Attempt, errors: list[Exception]) -> tuple[Built | None, bool]:
    """The richest module that runs at a size, mended as often as that helps, and whether it lacks what others have.

    What was refused goes to ``errors``.
    """
    smaller = small(config, attempt)
    divisible(smaller)
    poorer: Built | None = None
    mended: Counter[str] = Counter()
    for _ in range(MENDED):
        found, refusals = _at_size(make, smaller, f"small: widths / {attempt.width}, images / {attempt.image}")
        poorer = found or poorer
        if found is None:
            errors += refusals[:1]
        fresh = [error for error in refusals if mended[told(error)] < AGAIN]
        by = next((error for error in fresh if _changed(smaller, error)), None)
        if by is None:
            break
        divisible(smaller)
        mended[told(by)] += not isinstance(by, TooLargeError)
    return poorer, found is None or bool(refusals)


def _lighter(make: Any, config: Any, attempt: Attempt, found: Built) -> Built:
    """A model that makes fewer numbers because its images are smaller, where one is needed and runs as well."""
    best = found
    with suppress(_OutOfTimeError):
        best = _narrower(make, best)
        for by in SMALLER:
            if best.made <= LIGHT:
                break
            other, _ = _by_attempt(make, config, replace(attempt, image=attempt.image * by), [])
            if other is not None and other.made < best.made and other.inputs.keys() >= best.inputs.keys():
                best = other
        for side in SIDES if best.made > LIGHT else ():
            with suppress(Exception):  # whatever a model says of images that are too small
                best = min(best, _cropped(best, side), key=lambda built: built.made)
        for _ in range(SHORTENED):
            best = _shorter(best) if best.made > LIGHT else best
    if best.made > HEAVY:
        raise NotBuiltError(f"one forward makes {best.made / 1e6:.0f} M numbers, more than are kept for a comparison")
    return best


def _narrower(make: Any, built: Built) -> Built:
    """A model with fewer parameters, where one is needed and runs as well: all of them are kept for every rank."""
    for _ in range(NARROWED):
        config = deepcopy(getattr(built.module, "config", None))
        if _parameters(built.module) <= MANY or config is None or not lessen(config, built.module):
            break
        divisible(config)
        other, _ = _at_size(make, config, f"{built.by.partition(', narrowed')[0]}, narrowed")
        if other is None or not other.inputs.keys() >= built.inputs.keys():
            break
        built = min(built, other, key=lambda one: _parameters(one.module))
    return built


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _changed(config: Any, error: Exception) -> bool:
    return lessen(config, error.module) if isinstance(error, TooLargeError) else mend(config, error)


def _at_size(make: Any, config: Any, by: str) -> tuple[Built | None, list[Exception]]:
    """A module that runs, if it does; and what was said of inputs that are richer than those it runs on."""
    try:
        with quiet(), frugal():
            on_meta = make(config)
        count = _parameters(on_meta)
        if count > 3 * MANY:
            raise TooLargeError(f"{count / 1e6:.0f} M parameters", on_meta)
        module, search, inputs = _searched(make, config)
        failed = any(refusal.given is inputs for refusal in search.refused)
        poor = any(media_in(refusal.given) - media_in(inputs) for refusal in search.refused)
        if (failed or poor) and fit(module, config):
            module, search, inputs = _searched(make, config)
        refused = sorted(search.refused, key=lambda refusal: -refusal.reached)
        if any(refusal.given is inputs for refusal in refused):
            return None, _said(refused)
        richer = [refusal for refusal in refused if media_in(refusal.given) - media_in(inputs)]
        return _run(module, enriched(module, search, inputs), by, SLOW), _said(richer)
    except Exception as error:
        return None, [error]


def _said(refused: list[Refusal]) -> list[Exception]:
    """What was said of inputs, each once."""
    said: dict[str, Exception] = {}
    for refusal in refused:
        said.setdefault(told(refusal.error), refusal.error)
    return list(said.values())[:REFUSALS]


def _searched(make: Any, config: Any) -> tuple[nn.Module, Search, dict[str, Any]]:
    module = make(config).eval()
    search = Search(module, config)
    return module, search, search.run()


def _run(module: nn.Module, inputs: dict[str, Any], by: str, seconds: float) -> Built:
    module.eval()
    start = time.process_time()
    with torch.no_grad(), _Made() as made:
        output = module(**inputs)
    if any(t.is_floating_point() and t.isnan().any() for _, t in tensor_slots(output)):
        raise NotBuiltError("what it returns is not a number, so nothing could be compared")
    if time.process_time() - start > seconds:
        raise NotBuiltError(f"one forward takes longer than {seconds} s")
    return Built(module.float(), inputs, by, made.count)


class _Made(TorchFunctionMode):
    """Counts the numbers in what the ops called within it return."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, list | tuple) else (out,):
            self.count += value.numel() if isinstance(value, torch.Tensor) else 0
        return out


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Within it, an alarm goes off after so much computing: other programs may slow this one down."""

    def ring(*_: Any) -> None:
        raise _OutOfTimeError(f"takes longer than {seconds} s")

    old = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def told(error: BaseException) -> str:
    """The type and the first line of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()[:300]}" if lines else type(error).__name__
