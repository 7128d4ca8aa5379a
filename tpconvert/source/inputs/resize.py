"""Inputs of other sizes, by what a forward says of the sizes that it was given.

``mat1 and mat2 shapes cannot be multiplied (26x46 and 768x48)`` asks for a width of 768 in place of 46.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tpconvert.source.inputs.documented import FEW, random

Given = dict[str, Any]
HALVED = 64
"""What sides of images are multiples of, so that they can be halved, and doubled again."""
LONG = 4001
"""Entries of a sound that is long enough for a stack of convolutions."""
LONGEST = 16 * LONG
"""Entries of a sound that is made longer at most, where a deep stack asks for it."""


def resized(given: Given, text: str, words: Callable[..., Tensor]) -> Iterator[Given]:
    """The inputs with one of another size; ``words`` makes text of given dims after the batch."""
    for had, wanted in _sizes(text):
        for name, value in _floats(given):
            if had in value.shape[1:]:
                at = max(i for i, n in enumerate(value.shape) if n == had)
                new = given | {name: random(*value.shape[:at], wanted, *value.shape[at + 1 :])}
                yield _together(new, had, wanted)
        for name, value in _texts(given):
            if value.shape[1:] == (had,):
                yield given | {name: words(had, wanted)}
                yield _together(given | {name: words(wanted)}, had, wanted)
    yield from _other_texts(given, text, words)
    yield from _other_images(given, text)
    yield from _counted(given, text)
    yield from (given | {name: value} for name, value in _other_floats(given, text))
    if m := re.search(r"value tensor of shape \[(\d+),.*broadcast to indexing result of shape \[(\d+),", text):
        yield from _placed(given, int(m[1]), int(m[2]), words)


def _other_texts(given: Given, text: str, words: Callable[..., Tensor]) -> Iterator[Given]:
    """Text with as many rows, or numbers for each word, as a reshape asks for."""
    if m := re.search(r"shape '\[\d+, (\d+), -1\]' is invalid for input of size (\d+)", text):
        for name, value in _texts(given):
            if value.numel() == int(m[2]):
                yield given | {name: words(value.shape[1], int(m[1]))}
                yield given | {name: words(value.shape[1]).repeat(int(m[1]), 1)}
    if m := re.search(r"shape '\[-1, (\d+), \d+\]' is invalid for input of size (\d+)", text):
        for name, value in _texts(given):
            if value.numel() == int(m[2]):
                yield given | {name: value.repeat(int(m[1]), 1)}


def _counted(given: Given, text: str) -> Iterator[Given]:
    """Counts of something that are not zero; and as many entries as there are words, where places of them meet."""
    if "to have non-zero size" in text:
        none = {n: v for n, v in given.items() if isinstance(v, Tensor) and v.dim() == 1 and not v.any()}
        yield from [given | {n: torch.ones_like(v) for n, v in none.items()}] if none else []
    if m := re.search(r"shape '\[(\d+), \1, ", text):
        length = int(m[1])
        if any(v.shape[1:] == (length,) for _, v in _texts(given)):
            few = {n: v for n, v in _floats(given) if v.dim() == 3 and v.shape[1] == FEW}
            yield from (given | {n: random(len(v), length, v.shape[2])} for n, v in few.items())


def _other_images(given: Given, text: str) -> Iterator[Given]:
    """Images with other sides: one input after the other, then all of them."""
    images = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.dim() >= 4}
    for scale in _scales(text):
        scaled = {
            n: _sided(v, *(int(s * by) for s, by in zip(v.shape[-2:], scale, strict=True))) for n, v in images.items()
        }
        yield from (given | {name: value} for name, value in scaled.items())
        yield from [given | scaled] if len(scaled) > 1 else []
    if "Sizes of tensors must match except in dimension" in text:
        even = {n: _sided(v, *(_up(side, HALVED) for side in v.shape[-2:])) for n, v in images.items()}
        yield from (given | {n: v} for n, v in even.items() if v.shape != images[n].shape)


def _sided(images: Tensor, height: int, width: int) -> Tensor:
    shape = (*images.shape[:-2], height, width)
    return random(*shape) if images.is_floating_point() else torch.ones(shape, dtype=images.dtype)


def _other_floats(given: Given, text: str) -> Iterator[tuple[str, Tensor]]:
    """One input with another last dim, with more dims, or longer."""
    if m := re.search(r"expected input with shape \[\*, (\d+)\], but got input of size\[([\d, ]+)\]", text):
        shape = tuple(int(n) for n in m[2].split(","))
        yield from ((n, random(*shape[:-1], int(m[1]))) for n, v in _floats(given) if v.shape == shape)
    if m := re.search(r"expected input\[1, (\d+), (\d+)\] to have 1 channels, but got \1 channels", text):
        yield from ((n, v[:, None]) for n, v in _floats(given) if v.shape == (int(m[1]), int(m[2])))
    if m := re.search(r"not enough values to unpack \(expected (\d+), got (\d+)\)", text):
        ones = [1] * (int(m[1]) - int(m[2]))
        yield from ((n, random(len(v), *ones, *v.shape[1:])) for n, v in _floats(given) if v.dim() == int(m[2]))
    if "Kernel size can't be greater than actual input size" in text:
        m = re.search(r"per channel: \((\d+)\). Kernel size: \((\d+)\)", text)
        by = -(-int(m[2]) // int(m[1])) if m and int(m[1]) else 1
        longer = {n: max(LONG, by * v.shape[-1]) for n, v in _floats(given)}
        yield from (
            (n, random(*v.shape[:-1], longer[n])) for n, v in _floats(given) if v.shape[-1] < longer[n] <= LONGEST
        )


def _placed(given: Given, features: int, places: int, words: Callable[..., Tensor]) -> Iterator[Given]:
    """Longer texts, and a mask that has as many places among their words as there are features."""
    for name, value in given.items():
        if "mask" in name and isinstance(value, Tensor) and value.dim() == 2 and int(value.sum()) == places:
            rows, length = value.shape
            if features % rows:
                continue
            mask = torch.zeros(rows, length + features // rows, dtype=value.dtype)
            mask[:, 1 : 1 + features // rows] = 1
            longer = _together(given | {n: words(mask.shape[1]) for n, _ in _texts(given)}, length, mask.shape[1])
            yield longer | {name: mask}


def _sizes(text: str) -> Iterator[tuple[int, int]]:
    """``(had, wanted)`` of the errors that name both."""
    if m := re.search(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", text):
        yield int(m[1]), int(m[2])
    if m := re.search(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", text):
        yield int(m[1]), int(m[2])
    if m := re.search(r"except in dimension \d+. Expected size (\d+) but got size (\d+)", text):
        yield from ((int(m[1]), int(m[2])), (int(m[2]), int(m[1])))
    if m := re.search(r"length (\d+), but (?:found|got) (\d+)", text):
        yield int(m[2]), int(m[1])
    if m := re.search(r"multiple of .*?(\d+)\)?,? but got (\d+)", text):
        yield int(m[2]), _up(int(m[2]), int(m[1]))
    if m := re.search(r"length (\d+) is not a multiple of (\d+)", text):
        yield int(m[1]), _up(int(m[1]), int(m[2]))
    if m := re.search(r"to have (\d+) channels, but got (\d+) channels", text):
        yield int(m[2]), int(m[1])


def _scales(text: str) -> Iterator[tuple[float, float]]:
    """By how much images should be higher and wider."""
    if re.search(r"[Ii]mage size \S+ is too small", text):
        yield 4, 4
    if m := re.search(r"image size \((\d+)\*(\d+)\) doesn't match model \((\d+)\*(\d+)\)", text):
        yield int(m[3]) / int(m[1]), int(m[4]) / int(m[2])
    if m := re.search(r"(?:height|width) \((\d+)\) doesn't match model \((\d+)\)", text):
        yield int(m[2]) / int(m[1]), int(m[2]) / int(m[1])


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _together(given: Given, had: int, wanted: int) -> Given:
    """With the masks over what was resized as long as that."""
    out = dict(given)
    for name, value in given.items():
        if "mask" in name and isinstance(value, Tensor) and value.shape[1:] == (had,):
            out[name] = torch.ones(value.shape[0], wanted, dtype=value.dtype)
    return out


def _floats(given: Given) -> list[tuple[str, Tensor]]:
    return [(n, v) for n, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()]


def _texts(given: Given) -> list[tuple[str, Tensor]]:
    return [(n, v) for n, v in given.items() if n.endswith("input_ids")]
