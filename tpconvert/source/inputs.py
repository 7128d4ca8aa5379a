"""Example inputs for a transformers model, from the signature of its forward and the sizes in its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.errors import SourceError

BATCH, LENGTH, OTHER_LENGTH = 2, 13, 7
"""Primes, and unequal, so that no size of an input is equal to another by chance."""

_WIDEST = 1000
"""Word ids are drawn below this."""


def example_inputs(module: nn.Module, config: Any) -> dict[str, Any]:
    """Keyword arguments that the module's forward accepts, the first of :func:`candidates`."""
    return next(candidates(module, config))


def candidates(module: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Keyword arguments worth trying, the likeliest first.

    What an audio or video model calls its input says nothing of the order of its dims, so there is more than one.
    """
    signature = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", "input_ids")
    for value in _main_values(main, module, config):
        inputs = {main: value} | _companions(signature, main, value, config)
        missing = [
            name
            for name, p in signature.items()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and name not in inputs
        ]
        if missing:
            raise SourceError(
                f"{type(module).__name__}: no example is known for the input {missing[0]!r} of its forward.",
                hint="Name a function instead, file.py:function, that returns (module, inputs).",
            )
        yield inputs


def _companions(signature: Any, main: str, value: Tensor, config: Any) -> dict[str, Any]:
    """What goes along with the main input."""
    out: dict[str, Any] = {}
    if main == "input_ids":
        if "attention_mask" in signature:
            out["attention_mask"] = torch.ones_like(value)
        if "pixel_values" in signature and signature["pixel_values"].default is inspect.Parameter.empty:
            out["pixel_values"] = next(_images(config))
    elif "input_ids" in signature and signature["input_ids"].default is inspect.Parameter.empty:
        out["input_ids"] = _ids(config, LENGTH)
    if "decoder_input_ids" in signature and getattr(config, "is_encoder_decoder", False):
        out["decoder_input_ids"] = _ids(config, OTHER_LENGTH)
    if "use_cache" in signature:
        out["use_cache"] = False
    return out


def _main_values(main: str, module: nn.Module, config: Any) -> Iterator[Tensor]:
    if main == "input_ids":
        yield _ids(config, LENGTH)
    elif main in _MAKERS:
        yield from _MAKERS[main](config)
    else:
        raise SourceError(
            f"{type(module).__name__}: no example is known for its main input {main!r}.",
            hint="Name a function instead, file.py:function, that returns (module, inputs).",
        )


def _ids(config: Any, length: int) -> Tensor:
    """Word ids below the vocabulary's end; none is a special one, which would turn on special code."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = min(_size(text, "vocab_size") or _size(config, "vocab_size") or _WIDEST, _WIDEST)
    special = {v for k, v in (vars(config) | vars(text)).items() if k.endswith("_id") and isinstance(v, int)}
    free = torch.tensor([i for i in range(vocabulary) if i not in special] or [0])
    return free[torch.randint(len(free), (BATCH, length), generator=_seeded())]


def _images(config: Any) -> Iterator[Tensor]:
    yield _rand(BATCH, _size(config, "num_channels") or 3, *_square(config))


def _videos(config: Any) -> Iterator[Tensor]:
    frames = _size(config, "num_frames") or _size(config, "frames_per_clip") or 4
    yield _rand(BATCH, frames, _size(config, "num_channels") or 3, *_square(config))


def _spectra(config: Any) -> Iterator[Tensor]:
    bins = next((n for name in _BINS if (n := _size(config, name))), 80)
    frames = 2 * (_size(config, "max_source_positions") or 32)
    yield _rand(BATCH, bins, frames)
    yield _rand(BATCH, 67, bins)


def _waves(config: Any) -> Iterator[Tensor]:
    yield _rand(BATCH, 4001)
    yield _rand(BATCH, 1, 4800)
    yield _rand(BATCH, _size(config, "max_length") or 67, _size(config, "num_mel_bins") or 128)


_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "num_mels")

_MAKERS: dict[str, Callable[[Any], Iterator[Tensor]]] = {
    "pixel_values": _images,
    "pixel_values_videos": _videos,
    "input_features": _spectra,
    "input_values": _waves,
}


def _square(config: Any) -> tuple[int, int]:
    size = _value(config, "image_size")
    if isinstance(size, list | tuple) and len(size) >= 2:
        return int(size[-2]), int(size[-1])
    side = size[0] if isinstance(size, list | tuple) and size else size
    return (side, side) if isinstance(side, int) else (224, 224)


def _size(config: Any, name: str) -> int | None:
    value = _value(config, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _value(config: Any, name: str) -> Any:
    """An entry of the config, or of the first of its parts that has it."""
    value = getattr(config, name, None)
    if value is not None:
        return value
    parts = (part for part in vars(config).values() if hasattr(part, "to_dict"))
    return next((v for part in parts if (v := getattr(part, name, None)) is not None), None)


def _rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_seeded())


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
