"""A configuration that a model refuses, with the number it misses, or a size that it can divide.

Defaults of transformers are not always complete: a count may be None, an attribute that the model reads may be missing.
The message, and the line of the model's code that failed, say which.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.zoo.small import EXPERTS, LAYERS, VOCABULARY
from tpconvert.source.inputs.documented import entry, parts, text_part, value_in
from tpconvert.source.inputs.find import Search
from tpconvert.source.inputs.towers import KINDS

QUERIES = 8
PATCHES, TOKENS = 8, 16
"""Patches to a side of an image, and tokens for it, where fewer patches, or more tokens, do not fit its tower."""
ROTARY = 4
"""What widths of heads are multiples of, where they can be."""
FRAMES = 6
"""How many lines are looked at, the innermost first."""
_GUESSES: tuple[tuple[str, Any], ...] = (
    (r"dropout|drop_rate|_rate$|jitter|decay", 0.0),
    (r"vocab", VOCABULARY),
    (r"theta", 10000.0),
    (r"experts_per_tok|top_?k$|num_selected", 2),
    (r"experts$", EXPERTS),
    (r"layers$", LAYERS),
    (r"window|ratio|stride", 4),
    (r"length$", 4),
)
"""What a missing number is taken to be, by its name."""


def mend(config: Any, error: BaseException) -> bool:
    """Change the configuration, or one in it, by what an error says; whether there was anything to change."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error)
    if m := re.search(r"sum exactly to (\d+) .*split_sizes=\[([\d, ]+)\]", text):
        return _sections(config, int(m[1]), [int(n) for n in m[2].split(",")])
    if m := re.search(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", text):
        have, want = int(m[1]), int(m[2])
        return _resized(config, want, have) or _resized(config, have, want)
    if m := re.search(r"num_channels \((\d+)\) must be divisible by num_groups \((\d+)\)", text):
        return _resized(config, int(m[1]), -(-int(m[1]) // int(m[2])) * int(m[2]), every=True)
    if re.search(r"stride should not be zero|division by zero|shape '\[([-\d]+, )*0[,\]]", text):
        return _more_patches(config)
    if "selected index k out of range" in text:
        return _fewer_queries(config)
    if m := re.search(r"to have (\d+) channels, but got (\d+) channels", text):
        return _resized(config, int(m[1]), int(m[2]))
    if m := re.search(r"shape '\[((?:\d+, )+)(\d+)\]' is invalid for input of size (\d+)", text):
        rows = prod(int(n) for n in m[1].split(", ")[:-1])
        if rows and int(m[3]) % rows == 0 and _resized(config, int(m[3]) // rows, int(m[2])):
            return True
    if m := re.search(r"'(\w+)' object has no attribute '(\w+)'", text):
        for part in parts(config):
            if type(part).__name__ == m[1]:
                known = value_in(config, m[2])
                return _set(part, m[2], guess(part, m[2]) if known is None else known)
    for name in dict.fromkeys(_names(error)):
        for part in parts(config):
            if _absent(part, name):
                value = _kinds(part, name, error) if "subscriptable" in text else guess(part, name)
                return _set(part, name, value)
    for name in re.findall(r"`(\w+)`", text):
        if all(getattr(part, name, None) is None for part in parts(config)):
            text_config = text_part(config)
            return _set(text_config, name, guess(text_config, name))
    return False


def _sections(config: Any, total: int, sizes: list[int]) -> bool:
    """Sections of the rotary dims that add up, in the proportions of those that do not."""
    roped = [part for part in parts(config) if isinstance(entry(part, "rope_parameters"), dict)]
    held = [part.rope_parameters.get("mrope_section") for part in roped]
    if any(sizes == [2 * n for n in h or ()] or sizes == 2 * (h or []) for h in held):
        total, sizes = total // 2, next(h for h in held if h)
    scaled = [n * total // sum(sizes) for n in sizes]
    scaled[0] += total - sum(scaled)
    if not roped or min(scaled) < 1:
        return False
    words = [part for part in roped if _count(part, "vocab_size")]
    part = next((part for part, sections in zip(roped, held, strict=True) if sections), (words or roped)[0])
    return _set(part, "rope_parameters", part.rope_parameters | {"mrope_section": scaled})


def _resized(config: Any, had: int, wanted: int, *, every: bool = False) -> bool:
    """The first width of one value set to another, the outermost first, or every one in the part that has it."""
    for part in parts(config):
        changed = False
        for name, value in list(vars(part).items()):
            if type(value) is int and value == had and re.search(r"(size|dim|d_model|channels)($|_)", name):
                changed |= _set(part, name, wanted)
            elif _integers(value) and had in value and re.search(r"channel|(sizes|dims)$", name):
                changed |= _set(part, name, type(value)(wanted if n == had else n for n in value))
            if changed and not every:
                return True
        if changed:
            return True
    return False


def _more_patches(config: Any) -> bool:
    """Images of more patches to a side, and the tiles of them; then fewer tokens for each image."""
    changed = False
    for part in parts(config):
        side, patch = _count(part, "image_size"), _count(part, "patch_size")
        if side and patch and side // patch < PATCHES:
            changed |= _set(part, "image_size", PATCHES * patch)
            for tiled in parts(config) if changed else ():
                pinned = entry(tiled, "image_grid_pinpoints")
                if isinstance(pinned, list | tuple):
                    by = [[max(n // side, 1) * PATCHES * patch for n in sides] for sides in pinned]
                    _set(tiled, "image_grid_pinpoints", by)
    for part in parts(config) if not changed else ():
        for name, value in list(vars(part).items()):
            if type(value) is int and re.search(r"tokens_per_image$|image_seq_length$", name) and value > TOKENS:
                changed |= _set(part, name, TOKENS)
    return changed


def _fewer_queries(config: Any) -> bool:
    """As few queries as there are places in the smallest image."""
    changed = False
    for part in parts(config):
        for name, value in list(vars(part).items()):
            if type(value) is int and value > QUERIES and re.search(r"quer(y|ies)$|num_proposals$", name):
                changed |= _set(part, name, QUERIES)
    return changed


def _absent(part: Any, name: str) -> bool:
    try:
        return getattr(part, name, 0) is None
    except Exception:  # an attribute that differs by layer
        return False


def guess(part: Any, name: str) -> Any:
    """A value for a number that is missing."""
    width = next((v for n in ("hidden_size", "d_model", "dim") if (v := _count(part, n))), 32)
    heads = _count(part, "num_attention_heads") or 4
    if name.endswith(("token_id", "token_index")):
        taken = {v for v in vars(part).values() if isinstance(v, int)}
        return next(i for i in range(VOCABULARY - 1, 0, -1) if i not in taken)
    if re.search(r"head_(dim|size)", name):
        return max(width // heads, 2)
    if re.search(r"heads$", name):
        return heads
    for pattern, value in _GUESSES:
        if re.search(pattern, name):
            return value
    return width if re.search(r"size$|dim$|width$", name) else 4


def _set(part: Any, name: str, value: Any) -> bool:
    if value is None:
        return False
    try:
        setattr(part, name, value)
    except Exception:  # a property without a setter, or a value that its class refuses
        return False
    return True


def _names(error: BaseException) -> Iterator[str]:
    """Names in the message, and those read on the lines that failed, also by another name of the module's own."""
    yield from re.findall(r"[`'](\w+)[`']", str(error))
    for file, line in _lines(error):
        source = Path(file).read_text(errors="ignore")
        for owner, name in re.findall(r"\b(config|self)\.(?=(\w+))", line):
            yield name
            if owner == "self":
                yield from re.findall(rf"self\.{name} = \w*config\.(\w+)", source)
                yield from re.findall(rf"{name}(?::[^=\n]*)? = \w*config\.(\w+)", source)
                yield from re.findall(rf"self\.{name} = getattr\(\w*config, \"(\w+)\"", source)


def _lines(error: BaseException) -> Iterator[tuple[str, str]]:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/transformers/models/" in f.filename]
    for frame in list(reversed(frames))[:FRAMES]:
        first, last = frame.lineno or 0, frame.end_lineno or frame.lineno or 0
        yield frame.filename, " ".join(linecache.getline(frame.filename, n) for n in range(first, last + 1))


def _kinds(part: Any, name: str, error: BaseException) -> list[str] | None:
    """A kind for every layer: those that the code compares with, in turn."""
    layers = next((v for n in ("num_hidden_layers", "num_layers") if isinstance(v := getattr(part, n, None), int)), 2)
    for file, line in _lines(error):
        if name in line:
            source = Path(file).read_text(errors="ignore")
            kinds = re.findall(rf"{name}\[\w+\] [!=]= \"(\w+)\"", source)
            kinds = list(dict.fromkeys([*kinds, "full_attention" if name == "layer_types" else "dense"]))
            return [kinds[i % len(kinds)] for i in range(layers)]
    return None


def divisible(config: Any) -> None:
    """Make heads divide the widths that they share, and key heads divide heads, in a configuration and all in it."""
    for part in parts(config):
        heads = next((n for n in ("num_attention_heads", "num_heads", "n_head", "n_heads") if _count(part, n)), None)
        width = next((n for n in ("hidden_size", "d_model", "n_embd", "embed_dim", "dim") if _count(part, n)), None)
        if heads is None or width is None:
            continue
        own = any(_count(part, n) for n in ("head_dim", "d_kv", "kv_channels", "attention_head_dim"))
        total, many = _count(part, width), _count(part, heads)
        if not own and total % (ROTARY * many):
            # A rotary embedding of two dims takes the width of a head in quarters; one head could not be cut.
            fit = [n for n in range(min(many, total), 0, -1) if total % n == 0]
            _set(part, heads, next((n for n in fit if n > 1 and total // n % ROTARY == 0), fit[0]))
        few = _count(part, "num_key_value_heads")
        if few and _count(part, heads) % few:
            _set(part, "num_key_value_heads", next(n for n in range(few, 0, -1) if _count(part, heads) % n == 0))


def _count(part: Any, name: str) -> int:
    value = entry(part, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def lessen(config: Any, module: Any) -> bool:
    """Divide by four the numbers of a configuration that the sizes of the largest parameters are multiples of."""
    largest = sorted(module.parameters(), key=lambda p: -p.numel())[:3]
    dims = {n for p in largest for n in p.shape}
    changed = False
    for part in parts(config):
        for name, value in list(vars(part).items()):
            if type(value) is int and value >= 16 and any(n % value == 0 for n in dims):
                changed |= _set(part, name, value // 4)
            elif _integers(value) and max(value) in dims:
                changed |= _set(part, name, type(value)(max(v // 4, 1) for v in value))
    return changed


def fit(module: Any, config: Any) -> bool:
    """Make the features of each tower as wide as the words that they stand beside; whether anything was changed."""
    if not hasattr(module, "get_input_embeddings") or not any(hasattr(module, f"get_{k}_features") for k in KINDS):
        return False
    try:
        wanted = getattr(module.get_input_embeddings(), "embedding_dim", 0)
    except NotImplementedError:
        return False
    changed = False
    for tower in Search(module, config).towers(module):
        if wanted and tower.width != wanted:
            changed |= _widened(config, tower.width, wanted)
    if changed:
        divisible(config)
    return changed


def _widened(config: Any, width: int, wanted: int) -> bool:
    """A number that gives a tower's width, set to another: that of what it puts out, if there is one."""
    towers = [part for part in parts(config) if part is not config and part is not text_part(config)]
    towers += [config] if config is not text_part(config) else []
    for pattern in (r"^out|output|project", r"size$|dim$"):
        for part in towers:
            for name, value in list(vars(part).items()):
                if type(value) is int and value == width and re.search(pattern, name):
                    return _set(part, name, wanted)
    return False


def _integers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(v) is int for v in value)
