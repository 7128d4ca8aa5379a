"""A twin of a model too large to run: the same classes from a smaller config.

Nothing is known here of any model.  What a number of the config does is seen by changing it and building the module on
meta: it drops whole modules (a count of layers or of experts), or it changes the sizes of parameters (a width), or
neither.  Layers become as few as keep every kind of layer, widths are divided by one power of two, head counts stay,
and the result is the first that builds and runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tpconvert.errors import SourceError
from tpconvert.source.build.frugal import frugal, parameters_to_meta
from tpconvert.source.huggingface.open import quiet
from tpconvert.source.inputs.find import example_inputs
from tpconvert.source.source import Source

VOCABULARY, EXPERTS, HEAD = 2048, 8, 8
"""The most words and experts of a twin, and the least width of a head."""

Path = tuple[str, ...]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Number:
    """An integer of a config: the attributes that lead to it, and its value."""

    path: Path
    value: int

    @property
    def name(self) -> str:
        """``text_config.hidden_size``."""
        return ".".join(self.path)


def twin(source: Source) -> Source:
    """The source of a shrunk model of the same classes, with seeded weights; its notes say what became of what."""
    make = source.make
    if make is None or source.config is None:
        raise SourceError(
            f"{source.name} is a function, and only a Hugging Face config can be shrunk.",
            hint="Write a function that returns a smaller model, and verify that.",
        )
    with quiet():
        config = _few_experts_listed(make, _few_layers(make, source.config))
        config = _few_words(config)
        config, inputs = _narrow(make, config, source.name)
    changes = _changes(source.config, config)
    with quiet(), frugal():
        on_meta = parameters_to_meta(make(config)).eval()
    return replace(
        source,
        module=on_meta,
        inputs=inputs,
        build=partial(_built, make, config),
        weights=partial(_weights, make, config),
        description=source.description | {"twin": changes},
        has_weights=False,
        config=config,
        notes=(f"this is a twin of {source.name}: {', '.join(changes) or 'nothing had to be shrunk'}.",),
    )


def _built(make: Any, config: Any) -> nn.Module:
    built: nn.Module = make(config)
    return built.eval()


def _weights(make: Any, config: Any) -> Any:
    from tpconvert.checkpoint.tensors.weights import module_weights

    return module_weights(_built(make, config))


# -- counts of modules ------------------------------------------------------------------------------------------


def _few_layers(make: Any, config: Any) -> Any:
    """The config with as few layers as keep every kind; the attribute all configs have goes first, to be quick."""
    first = [n for n in numbers(config) if n.path[-1] == _standard(config, n.path, "num_hidden_layers")]
    for number in first:
        config = _fewer(make, config, number, least=2, nested=False)
    for number in numbers(config):
        config = _fewer(make, config, number, least=2, nested=False)
    return config


def _few_experts_listed(make: Any, config: Any) -> Any:
    """The config with few modules where each layer has a list of them."""
    for number in numbers(config):
        config = _fewer(make, config, number, least=EXPERTS, nested=True)
    return config


def _fewer(make: Any, config: Any, number: Number, *, least: int, nested: bool) -> Any:
    """The config with the smallest count of the modules that ``number`` counts, or the config itself."""
    if not least < number.value <= 1024:
        return config
    base, few = _shapes(make, config), _shapes(make, with_number(config, number, least))
    if base is None or few is None or not few.keys() < base.keys() or any(base[n] != few[n] for n in few):
        return config
    if nested != (_outer(few) == _outer(base)):
        return config
    for count in range(least, number.value):
        candidate = with_number(config, number, count)
        if _kinds_listed(config, number, count):
            shapes = _shapes(make, candidate)
            if shapes is not None and _kinds(shapes) == _kinds(base):
                return candidate
    return config


def _outer(shapes: Shapes) -> set[str]:
    """The names up to their first number: ``model.layers.3``."""
    return {m.group() for name in shapes if (m := re.match(r".*?\.\d+(?=\.)", name))}


def _kinds(shapes: Shapes) -> set[tuple[str, tuple[int, ...]]]:
    return {(re.sub(r"\.\d+(?=\.)", ".*", name), shape) for name, shape in shapes.items()}


def _kinds_listed(config: Any, number: Number, count: int) -> bool:
    """Whether lists with an entry a layer, such as layer types, keep every value in their first ``count``."""
    owner = _owner(config, number.path)
    lists = [v for v in vars(owner).values() if isinstance(v, list | tuple) and len(v) == number.value > 3]
    return all({str(x) for x in v} == {str(x) for x in v[:count]} for v in lists)


# -- sizes ------------------------------------------------------------------------------------------------------


def _few_words(config: Any) -> Any:
    for number in numbers(config):
        if number.path[-1] == _standard(config, number.path, "vocab_size") and number.value > VOCABULARY:
            config = with_number(config, number, VOCABULARY)
    marks = [n for n in numbers(config) if n.path[-1].endswith("_id") and n.value >= VOCABULARY]
    for i, number in enumerate(marks):
        config = with_number(config, number, VOCABULARY - 1 - i)
    return config


def _narrow(make: Any, config: Any, name: str) -> tuple[Any, Any]:
    """The narrowest config that builds and runs, and inputs for it."""
    widths, experts = _widths_and_experts(make, config)
    last: Exception | None = None
    widest = _widest(config, widths)
    for factor in _factors(config, widest):
        for count in sorted({min(n, max((e.value for e in experts), default=0)) for n in (EXPERTS, 16, 32, 1 << 20)}):
            candidate = config
            for number in widths:
                candidate = with_number(candidate, number, _narrower(number.value, factor, widest // factor))
            for number in experts:
                candidate = with_number(candidate, number, min(count, number.value))
            try:
                module = _built(make, candidate)
                inputs = example_inputs(module, candidate)
                with torch.no_grad():
                    module(**inputs)
            except Exception as error:  # whatever a model says of a config it does not accept
                last = error
                continue
            return candidate, inputs
    raise SourceError(f"{name}: no smaller model of its classes runs: {last}") from last


def _narrower(value: int, factor: int, narrow: int) -> int:
    """A width divided by ``factor``, and on to four times the model's own; kept where that leaves no whole head."""
    if value % factor or value // factor < HEAD:
        return value
    value //= factor
    while value > 4 * narrow and value % 2 == 0:
        value //= 2
    return value


def _widest(config: Any, widths: list[Number]) -> int:
    """The model's own width, which its heads share."""
    own = [n.value for n in widths if n.path[-1] == _standard(config, n.path, "hidden_size")]
    return min(own, default=max((n.value for n in widths), default=1))


def _most_heads(config: Any) -> int:
    heads = (n.value for n in numbers(config) if n.path[-1] == _standard(config, n.path, "num_attention_heads"))
    return max(heads, default=1)


def _factors(config: Any, widest: int) -> Iterator[int]:
    """Powers of two, from the one that leaves heads narrow but not empty, down to one."""
    factor = 1
    while widest // (2 * factor) >= max(64, HEAD * _most_heads(config)):
        factor *= 2
    while factor:
        yield factor
        factor //= 2


def _widths_and_experts(make: Any, config: Any) -> tuple[list[Number], list[Number]]:
    """The numbers that parameters' sizes are multiples of; apart, those that count entries of 3-D parameters."""
    base = _shapes(make, config)
    heads = _most_heads(config)
    widths: list[Number] = []
    experts: list[Number] = []
    for number in numbers(config):
        if (
            number.value <= EXPERTS
            or number.value % 2
            or number.path[-1] == _standard(config, number.path, "vocab_size")
        ):
            continue
        half = _shapes(make, with_number(config, number, number.value // 2))
        if base is None or half is None or half.keys() != base.keys():
            continue
        changed = [(old, new) for name in base for old, new in zip(base[name], half[name], strict=False) if old != new]
        # Sizes that are no sums of it, such as those an image's side gives, do not make it a width.
        if not any((old - new) % (number.value // 2) == 0 for old, new in changed):
            continue
        if any(len(base[n]) == 3 and base[n][0] == number.value != half[n][0] for n in base):
            experts.append(number)
        elif number.value > max(heads, 32):
            widths.append(number)
    return widths, experts


# -- configs ----------------------------------------------------------------------------------------------------


def numbers(config: Any, path: Path = ()) -> list[Number]:
    """The integers of a config and of the configs in it."""
    found = []
    for name, value in vars(config).items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and not name.startswith("_"):
            found.append(Number((*path, name), value))
        elif hasattr(value, "to_dict"):
            found += numbers(value, (*path, name))
    return found


def with_number(config: Any, number: Number, value: int) -> Any:
    """A copy of the config with another value; lists with one entry for each of what it counts are cut to it."""
    copy = deepcopy(config)
    owner = _owner(copy, number.path)
    setattr(owner, number.path[-1], value)
    for name, held in list(vars(owner).items()):
        if isinstance(held, list | tuple) and len(held) == number.value > max(value, 3):
            setattr(owner, name, held[:value])
    return copy


def _owner(config: Any, path: Path) -> Any:
    for name in path[:-1]:
        config = getattr(config, name)
    return config


def _standard(config: Any, path: Path, name: str) -> str:
    """What the config calls one of the attributes that transformers gives every config."""
    return str(getattr(_owner(config, path), "attribute_map", {}).get(name, name))


def _shapes(make: Any, config: Any) -> Shapes | None:
    """The shapes of all parameters, or None where the model does not accept the config."""
    try:
        with frugal():
            module = make(config)
    except Exception:  # whatever a model says of a config it does not accept
        return None
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def _changes(old: Any, new: Any) -> list[str]:
    before = {n.path: n.value for n in numbers(old)}
    after = {n.path: n.value for n in numbers(new)}
    return [f"{'.'.join(p)} {v} -> {after[p]}" for p, v in before.items() if after.get(p, v) != v]
