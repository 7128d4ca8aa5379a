"""Example inputs for a transformers model, from the signature of its forward and the sizes in its config."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpconvert.analyze.copies import copied
from tpconvert.errors import SourceError

BATCH, LENGTH, OTHER_LENGTH = 2, 13, 7
"""Primes, and unequal, so that no size of an input is equal to another by chance."""

_WIDEST = 1000
"""Word ids are drawn below this."""


def example_inputs(module: nn.Module, config: Any) -> dict[str, Any]:
    """Keyword arguments for the module's forward: the first of :func:`candidates` that it runs on.

    A forward of nothing but words is not tried out; there is only one way to write those.
    """
    found = list(candidates(module, config))
    if len(found) > 1:
        skeleton = copied(module).to("meta")
        return next((inputs for inputs in found if _runs(skeleton, inputs)), found[0])
    return found[0]


def candidates(module: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Keyword arguments worth trying: with few inputs first, then with all that are known.

    What an audio or video model calls its input says nothing of the order of its dims, so there is more than one.
    """
    signature = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", "input_ids")
    required = {n for n, p in signature.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    unknown = sorted(({main} | required) - {"input_ids", "attention_mask", "decoder_input_ids", *_MAKERS})
    if unknown:
        raise SourceError(
            f"{type(module).__name__}: no example is known for the input {unknown[0]!r} of its forward.",
            hint="Name a function instead, file.py:function, that returns (module, inputs).",
        )
    known = [n for n in ("input_ids", *_MAKERS) if n in signature]
    few = {main} | required
    more = [few, few | {"input_ids"}, few | {"input_ids", "pixel_values"}, few | {"input_values"}, set(known)]
    for wanted in dict.fromkeys(tuple(n for n in known if n in names) for names in more):
        makers = [_MAKERS[name](config) if name in _MAKERS else iter([_ids(config, LENGTH)]) for name in wanted]
        for values in itertools.product(*makers):
            inputs = dict(zip(wanted, values, strict=True))
            yield inputs | _companions(signature, inputs, config)


def _companions(signature: Any, inputs: dict[str, Tensor], config: Any) -> dict[str, Any]:
    """What goes along with the inputs."""
    out: dict[str, Any] = {}
    if "input_ids" in inputs and "attention_mask" in signature:
        out["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "decoder_input_ids" in signature and getattr(config, "is_encoder_decoder", False):
        out["decoder_input_ids"] = _ids(config, OTHER_LENGTH)
    if "use_cache" in signature:
        out["use_cache"] = False
    return out


class _Answers(TorchFunctionMode):
    """Says yes, and one, where a forward on meta asks for a value: enough to see whether shapes fit."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__:
            return True
        if func in (Tensor.item, Tensor.__int__, Tensor.__index__):
            return 1
        return func(*args, **kwargs or {})


def _runs(skeleton: nn.Module, inputs: dict[str, Any]) -> bool:
    on_meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in inputs.items()}
    try:
        with torch.no_grad(), _Answers():
            skeleton(**on_meta)
    except Exception:  # whatever a forward raises on inputs it does not take
        return False
    return True


def _ids(config: Any, length: int) -> Tensor:
    """Word ids below the vocabulary's end; none is a special one, which would turn on special code."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = min(_size(text, "vocab_size") or _size(config, "vocab_size") or _WIDEST, _WIDEST)
    special = {v for k, v in (vars(config) | vars(text)).items() if k.endswith("_id") and isinstance(v, int)}
    free = torch.tensor([i for i in range(vocabulary) if i not in special] or [0])
    return free[torch.randint(len(free), (BATCH, length), generator=_seeded())]


def _images(config: Any) -> Iterator[Tensor]:
    channels = _size(config, "num_channels") or 3
    yield _rand(BATCH, channels, *_square(config))
    yield _rand(BATCH, _frames(config), channels, *_square(config))


def _videos(config: Any) -> Iterator[Tensor]:
    yield _rand(BATCH, _frames(config), _size(config, "num_channels") or 3, *_square(config))


def _boxes(config: Any) -> Iterator[Tensor]:
    yield torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)
    yield torch.zeros(BATCH, LENGTH, 4)


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
    "bbox": _boxes,
    "input_features": _spectra,
    "input_values": _waves,
}


def _frames(config: Any) -> int:
    return _size(config, "num_frames") or _size(config, "frames_per_clip") or 4


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
