"""What a docstring of transformers says of a forward's arguments: the type and the shape of each.

``pixel_values (`torch.FloatTensor` of shape `(batch_size, num_channels, image_size, image_size)`)`` is enough to make
one: names of dims are mostly names of numbers of the config, and the others stand for how much there is of something.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BATCH, LENGTH, OTHER_LENGTH = 2, 13, 7
"""Primes, and unequal, so that no size of an input is equal to another by chance."""
DETAIL = (1, 4, 16, 64)
"""Sides of squares that are alike in an image, in pixels."""
FEW = 3
"""How many there are of what has no number in the config."""

_ARGUMENT = re.compile(r"^\s*(\w+) \([`']*(?:\w+\.)?(\w+)[`']*[^\n]*? of shape [`']*\((.*?)\)[`']*[,)\s]", re.M)
_OTHER_LENGTHS = re.compile(r"target|decoder|canvas|prediction")
_LENGTHS = re.compile(r"(seq|length|num_latents|time_steps)")
_ALIASES = {
    "channels": ("num_channels", "in_channels", "in_chans"),
    "num_channels": ("in_channels", "in_chans"),
    "image_channels": ("num_channels",),
    "patch_height": ("patch_size",),
    "patch_width": ("patch_size",),
    "hidden_dim": ("hidden_size", "d_model"),
    "hidden_size": ("d_model", "n_embd", "dim"),
    "embedding_dim": ("speaker_embedding_dim", "hidden_size"),
    "latent_dim": ("vae_dim", "hidden_size"),
    "max_num_images": ("num_images",),
    "max_image_tiles": ("max_num_tiles",),
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a forward."""

    name: str
    dims: tuple[str, ...] = ()
    """As they are written; empty where none is documented."""
    kind: str = ""
    """``LongTensor``, ``FloatTensor``, ...; empty where nothing is documented."""
    required: bool = False


def arguments(forward: Any, *others: Any) -> dict[str, Argument]:
    """The arguments of a forward, each with what its docstring says of it, or else those of ``others``."""
    found: dict[str, tuple[str, str]] = {}
    for method in (forward, *others):
        for m in _ARGUMENT.finditer(method.__doc__ or ""):
            found.setdefault(m.group(1), (m.group(2), m.group(3)))
    out = {}
    for name, p in inspect.signature(forward).parameters.items():
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        kind, dims = found.get(name, ("", ""))
        split = tuple(d.strip() for d in dims.replace("{0}", "batch_size, sequence_length").split(",") if d.strip())
        out[name] = Argument(name, split, kind, p.default is p.empty)
    return out


def example(argument: Argument, config: Any) -> Tensor | None:
    """A tensor as documented; None where no shape is, or one that cannot be understood."""
    if not argument.dims:
        return None
    sizes = [size_of(dim, config) for dim in argument.dims]
    if any(size is None or size > 1 << 16 for size in sizes):
        return None
    return filled(argument.name, argument.kind, tuple(s for s in sizes if s is not None))


def filled(name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers of a kind: ones in a mask, zeros where they would number something, random ones else.

    Places are in order.
    """
    whole = kind in ("LongTensor", "IntTensor", "BoolTensor", "long", "int") or re.search(r"(^|_)(ids|grids?)$", name)
    if "mask" in name:
        dtype = torch.float if kind == "FloatTensor" else torch.bool if kind == "BoolTensor" else torch.long
        return torch.ones(shape, dtype=dtype)
    if name == "position_ids":
        return torch.arange(shape[-1]).expand(shape).clone()
    if whole:
        return torch.zeros(shape, dtype=torch.bool if kind == "BoolTensor" else torch.long)
    return random(*shape)


def size_of(dim: str, config: Any) -> int | None:
    """The size of a dim by its name, or by a formula of names: ``num_channels * patch_size * patch_size``."""
    text = re.sub(r"(\w+?)_? x ", r"\1 * ", dim.split("=")[0].strip())
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return FEW
    return _evaluated(tree, config)


def _evaluated(tree: ast.expr, config: Any) -> int | None:
    match tree:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return _named(name, config)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluated(left, config), _evaluated(right, config)
            if a is None or b is None:
                return None
            part = a // (b or 1)
            return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b, ast.FloorDiv: part, ast.Div: part}.get(type(op))
    return None


def _named(name: str, config: Any) -> int | None:
    if name in ("batch_size", "batch", "bs", "total_classes", "num_images", "num_videos", "num_images_or_videos"):
        return BATCH
    if name in ("image_size", "frame_size", "crop_size") or (name in ("height", "width") and not size_in(config, name)):
        return square(config)[name == "width"]
    for known in (name, *_ALIASES.get(name, ())):
        if size := size_in(config, known):
            return size
    if _OTHER_LENGTHS.search(name):
        return OTHER_LENGTH
    return LENGTH if _LENGTHS.search(name) else FEW


# -- numbers of a config ----------------------------------------------------------------------------------------


def parts(config: Any) -> Iterator[Any]:
    """A config and all in it, the outer ones first."""
    level = [config]
    while level:
        yield from level
        level = [v for part in level for v in vars(part).values() if hasattr(v, "to_dict") and hasattr(v, "__dict__")]


def text_part(config: Any) -> Any:
    """The part of a config that is of words; the config itself where there is none, or more than one."""
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):
        return config


def entry(config: Any, name: str) -> Any:
    """An attribute of a config; None where it has none, or another one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises one of its own kind where layers differ
        return None


def value_in(config: Any, name: str) -> Any:
    """An entry of the config, or of the first of its parts that has it."""
    return next((v for part in parts(config) if (v := entry(part, name)) is not None), None)


def size_in(config: Any, name: str) -> int | None:
    """A positive integer of the config, or of the first of its parts that has one of that name."""
    found = (entry(part, name) for part in parts(config))
    return next((v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


SIDES = ("image_size", "img_size", "input_size", "crop_size", "max_img_size")
"""What configs call the sides of images."""


def square(config: Any) -> tuple[int, int]:
    """Height and width of images."""
    size = next((v for name in SIDES if (v := value_in(config, name))), None)
    if isinstance(size, Mapping):
        return int(size.get("height", 224)), int(size.get("width", 224))
    if isinstance(size, list | tuple) and len(size) >= 2:
        return int(size[-2]), int(size[-1])
    side = size[0] if isinstance(size, list | tuple) and size else size
    return (side, side) if isinstance(side, int) else (224, 224)


def random(*shape: int) -> Tensor:
    """Seeded numbers between zero and one, or those of an image or a sound where the last two dims are that large.

    These have mean zero and deviation one, as processors make them, and detail of every size.  What is random from one
    pixel to the next averages out in deep layers: their norms divide by what is left of it, and make much of rounding.
    """
    seeded = torch.Generator().manual_seed(0)
    if max(shape[-2:], default=0) < 2 * DETAIL[2]:
        return torch.rand(shape, generator=seeded)
    sizes = [size for size in DETAIL if 2 * size <= max(shape[-2:])]
    drawn = torch.zeros(shape)
    for size in sizes:
        coarse = torch.rand([*shape[:-2], *(-(-n // size) for n in shape[-2:])], generator=seeded)
        for dim, n in list(enumerate(shape))[-2:]:
            coarse = coarse.repeat_interleave(size, dim).narrow(dim, 0, n)
        drawn += coarse - 0.5
    return drawn.mul_((12 / len(sizes)) ** 0.5)
