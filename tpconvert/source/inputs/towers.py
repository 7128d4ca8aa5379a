"""Inputs for the towers of a multimodal model: images, videos and sounds, and the words that stand for them.

Such a model puts the features of an image in the places of as many marks among the words.  How many there are, the
model is asked: transformers gives it a ``get_image_features``, ``get_video_features`` or ``get_audio_features``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.source.inputs.documented import BATCH, value_in

Given = dict[str, Any]
KINDS = ("image", "video", "audio")
BEFORE = 3
"""Words that come before the first mark."""


@dataclass(frozen=True, slots=True)
class Tower:
    """What one tower is given, and the marks that it fills."""

    kind: str
    given: Given
    mark: int
    count: int
    """Marks for one image, or one sound."""
    width: int
    """The width of a feature."""
    around: tuple[tuple[int, ...], tuple[int, ...]]
    """The words that the model looks for before and after them."""

    @property
    def pieces(self) -> int:
        """How many times there are in its grid: some models have the marks of each among words of their own."""
        grids = [v for n, v in self.given.items() if n.endswith("grid_thw")]
        return int(grids[0][0, 0]) if grids else 1


def with_towers(
    towers: list[Tower],
    module: nn.Module,
    config: Any,
    names: set[str],
    forms: Callable[[str], Iterator[Given]],
    words: Callable[[], Tensor],
) -> Iterator[Given]:
    """Inputs for all towers at once, then for fewer; none where the model has no towers.

    ``names`` are the arguments of its forward, ``forms`` gives forms for one of them, and ``words`` makes the text.
    """
    for many in range(len(towers), 0, -1):
        for some in combinations(towers, many):
            yield _filled(some, names, words())
            if any(tower.pieces > 1 for tower in some):
                yield _filled(some, names, words(), apart=True)
    unasked = _unasked(module, config, names, forms)
    together = zip(*unasked, strict=False) if len(unasked) > 1 else ()
    for some in (*together, *((tower,) for towers in unasked for tower in towers)):
        yield _filled(tuple(some), names, words())


def towers_of(
    module: nn.Module,
    config: Any,
    names: set[str],
    forms: Callable[[str], Iterator[Given]],
    settled: Callable[[nn.Module, Given, list[str]], Given | None],
) -> list[Tower]:
    """The towers that can be asked; ``settled`` gives what a module runs on, mended if need be, if it does."""
    return [t for kind in KINDS if (t := _tower(module, config, kind, names, forms, settled)) is not None]


def askers(module: nn.Module) -> list[Any]:
    """The methods by which towers are asked; their docstrings may say what the forward's does not."""
    methods = (f"get_{kind}_features" for kind in KINDS)
    return [getattr(part, method) for method in methods if (part := _asked(module, method)) is not None]


class _Features(nn.Module):
    """A tower as a module of its own; remembers how many features its last call gave."""

    def __init__(self, whole: nn.Module, method: str) -> None:
        super().__init__()
        self.whole, self.method = whole, method
        self.count, self.width = 0, 0

    def forward(self, **given: Any) -> Any:
        out = getattr(_asked(self.whole, self.method), self.method)(**given)
        features = getattr(out, "pooler_output", out)
        features = out[0] if features is None else features
        tensors = _tensors(features)
        self.count = sum(t.numel() // t.shape[-1] for t in tensors) // BATCH
        self.width = tensors[0].shape[-1] if tensors else 0
        return features


def _tensors(features: Any) -> list[Tensor]:
    if isinstance(features, Tensor):
        return [features]
    return [t for f in features for t in _tensors(f)] if isinstance(features, list | tuple) else []


def _tower(
    module: nn.Module,
    config: Any,
    kind: str,
    names: set[str],
    forms: Callable[[str], Iterator[Given]],
    settled: Callable[[nn.Module, Given, list[str]], Given | None],
) -> Tower | None:
    """The tower of a kind and the first form that it runs on."""
    method = f"get_{kind}_features"
    mark = _mark(config, kind)
    taken = _taken(module, method)
    entry = next((n for n in taken if n in names), None)
    if mark is None or entry is None:
        return None
    features = _Features(module, method)
    for form in forms(entry):
        given = settled(features, {n: v for n, v in form.items() if n in taken}, taken)
        if given is not None and features.count:
            return Tower(kind, given, mark, features.count, features.width, _around(config, kind))
    return None


def _unasked(
    module: nn.Module, config: Any, names: set[str], forms: Callable[[str], Iterator[Given]]
) -> list[list[Tower]]:
    """Guesses for each tower that cannot be asked: one mark for all of an image or a sound, as older models have it."""
    found = []
    for kind, pattern in (("image", r"pixel_values$|_patches$"), ("audio", r"input_features$")):
        mark, entry = _mark(config, kind), next((n for n in sorted(names) if re.search(pattern, n)), None)
        if mark is not None and entry is not None and not _taken(module, f"get_{kind}_features"):
            given = sorted(islice(forms(entry), 8), key=len, reverse=True)  # the fullest, which a processor made
            found.append([Tower(kind, form, mark, 1, 0, _around(config, kind)) for form in given[:6]])
    return [towers for towers in found if towers]


def _taken(module: nn.Module, method: str) -> list[str]:
    """The arguments of a method that is the module's own, and of those of its parts that it may pass others on to."""
    outer = _asked(module, method)
    taken: list[str] = []
    for part in outer.modules() if outer is not None else ():
        parameters = inspect.signature(getattr(part, method)).parameters.values() if hasattr(part, method) else ()
        taken += [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(dict.fromkeys(taken))


def _asked(module: nn.Module, method: str) -> nn.Module | None:
    """The module itself, or the outermost part of it, whose method says what it takes."""
    for part in module.modules():
        if callable(found := getattr(part, method, None)):
            parameters = inspect.signature(found).parameters.values()
            if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
                return part
    return None


def _mark(config: Any, kind: str) -> int | None:
    """The word that stands for one feature."""
    names = [f"{k}_token_{end}" for k in (kind, *(["image"] if kind == "video" else [])) for end in ("id", "index")]
    return next((v for n in names if isinstance(v := value_in(config, n), int)), None)


def _around(config: Any, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The words before and after the marks, where the config names them."""
    kinds = (kind, "vision") if kind != "audio" else (kind,)
    start, end = (
        next((v for k in kinds for w in words if isinstance(v := value_in(config, f"{k}_{w}_token_id"), int)), None)
        for words in (("start", "bos", "begin"), ("end", "eos"))
    )
    return (() if start is None else (start,)), (() if end is None else (end,))


def marked(text: str, given: Given, config: Any, names: set[str]) -> Iterator[Given]:
    """The inputs with as many marks more among the words as an error says there are features."""
    if "input_ids" not in given or given["input_ids"].dim() != 2:
        return
    if m := re.search(r"value tensor of shape \[(\d+),.*broadcast to indexing result of shape \[(\d+),", text):
        here = [(_mark(config, kind), kind) for kind in KINDS]
        for kind in [
            k for mark, k in here if mark is not None and int((given["input_ids"] == mark).sum()) == int(m[2])
        ]:
            yield from _more_marks(kind, int(m[2]), int(m[1]), given, config, names)
    for m in re.finditer(r"(\w+) features and \w+ tokens do not match\D+(\d+)\D+(\d+)", text):
        if m[1].lower() in KINDS:
            yield from _more_marks(m[1].lower(), int(m[2]), int(m[3]), given, config, names)


def _more_marks(kind: str, had: int, wanted: int, given: Given, config: Any, names: set[str]) -> Iterator[Given]:
    mark = _mark(config, kind)
    if mark is not None and wanted > had and (wanted - had) % BATCH == 0:
        tower = Tower(kind, {}, mark, (wanted - had) // BATCH, 0, _around(config, kind))
        yield given | _filled((tower,), names, given["input_ids"])


def _filled(towers: tuple[Tower, ...], names: set[str], words: Tensor, *, apart: bool = False) -> Given:
    """All that the towers are given, and text with their marks in it; ``apart`` those of each time by themselves."""
    out: Given = {}
    ids, kinds = [words[:, :BEFORE]], [torch.zeros_like(words[:, :BEFORE])]
    for tower in towers:
        out |= tower.given
        before, after = tower.around
        pieces = tower.pieces if apart and tower.count % tower.pieces == 0 else 1
        piece = [*before, *[tower.mark] * (tower.count // pieces), *after]
        row = torch.tensor([n for i in range(pieces) for n in (*[int(words[0, 0])] * (i > 0), *piece)]).repeat(BATCH, 1)
        ids.append(row)
        kinds.append((row == tower.mark) * (KINDS.index(tower.kind) + 1))
    ids.append(words[:, BEFORE:])
    kinds.append(torch.zeros_like(words[:, BEFORE:]))
    out["input_ids"] = torch.cat(ids, dim=1)
    typed = [n for n in ("mm_token_type_ids", "token_type_ids") if n in names][:1]
    for name in [*typed, *(n for n in names if n.endswith("_mm_token_type_ids"))]:
        out[name] = torch.cat(kinds, dim=1)
    return out
