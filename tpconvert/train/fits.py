"""Whether the data is such as the model can take; said with the numbers before training begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpconvert.errors import ConfigError
from tpconvert.spec.plan import Plan
from tpconvert.train.config import Config
from tpconvert.train.text import Tokens
from tpconvert.train.tokenizer import Tokenizer


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
    words, places = max(cut, default=held.get("vocab_size")), held.get("max_position_embeddings")
    return Limits(
        words if isinstance(words, int) else None, places if isinstance(places, int) and places > 0 else None, classes
    )


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
                f"{key} {length} is more than the {has.places} positions of the model "
                "(max_position_embeddings in its config.json)."
            )
    if has.classes is not None and tokens.largest_label >= has.classes:
        raise ConfigError(
            f"The labels go up to {tokens.largest_label}, but the model has {has.classes} classes "
            f"(0 to {has.classes - 1}).",
            hint="Shard a model whose config.json has num_labels for them.",
        )
