"""Which classes transformers has for a model type."""

from __future__ import annotations

import sys
from typing import Any

HEADS = (
    *("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM"),
    *("ZERO_SHOT_IMAGE_CLASSIFICATION", "MASK_GENERATION"),
    *("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION"),
    *("SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "DEPTH_ESTIMATION"),
    *("CTC", "AUDIO_CLASSIFICATION", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "QUESTION_ANSWERING"),
    *("TIME_SERIES_PREDICTION", "PRETRAINING"),
)
"""The heads to be tried, in order: those that use most of a model's parameters come first."""


def model_types() -> list[str]:
    """Every model type that has a configuration and a class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    named: set[str] = set()
    for mapping in _mappings():
        named |= set(mapping)
    return sorted(named & set(CONFIG_MAPPING_NAMES))


def class_names(model_type: str, *, pair: bool) -> list[str]:
    """The classes of a type, those of :data:`HEADS` first, then the bare model, then the rest.

    For a ``pair`` of encoder and decoder, those that have both come before those that are one of them.
    """
    auto = _auto()
    heads = sorted(HEADS, key=lambda head: "SEQ" not in head) if pair else HEADS
    first = [getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}) for head in heads]
    found: list[str] = []
    for mapping in [*first, auto.MODEL_MAPPING_NAMES, *_mappings()]:
        names = mapping.get(model_type, ())
        found += [names] if isinstance(names, str) else [n for n in names if n]
    return list(dict.fromkeys(found))


def _mappings() -> list[Any]:
    auto = _auto()
    names = (n for n in dir(auto) if n.startswith("MODEL_") and n.endswith("MAPPING_NAMES"))
    return [getattr(auto, n) for n in names]


def _auto() -> Any:
    import transformers.models.auto.modeling_auto  # noqa: F401

    return sys.modules["transformers.models.auto.modeling_auto"]
