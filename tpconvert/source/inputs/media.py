"""Images, videos and sounds in the forms in which the models of transformers take them.

A name says what an input is, not how its dims are laid out, and what must go along with it - a grid of patches, the
sizes of images, masks - has to agree with it.  So each function gives several sets of arguments, the usual one first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from tpconvert.source.inputs.documented import BATCH, parts, random, size_in, size_of, square

Given = dict[str, Any]

IMAGES, VIDEOS = "pixel_values", "pixel_values_videos"
SOUNDS = ("input_features", "input_values", "audio_mel")
PLACES = ("image_position_ids", "pixel_position_ids", "video_position_ids")
LARGEST = 2_000_000
"""Numbers in patches: more of them come of dims that are not those of a patch, and each forward takes seconds."""
_BINS = ("num_mel_bins", "input_feat_per_channel", "input_feat_size", "feature_size", "n_mels", "num_mels")


def images(name: str, names: set[str], config: Any, dims: tuple[str, ...] = ()) -> Iterator[Given]:
    """Images for the argument ``name`` of a forward that takes ``names``; ``dims`` are those that are documented."""
    seen = _seeing(config)
    grid = "video_grid_thw" if name == VIDEOS else "image_grid_thw"
    grids = [n for n in ("grid_thw", "image_grid_hw", grid) if n in names]
    if grids:
        yield from _patches_on_a_grid(name, grids[-1], names, config, dims)
    if names & {"spatial_shapes", *PLACES}:
        yield from (_patches_in_rows(name, names, config, side) for side in (_side(config), 4 * _side(config)))
    channels = _channels(seen)
    if "target_sizes" in names:
        yield _patches_side_by_side(name, config, channels)
    height, width = square(seen)
    if "image_sizes" in names and name == IMAGES:
        sizes = torch.tensor([[height, width]] * BATCH)
        yield {name: random(BATCH, channels, height, width), "image_sizes": sizes}
        for tiles in (3, 5, 2):
            yield {name: random(BATCH, tiles, channels, height, width), "image_sizes": sizes}
    if name != VIDEOS:
        yield {name: random(BATCH, channels, height, width)}
    for frames in dict.fromkeys((size_in(config, "num_frames") or size_in(config, "frames_per_clip") or 4, 2, 1)):
        yield {name: random(BATCH, frames, channels, height, width)}


def sounds(name: str, names: set[str], config: Any) -> Iterator[Given]:
    """Sounds for the argument ``name``: spectra or waves, with and without a mask over their time."""
    for given, time in _waves(name, config) if name == "input_values" else _spectra(name, config):
        yield given
        for mask in names & {f"{name}_mask", "feature_attention_mask", "padding_mask"}:
            yield given | {mask: torch.ones(BATCH, time, dtype=torch.bool)}


def _spectra(name: str, config: Any) -> Iterator[tuple[Given, int]]:
    bins = next((n for key in _BINS if (n := size_in(config, key))), 80)
    for frames in dict.fromkeys((128, 2 * (size_in(config, "max_source_positions") or 32))):
        yield {name: random(BATCH, bins, frames)}, frames
        yield {name: random(BATCH, frames + 3, bins)}, frames + 3
        yield {name: random(BATCH, frames, bins)}, frames
    yield {name: random(BATCH, 1, frames, bins)}, frames


def _waves(name: str, config: Any) -> Iterator[tuple[Given, int]]:
    yield {name: random(BATCH, 4001)}, 4001
    yield {name: random(BATCH, 4800)}, 4800
    yield {name: random(BATCH, 1, 4800)}, 4800
    time, bins = size_in(config, "max_length") or 67, size_in(config, "num_mel_bins") or 128
    yield {name: random(BATCH, time, bins)}, time


def _patches_on_a_grid(name: str, grid: str, names: set[str], config: Any, dims: tuple[str, ...]) -> Iterator[Given]:
    """All patches of all images in one row, and the grid of each image."""
    seen = _seeing(config)
    times, patch = size_in(seen, "temporal_patch_size") or 1, size_in(seen, "patch_size") or 14
    channels = _channels(seen)
    lengths = (2, 1) if name == VIDEOS else (1,)
    for side, frames in product((_side(config), 4 * _side(config)), lengths):
        shape = [side, side] if grid == "image_grid_hw" else [frames, side, side]
        given = {grid: torch.tensor([shape] * BATCH)}
        for merged in {"merge_sizes", grid.replace("grid_thw", "merge_sizes")} & names:
            given[merged] = torch.tensor([size_in(config, "spatial_merge_size") or 1] * BATCH)
        rows = BATCH * frames * side * side
        yield given | {name: random(rows, channels * times * patch * patch)}
        yield given | {name: random(rows, channels, patch, patch)}
        of_each = [size_of(dim, config) for dim in dims[1:]]
        if len(of_each) > 1 and all(of_each) and rows * prod(n for n in of_each if n) <= LARGEST:
            yield given | {name: random(rows, *(size for size in of_each if size))}


def _patches_in_rows(name: str, names: set[str], config: Any, side: int) -> Given:
    """The patches of each image in a row of their own, and where each of them is."""
    seen = _seeing(config)
    patch, channels = size_in(seen, "patch_size") or 14, _channels(seen)
    count = side * side
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(1, count, 2)
    given: Given = {name: random(BATCH, count, channels * patch * patch)}
    more: dict[str, Tensor] = {
        "spatial_shapes": torch.tensor([[side, side]] * BATCH),
        "pixel_attention_mask": torch.ones(BATCH, count, dtype=torch.long),
        **{n: places.repeat(BATCH, 1, 1) for n in PLACES},
    }
    return given | {n: v for n, v in more.items() if n in names}


def _patches_side_by_side(name: str, config: Any, channels: int) -> Given:
    """All patches of all images beside each other in one low image, and how many high and wide each image is."""
    side, patch = _side(config), size_in(_seeing(config), "patch_size") or 14
    sizes = torch.tensor([[side, side]] * BATCH)
    return {name: random(1, channels, patch, patch * BATCH * side * side), "target_sizes": sizes}


def _seeing(config: Any) -> Any:
    """The part of a config that is of a model that sees."""
    return next((part for part in parts(config) if getattr(part, "patch_size", None) is not None), config)


def _side(config: Any) -> int:
    """How many patches a small image has to a side: twice as many as are merged."""
    return 2 * (size_in(config, "spatial_merge_size") or size_in(config, "merge_size") or 2)


def _channels(config: Any) -> int:
    return next((n for name in ("num_channels", "in_channels", "in_chans") if (n := size_in(config, name))), 3)
