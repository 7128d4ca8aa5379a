"""Example inputs for a transformers model, found by running it.

The signature of its forward, the docstring of it and the sizes in its config say what it may take.  Some of that is
tried, the richest first, so that every part of the model is reached; and a forward that refuses mostly says what it
lacks: the name of an argument in its message or on the line that failed, or the width that it expected.
"""

from __future__ import annotations

import itertools
import linecache
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.analyze.capture.run import capture
from tpconvert.analyze.trace.copies import copied, has_forward
from tpconvert.analyze.watch.shadow import Shadow, needs_shadow
from tpconvert.errors import SourceError
from tpconvert.source.inputs.documented import (
    BATCH,
    LENGTH,
    OTHER_LENGTH,
    Argument,
    arguments,
    example,
    filled,
    parts,
    random,
    size_in,
    text_part,
)
from tpconvert.source.inputs.media import SOUNDS, VIDEOS, images, sounds
from tpconvert.source.inputs.processed import processed
from tpconvert.source.inputs.resize import resized
from tpconvert.source.inputs.towers import Tower, askers, marked, towers_of, with_towers

__all__ = ["BATCH", "LENGTH", "OTHER_LENGTH", "example_inputs"]

Given = dict[str, Any]
TRIALS, MORE = 80, 16
"""Forwards that are tried before giving up, and after some inputs were found that are not all there could be."""

_MEDIA = re.compile(r"pixel_values|(input_features|input_values|audio_mel|_patches)$")
_THEN_MENDED: Given = {}
"""Stands between what is tried first and what is tried after that was mended."""
MENDED = 4
"""Forms of what one tower is given that come from a first one."""
_WIDEST = 1000
"""Word ids are drawn below this."""
_NEVER = re.compile(r"label|cache|past_key|encoder_outputs|(start|end)_positions|^return_|^output_|_targets?$")
"""Arguments that are for training, or for going on with what was begun."""


def example_inputs(module: nn.Module, config: Any) -> Given:
    """Keyword arguments for the module's forward, which it runs on wherever some are found."""
    return Search(module, config).run()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Inputs that a forward did not take."""

    given: Given
    error: Exception
    reached: int
    """How many of its modules it had called."""


class Search:
    """The search for inputs of one module."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.module, self.config = module, config
        self.arguments = arguments(module.forward, *askers(module))
        self.names = set(self.arguments)
        main = getattr(module, "main_input_name", "input_ids")
        self.main = [main] if isinstance(main, str) else list(main)
        self.required = [n for n, a in self.arguments.items() if a.required]
        self.tried: set[Any] = set()
        self.refused: list[Refusal] = []
        self.enough = TRIALS
        self._processed: list[Given] | None = None

    def run(self) -> Given:
        """The first inputs that run; those that came furthest if none do.

        What was mended goes in the order of how far it came before.  Inputs without some image or sound that was
        refused are not the end of it: what was mended of the richer ones is tried first.
        """
        self._check_known()
        skeleton = copied(self.module).eval()
        reached = _counting(skeleton)
        later: list[tuple[int, Given]] = []
        starts = self.starts(skeleton)
        found: Given | None = None
        mending = 0
        while len(self.refused) < (TRIALS if found is None else self.enough):
            mending -= bool(mending)
            given = next(starts, None) if found is None and not mending else None
            if given == _THEN_MENDED:
                mending = MORE if later else 0
                continue
            if given is None:
                later = [(far, new) for far, new in later if found is None or media_in(new) > media_in(found)]
                if not later and mending:
                    mending = 0
                    continue
                if not later:
                    break
                given = later.pop(max(range(len(later)), key=lambda i: (later[i][0], -i)))[1]
            reached.clear()
            error = fault(skeleton, given)
            if error is None:
                found, self.enough = given, min(TRIALS, len(self.refused) + MORE)
                continue
            self.refused.append(Refusal(given, error, len(reached)))
            later += [(len(reached), new) for new in self.mended(given, error) if self._is_new(new)]
        if found is None and not self.refused:
            raise self._unknown(self.main[0])
        return found or max(self.refused, key=lambda refusal: refusal.reached).given

    def _is_new(self, given: Given) -> bool:
        key = tuple(sorted((name, _told(value)) for name, value in given.items()))
        new = key not in self.tried
        self.tried.add(key)
        return new

    def _check_known(self) -> None:
        if not has_forward(self.module):
            raise SourceError(
                f"{type(self.module).__name__} has no forward: it is a set of parts that other methods call.",
                hint="Convert its parts, or name a function, file.py:function, that returns (module, inputs).",
            )
        for name in dict.fromkeys([*self.main, *self.required]):
            if name in self.names and "mask" not in name and not any(True for _ in self.forms(name, {})):
                raise self._unknown(name)

    def _unknown(self, name: str) -> SourceError:
        return SourceError(
            f"{type(self.module).__name__}: no example is known for the input {name!r} of its forward.",
            hint="Name a function instead, file.py:function, that returns (module, inputs).",
        )

    # -- what is tried first ------------------------------------------------------------------------------------

    def starts(self, skeleton: nn.Module) -> Iterator[Given]:
        """Inputs for every tower; for all media; for the main input; and no more than what has to be there."""
        if "input_ids" in self.names:
            towers, forms = self.towers(skeleton), lambda name: self.forms(name, {})
            inputs = with_towers(towers, skeleton, self.config, self.names, forms, lambda: words(self.config, LENGTH))
            yield from (self.completed(given) for given in inputs)
            yield _THEN_MENDED  # what towers refused, before words that do not point at what they are given
        known = [n for n in (*SOUNDS, "pixel_values", VIDEOS) if n in self.names]
        media = known or sorted(media_in(dict.fromkeys(self.names)))
        least = [n for n in dict.fromkeys([*self.main, *self.required]) if n in self.names]
        text = [n for n in ("input_ids",) if n in self.names]
        every = [[*media, *text, *least]] if len(media) > 1 else []
        wanted = [
            *every,
            *([[n, *text, *least] for n in media] if text else []),
            least,
            *([n, *least] for n in media),
            text,
        ]
        for names in dict.fromkeys(tuple(dict.fromkeys(w)) for w in wanted if w):
            for given in itertools.islice(self.together(names), 24):
                if self._is_new(given):
                    yield given

    def towers(self, skeleton: nn.Module) -> list[Tower]:
        """The towers of the model that say how many marks they fill."""
        return towers_of(
            skeleton,
            self.config,
            self.names,
            lambda name: self.forms(name, {}),
            self.settled,
        )

    def settled(self, part: nn.Module, given: Given, taken: list[str]) -> Given | None:
        """What a part runs on: the inputs as given, or as mended by what it says of them."""
        later = [given]
        for _ in range(MENDED):
            if not later:
                break
            given = later.pop(0)
            error = fault(part, given)
            if error is None:
                return given
            later = [{n: v for n, v in new.items() if n in taken} for new in self.mended(given, error)] + later
        return None

    def together(self, names: tuple[str, ...]) -> Iterator[Given]:
        """Every combination of the forms of some arguments; masks last, since they go by the others."""
        ordered = sorted(names, key=lambda name: "mask" in name)

        def more(given: Given, rest: list[str]) -> Iterator[Given]:
            if not rest:
                yield self.completed(given)
            elif rest[0] in given:
                yield from more(given, rest[1:])
            else:
                for form in self.forms(rest[0], given):
                    yield from more(form | given, rest[1:])

        return more({}, ordered)

    def completed(self, given: Given) -> Given:
        """With what goes along with the inputs."""
        out = dict(given)
        if "input_ids" in out and "attention_mask" in self.names and out["input_ids"].dim() == 2:
            out["attention_mask"] = torch.ones_like(out["input_ids"])
        if "decoder_input_ids" in self.names and getattr(self.config, "is_encoder_decoder", False):
            out.setdefault("decoder_input_ids", words(self.config, OTHER_LENGTH))
        for name in {"use_cache", "return_loss"} & self.names:
            out[name] = False
        return out

    def processed(self) -> list[Given]:
        """What the processors of the model type make of images and sounds, as far as the forward takes it."""
        if self._processed is None:
            made = processed(self.config)
            taken = ({n: v for n, v in given.items() if n in self.names} for given in made)
            self._processed = [given for given in taken if given]
        return self._processed

    def forms(self, name: str, given: Given) -> Iterator[Given]:
        """The forms in which an argument can be given, what must go along with it included."""
        yield from self._guessed(name, given)
        if media_in({name: None}):
            yield from (made for made in self.processed() if name in made)

    def _guessed(self, name: str, given: Given) -> Iterator[Given]:
        argument = self.arguments.get(name, Argument(name))
        if "pixel_values" in name or (name == "hidden_states" and "grid_thw" in self.names):
            yield from images(name, self.names, self.config, argument.dims)
        elif name in SOUNDS:
            yield from sounds(name, self.names, self.config)
        elif name.endswith("input_ids") and "FloatTensor" not in argument.kind:
            length = OTHER_LENGTH if name.startswith("decoder") else LENGTH
            yield {name: words(self.config, length)}
            if (codes := size_in(self.config, "num_codebooks")) is not None:
                yield {name: words(self.config, length, codes)}
        elif ("mask" in name and name != "attention_mask") or (name == "attention_mask" and "input_ids" not in given):
            yield from self._masks(argument, given)
        elif name == "attention_mask":
            yield {name: torch.ones_like(given["input_ids"])}
        elif (made := example(argument, self.config)) is not None:
            if argument.dims[1:] == ("sequence_length",) and "input_ids" in given:
                made = filled(name, argument.kind, tuple(given["input_ids"].shape[:2]))
            yield {name: made}
            if made.dtype == torch.long and argument.kind != "LongTensor":
                yield {name: made.float()}
        elif name == "inputs":
            yield {name: words(self.config, LENGTH)}
            yield from self._undocumented(name)
        elif re.search(r"(states?|embeds|latents|values)$", name):
            yield from self._undocumented(name)

    def _undocumented(self, name: str) -> Iterator[Given]:
        """What is called a state, or the like, in the layouts that there are: text first, then a sound."""
        width = size_in(self.config, "hidden_size") or size_in(self.config, "d_model") or 16
        for shape in ((LENGTH, width), (width, LENGTH), (LENGTH,), (1, 4800), (width,)):
            yield {name: random(BATCH, *shape)}

    def _masks(self, argument: Argument, given: Given) -> Iterator[Given]:
        """Masks of the documented shape, and over each length among the inputs."""
        if (made := example(argument, self.config)) is not None:
            yield {argument.name: made}
        ids = argument.name.replace("attention_mask", "input_ids")
        if argument.name != "attention_mask" and ids in given:
            yield {argument.name: torch.ones_like(given[ids])}
        floats = [v for v in given.values() if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1]
        texts = [v.shape[1] for n, v in given.items() if n == "input_ids"]
        for text, count in ((t, v.shape[1]) for t in texts for v in floats if v.dim() > 4):
            yield {argument.name: filled(argument.name, argument.kind, (BATCH, text, count))}
        for length in dict.fromkeys(n for v in floats for n in v.shape[1:]):
            yield {argument.name: filled(argument.name, argument.kind or "BoolTensor", (BATCH, length))}

    # -- what is tried after a refusal --------------------------------------------------------------------------

    def mended(self, given: Given, error: BaseException) -> Iterator[Given]:
        """The inputs changed by what an error says: with an argument more, or of another width."""
        text = str(error)
        more = [self.completed(new) for new in marked(text, given, self.config, self.names)]
        if more:
            yield from more
            return
        yield from resized(given, text, lambda *dims: words(self.config, *dims))
        if re.search(r"Input type \((torch\.)?(long|Long|bool|Bool)", text):  # a mask that goes through a layer
            yield {n: v.float() if isinstance(v, Tensor) and "mask" in n else v for n, v in given.items()}
        if "index out of range" in text:
            least = min(filter(None, (size_in(part, "vocab_size") for part in parts(self.config))), default=2)
            yield {n: v % least if n.endswith("input_ids") else v for n, v in given.items()}
        for name in itertools.islice(self._lacking(given, error), 3):
            for form in itertools.islice(self.forms(name, given), 4):
                yield self.completed({n: v for n, v in form.items() if n not in given} | given)

    def _lacking(self, given: Given, error: BaseException) -> Iterator[str]:
        """Arguments not given that an error names, or that stand on the lines it came from, the innermost first."""
        lines = [str(error)]
        while error.__cause__ is not None:
            error = error.__cause__
            lines.append(str(error))
        for frame in reversed(list(traceback.extract_tb(error.__traceback__))):
            if "site-packages/torch/" not in frame.filename and "/tpconvert/" not in frame.filename:
                last = frame.end_lineno or frame.lineno or 0
                lines.append("".join(linecache.getline(frame.filename, n) for n in range(frame.lineno or 0, last + 1)))
        found = dict.fromkeys(
            name for line in lines for word in re.findall(r"\w+", line) for name in (word, word.lower())
        )
        never = {"inputs_embeds"} if "input_ids" in self.names else set()
        wanted = self.names - given.keys() - never
        yield from (name for name in found if name in wanted and not _NEVER.search(name))


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.max().item() if value.numel() else 0}"
    return str(value)


def media_in(given: Given) -> set[str]:
    """The images, videos and sounds among inputs."""
    return {name for name in given if _MEDIA.search(name)}


def _counting(module: nn.Module) -> list[None]:
    """A list that grows with each call of a module in this one."""
    calls: list[None] = []
    for part in module.modules():
        part.register_forward_pre_hook(lambda *_: calls.append(None))
    return calls


def fault(module: nn.Module, given: Given) -> Exception | None:
    """What a module raises on its inputs; a module without values is run with those of its inputs alone."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if needs_shadow(module):
                capture(module, given, shadow=Shadow())
            else:
                module(**given)
    except Exception as error:  # whatever a forward raises on inputs it does not take
        return error
    return None


def words(config: Any, length: int, *more: int) -> Tensor:
    """Word ids below the vocabulary's end; none is a special one, which would turn on special code."""
    text = text_part(config)
    vocabulary = min(size_in(text, "vocab_size") or size_in(config, "vocab_size") or _WIDEST, _WIDEST)
    names = re.compile(r"_(id|index)$")
    special = {v for part in parts(config) for k, v in vars(part).items() if names.search(k) and isinstance(v, int)}
    free = torch.tensor([i for i in range(vocabulary) if i not in special] or [0])
    return free[torch.randint(len(free), (BATCH, length, *more), generator=torch.Generator().manual_seed(0))]
