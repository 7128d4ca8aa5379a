"""Images and sounds as the processors that transformers has for a model type lay them out.

Some models take patches in rows of their own, tables of which patches are pooled, or how many tiles an image has; their
processor makes all of that of plain images or waves.  Its own numbers are those of the full-size model: those that the
config has too are taken from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tpconvert.source.inputs.documented import BATCH, SIDES, entry, parts, random, size_in, square, value_in

Given = dict[str, Any]
LENGTHS = (4800, 32000)
"""Samples of a sound, the short one first."""
AREA = 4096
"""A longest side above this counts the pixels of an image."""
_OTHERWISE = {
    "merge_size": ("spatial_merge_size",),
    "feature_size": ("num_mel_bins", "input_feat_per_channel", "input_feat_size"),
    "max_image_tiles": ("max_num_tiles",),
}
"""What numbers of processors are called in configs, where it is something else."""
_AS_CONFIGURED = (
    *("patch_size", "merge_size", "temporal_patch_size", "feature_size", "num_mel_bins"),
    *("max_image_tiles", "image_grid_pinpoints"),
)
_MANY = re.compile(r"^(max|min)_(\w+_)?patches$")
_TILED = ("do_image_splitting", "crop_to_patches", "slice_mode")
"""Switches without which an image is one tile."""
FEW_PATCHES = 16


def processed(config: Any) -> Iterator[Given]:
    """All that the processors of a config's model type make of small images, then of short sounds."""
    kind = str(getattr(config, "model_type", ""))
    for make in (_image_processor, _feature_extractor):
        try:
            yield from make(kind, config)
        except Exception:  # a package that it needs is missing, or it needs more than numbers
            continue


def _image_processor(kind: str, config: Any) -> Iterator[Given]:
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    named = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind)
    names = [n for n in named.values() if n] if isinstance(named, Mapping) else [named] if named else []
    processor = _first(names)
    if processor is None:
        return
    seeing = next((part for part in parts(config) if entry(part, "patch_size") is not None), config)
    _fitted(processor, seeing, config)
    height, width = square(seeing) if _sized(config) else (_side(seeing),) * 2
    light = random(BATCH, 3, height, width)
    light = (light - light.amin()) / (light.amax() - light.amin())
    images = list((255 * light).to(torch.uint8))
    for batch in ([[image] for image in images], images):
        yield from _tried(lambda: processor(images=batch, return_tensors="pt"))  # noqa: B023


def _feature_extractor(kind: str, config: Any) -> Iterator[Given]:
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES

    named = FEATURE_EXTRACTOR_MAPPING_NAMES.get(kind)
    processor = _first([named] if named else [])
    if processor is None:
        return
    _fitted(processor, config, config)
    for length in LENGTHS:
        wave = random(length).numpy()
        rate = processor.sampling_rate
        yield from _tried(lambda: processor([wave] * BATCH, sampling_rate=rate, return_tensors="pt"))  # noqa: B023


def _first(names: list[str]) -> Any:
    """The first of some processors that can be made, with the numbers of the full-size model."""
    import transformers

    for name in names:
        try:
            return getattr(transformers, name)()
        except Exception:  # each needs a package of its own
            continue
    return None


def _tried(make: Callable[[], Any]) -> Iterator[Given]:
    try:
        made = make()
    except Exception:  # not the form in which it takes images
        return
    yield {n: v for n, v in made.items() if isinstance(v, Tensor)}


def _fitted(processor: Any, seeing: Any, config: Any) -> None:
    """Give a processor the numbers that the config has too, the sides of its images, and few tiles and patches."""
    for name in _AS_CONFIGURED:
        known = (name, *_OTHERWISE.get(name, ()))
        found = next((v for part in (seeing, config) for k in known if (v := _value(part, k)) is not None), None)
        if found is not None and type(found) is type(getattr(processor, name, None)):
            setattr(processor, name, found)
    for name, value in ((n, getattr(processor, n)) for n in dir(processor) if not n.startswith("_")):
        if type(value) is int and _MANY.search(name):
            setattr(processor, name, min(value, FEW_PATCHES))
        elif value is True and name in _TILED:
            setattr(processor, name, False)
    if _sized(config):
        height, width = square(seeing)
        for name in ("size", "crop_size", "max_image_size"):
            held = getattr(processor, name, None)
            if held is not None and not isinstance(held, int):
                sides = held if isinstance(held, Mapping) else vars(held)
                setattr(processor, name, type(held)(**_sides(sides, height, width)))


def _sized(config: Any) -> bool:
    """Whether the config says how large images are."""
    return any(value_in(config, name) is not None for name in SIDES)


def _side(seeing: Any) -> int:
    """The side of images of a few patches, also where these are merged."""
    return 2 * (size_in(seeing, "patch_size") or 16) * (size_in(seeing, "spatial_merge_size") or 1)


def _value(part: Any, name: str) -> Any:
    return size_in(part, name) or value_in(part, name)


def _sides(held: Mapping[str, Any], height: int, width: int) -> dict[str, Any]:
    sides = {"height": height, "width": width, "shortest_edge": min(height, width), "longest_edge": max(height, width)}
    areas = {"shortest_edge": height * width, "longest_edge": height * width}
    return {k: areas.get(k, v) if v > AREA else sides.get(k, v) for k, v in held.items() if isinstance(v, int)}
