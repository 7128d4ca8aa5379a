"""Whether the data is such as the model can take; said with the numbers before training begins."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpconvert.errors import ConfigError
from tpconvert.spec.plan import Plan
from tpconvert.train.examples.text import Tokens
from tpconvert.train.examples.tokenizer import Tokenizer
from tpconvert.train.settings.config import Config


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model has, where that is known."""

    words: int | None = None
    places: int | None = None
    classes: int | None = None


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a Hugging Face model in a folder; empty where there is none."""
    try:
        held = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def limits(held: Mapping[str, Any], plan: Plan) -> Limits:
    """What the plan or the configuration of the model says."""
    classes = len(held["id2label"]) if held.get("id2label") else 2 if held else None  # 2 is not written down
    held = {**held, **(held.get("text_config") or {})}
    cut = [axis.size for axis in plan.axes if axis.pattern == "vocabulary"]
    words, places = max(cut, default=_under(held, "vocab_size")), _under(held, "max_position_embeddings")
    return Limits(
        words if isinstance(words, int) else None, places if isinstance(places, int) and places > 0 else None, classes
    )


def _under(held: Mapping[str, Any], name: str) -> Any:
    """What a configuration has under a name, or under what transformers says that its kind of model calls it."""
    if name in held or "model_type" not in held:
        return held.get(name)
    from transformers import CONFIG_MAPPING

    kind = held["model_type"]
    return held.get(CONFIG_MAPPING[kind].attribute_map.get(name, name)) if kind in CONFIG_MAPPING else None


def cut_off(config: Config, tokens: Tokens, tokenizer: Tokenizer) -> Iterator[str]:
    """What is said of examples that are longer than there is room for; packed ones go on in the next sequence."""
    data, seq_len = config.data, config.training.seq_len
    if data.pack and data.objective in ("causal", "masked"):
        return
    around = 0 if data.objective == "causal" else sum(map(len, tokenizer.frame))
    room = {"training.seq_len": (tokens.starts, seq_len)}
    if "target" in tokens.more:
        room["data.target_len"] = tokens.more["target"].starts, data.target_len or seq_len
    for key, (starts, most) in room.items():
        lengths = np.diff(starts) + around
        if "pair" in tokens.more:
            lengths = np.diff(starts) + np.diff(tokens.more["pair"].starts) + sum(map(len, tokenizer.joint.around))
        longer = int((lengths > most).sum())
        if longer:
            yield f"{longer:,} of {len(starts) - 1:,} examples are longer than {key} {most} and cut off"


def check_fits(config: Config, tokens: Tokens, tokenizer: Tokenizer, has: Limits) -> None:
    """Raise where the model has too few words, places or classes for the examples."""
    masked = config.data.objective == "masked"
    largest = max(tokens.largest, tokenizer.size - 1 if masked else 0)
    if has.words is not None and largest >= has.words:
        raise ConfigError(
            f"The tokens go up to {largest}, but the model has {has.words} words (0 to {has.words - 1}).",
            hint="Set data.tokenizer to the one the model was made with.",
        )
    target = config.data.target_len if config.data.objective == "seq2seq" else None
    for key, length in (("training.seq_len", config.training.seq_len), ("data.target_len", target or 0)):
        if has.places is not None and length > has.places:
            raise ConfigError(
                f"{key} {length} is more than the {has.places} positions of the model, as its config.json says."
            )
    if has.classes is not None and tokens.largest_label >= has.classes:
        raise ConfigError(
            f"The labels go up to {tokens.largest_label}, but the model has {has.classes} classes "
            f"(0 to {has.classes - 1}).",
            hint="Shard a model whose config.json has num_labels for them.",
        )
