"""A small configuration by the names of its numbers: what is tried where a twin is too slow or too large to check.

A twin keeps the head counts and learns what each number does from the modules it gives.  Here names are believed, head
counts become few, and a forward that runs is the only proof.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

VOCABULARY, LAYERS, EXPERTS = 512, 2, 8
EXPERT_WIDTH = 96
"""What widths of experts are multiples of: grouped kernels ask for multiples of 8 on each of 2, 3 and 4 ranks."""
KERNEL = 16
"""What those kernels ask of a model's own width too."""
CHUNK, LONGEST_CHUNK = 16, 4096
"""Places that a scan takes at a time; it fills its last chunk, and keeps the square of it for every head.

Longer ones are pieces of a sound, not of a scan.
"""
SIDE = 128
"""An input size below this is no side of an image: it counts the bins of a sound."""
FRAMES = 8
CONTEXT = 256
"""Times that a forecast looks back to, to which shorter ones are padded."""
MANY_LAYERS = 16
MAIN = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
GROUPS = {"n_group": 2, "topk_group": 1}

_LAYERS = re.compile(r"(^|_)(n_?layers?|num_\w*layers?|layers|num_\w*blocks|n_blocks|depths?)$")
_HEADS = re.compile(r"(^|_)(n_?heads?|num_heads|num_\w*heads|\w*attention_heads|\w*kv_heads|\w*groups_heads)$")
_EXPERTS = re.compile(r"(^|_)(num|n|routed|local)_?\w*experts$")
_CHOSEN = re.compile(r"experts_per_tok|experts_per_token|moe_k$|moe_top_?k|^top_k$|num_selected")
_WIDTHS = re.compile(
    r"(^|_)(dim|dims|width|rank|d_model|d_ff|d_kv|n_embd|n_inner|d_inner|inner|ffn|d_head)$"
    r"|(hidden|intermediate|head|embedding|projection|attention|ffn|mlp|embed|inner|key|value|rope|nope)_?(size|dim|channels)$"
    r"|channels$|out_channel$|_features$|groups$|_filters$|dim_per_stage$|channel_list$|pos_feats$"
)
_HEAD_WIDTHS = re.compile(r"(^|_)(d_kv|d_head|head_dim|head_size|nope_dim|rope_dim|kv_channels)$")
_EXPERT_WIDTHS = re.compile(r"(moe|expert).*(size|dim)$")
_TAPS = re.compile(r"out_indices$|deepstack|extract_layers|intermediate_\w*indices|feature_layers?$|target_layer")
_SIDES = ("image_embedding_size", "image_size", "input_size", "img_size", "crop_size", "max_img_size")
_MARGINS = ("visual_prompt_size",)
_SOME = re.compile(r"(layers|layer_ids|indexes|indices)$")
_NOT_WIDTHS = re.compile(
    r"vocab|patch|image|window|pos_emb|num_channels|(?<!stage_)(in|out)_channels|mel|^num_features|type|in_dim$|input_dim$"
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """How much smaller a configuration is made."""

    width: int
    """What widths are divided by."""
    heads: int
    """What counts of heads are divided by; the widths of heads by what is left."""
    image: int
    """What the sides of images are divided by."""
    fewer: bool = True
    """Whether layers become fewer."""

    @property
    def narrower(self) -> int:
        """What the widths of heads are divided by."""
        return self.width // self.heads


ATTEMPTS = (
    Attempt(16, 4, 4),
    Attempt(8, 8, 1),
    Attempt(16, 4, 1, fewer=False),
    Attempt(16, 16, 1),
    *(Attempt(width, 1, 1) for width in (8, 4, 2, 1)),
    *(Attempt(width, heads, 2) for width, heads in ((16, 4), (1, 1))),
    Attempt(16, 16, 4),
    Attempt(8, 8, 1, fewer=False),
)


def small(config: Any, attempt: Attempt) -> Any:
    """A copy of a configuration, and of those in it, made smaller."""
    copy = deepcopy(config)
    for part in _parts(copy):
        _shrink(part, attempt)
    return copy


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _shrink(config: Any, attempt: Attempt) -> None:
    values = {k: v for k, v in vars(config).items() if not k.startswith("_") or k == "_out_indices"}
    staged = any(isinstance(values.get(k), list | tuple) for k in ("depths", "depth"))
    named = (v for k, v in values.items() if k in MAIN)
    listed = {len(v) for v in values.values() if isinstance(v, list | tuple)}
    layers = 0 if staged else next(named, 0)
    few = _few_layers(values, layers) if attempt.fewer else MANY_LAYERS
    marks = iter(range(VOCABULARY - 1, 0, -1))
    experts = any(_EXPERTS.search(k) and type(v) is int and v > 1 for k, v in values.items())
    standard = {own: name for name, own in getattr(config, "attribute_map", {}).items()}
    for name, value in values.items():
        if name.startswith("_"):
            continue
        new = _smaller(name, value, attempt, few, marks)
        if new is value and name in standard:
            new = _smaller(standard[name], value, attempt, few, marks)
        if experts and _is_width(name) and type(new) is int and value % KERNEL == 0 and new % KERNEL:
            new = -(-new // EXPERT_WIDTH) * EXPERT_WIDTH
        if _LAYERS.search(name) and type(value) is int and value in listed and (staged or name not in MAIN):
            continue  # what it counts is listed one by one, and the last of a list is often read
        if isinstance(value, list | tuple) and isinstance(layers, int) and len(value) == layers > few:
            new = value[:few]
        elif _TAPS.search(name) and _places(value):
            new = type(value)(_last(list(value), layers or 0, few))
        elif _TAPS.search(name) and isinstance(value, list | tuple) and _places(value[::-1]) and max(value) >= few:
            new = type(value)(_last(list(value[::-1]), layers or 0, few)[::-1])
        elif _SOME.search(name) and _places(value) and max(value) >= few:
            new = type(value)([v for v in value if v < few] or [few - 1])
        if new is not value:
            try:
                setattr(config, name, new)
            except Exception:  # a property without a setter follows what it is computed from
                continue
    if layers and layers > few:
        _keep_features(config, layers, few)


def _places(value: Any) -> bool:
    """Whether a value is a list of places among layers: integers that go up."""
    if not isinstance(value, list | tuple) or not value or any(type(v) is not int for v in value):
        return False
    return all(a < b for a, b in pairwise(value))


def _last(places: list[int], layers: int, few: int) -> list[int]:
    """As many places among fewer layers: the last ones, counted from one where the old ones were."""
    from_one = max(places) >= layers > 0
    return [few - len(places) + i + from_one for i in range(len(places))]


def _keep_features(config: Any, layers: int, few: int) -> None:
    """Fewer stages of a backbone, with as many of them given out."""
    stages, given = getattr(config, "stage_names", None), getattr(config, "_out_indices", None)
    if not isinstance(stages, list) or len(stages) != layers + 1:
        return
    config.stage_names = stages[: few + 1]
    if given:
        config._out_indices = _last([i % len(stages) for i in given], 0, few + 1)  # the stem is the first stage
        config._out_features = [config.stage_names[i] for i in config._out_indices]


def _few_layers(values: dict[str, Any], layers: Any) -> int:
    """The number of layers that keeps every kind that the lists with an entry a layer name."""
    few = LAYERS
    for value in values.values():
        if isinstance(value, list | tuple) and value and len(value) == layers:
            first: dict[str, int] = {}
            for i, kind in enumerate(value):
                first.setdefault(str(kind), i)
            if len(first) < layers:
                few = max(few, max(first.values()) + 1)
    taps = [v for k, v in values.items() if _TAPS.search(k) and _places(v)]
    return min(max([few, *map(len, taps)]), layers) if isinstance(layers, int) and layers else few


def _smaller(name: str, value: Any, attempt: Attempt, few: int, marks: Iterator[int]) -> Any:
    if isinstance(value, dict) and "rope" in name:
        return {k: _smaller(k, v, attempt, few, marks) for k, v in value.items()}
    if name.endswith("_section") and isinstance(value, list | tuple):
        return type(value)(v // attempt.narrower for v in value)
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        return type(value)(_smaller(name, v, attempt, few, marks) for v in value)
    if name.endswith(("feature_sizes", "grid_pinpoints")) and isinstance(value, list | tuple):
        return [[max(side // attempt.image, 1) for side in sides] for sides in value]
    if value is None and re.fullmatch(r"(image|video|audio)_token_(id|index)", name):
        return next(marks)
    if type(value) is not int:
        return value
    if name.endswith(("token_id", "token_ids", "token_index")):
        return next(marks) if value >= VOCABULARY else value
    if name.endswith("chunk_size"):
        return min(value, CHUNK) if value <= LONGEST_CHUNK else value
    if name.endswith("layer_id"):
        return min(value, few - 1)
    if "vocab_size" in name or name.endswith("_vocab"):
        return min(value, VOCABULARY)
    if name in GROUPS:
        return min(value, GROUPS[name])
    if name == "context_length":
        return min(value, CONTEXT)
    if name in _MARGINS or (name in _SIDES and (name != "input_size" or value >= SIDE)):
        return value // attempt.image if value % attempt.image == 0 and value // attempt.image >= 16 else value
    if name in ("frames_per_clip", "num_frames"):
        return min(value, FRAMES)
    if _HEAD_WIDTHS.search(name):
        return value // attempt.narrower if value % attempt.narrower == 0 and value // attempt.narrower >= 2 else value
    if _EXPERTS.search(name):
        return min(value, EXPERTS)
    if _CHOSEN.search(name):
        return min(value, 2)
    if _HEADS.search(name):
        return _few_heads(value, attempt.heads)
    if _LAYERS.search(name):
        return min(value, few)
    if name.startswith(("first_k_dense", "n_dense", "num_dense", "moe_layer_start")):
        return min(value, 1)
    if _is_width(name) and value % attempt.width == 0:
        smaller = max(value // attempt.width, 1) if value >= 16 else value
        return -(-smaller // EXPERT_WIDTH) * EXPERT_WIDTH if _EXPERT_WIDTHS.search(name) else smaller
    return value


def _is_width(name: str) -> bool:
    heads = _HEADS.search(name) or _HEAD_WIDTHS.search(name)
    return bool(_WIDTHS.search(name)) and not _NOT_WIDTHS.search(name) and not heads


def _few_heads(count: int, by: int) -> int:
    """Fewer heads, so that attention stays as wide as the model; few heads, as shared keys are, stay."""
    return next((count // n for n in (by, 4, 2) if n <= by and count % n == 0 and count >= 2 * n), count)
