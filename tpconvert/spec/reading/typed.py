"""JSON data read as the types that a dataclass declares, and as nothing else.

Python would take ``"abc"`` for a list of three, ``true`` for 1 and a word for a flag, each a fault that shows much
later or never.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Reader = Callable[[Any], Any]

NAMED_BY = ("name", "module")
"""The keys by which people find an entry again."""
_WORDS = {str: "a text", int: "a whole number", bool: "true or false", dict: "a mapping", type(None): "null"}


class WrongError(ValueError):
    """What is wrong, and the way to it: ``verdicts[3] (up.weight).shape``."""

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(what)
        self.what, self.place = what, place

    def within(self, place: str) -> WrongError:
        """The same, told from further out."""
        return WrongError(self.what, f"{place}{'.' if self.place[:1] not in ('', '[') else ''}{self.place}")

    @property
    def sentence(self) -> str:
        """All of it, ended."""
        text = str(self)
        return text if text.endswith((".", "?")) else f"{text}."

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" if self.place else self.what


def reader(hint: Any, own: Mapping[Any, Reader]) -> Reader:
    """What reads JSON as a type; ``own`` has the readers of types that are not written as their fields."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in own:
        return own[hint]
    if hint is Any:
        return lambda data: data
    if origin is Literal:
        return lambda data: _one_of(data, args)
    if origin in (Union, UnionType):  # only ever something or nothing
        inner = reader(next(a for a in args if a is not type(None)), own)
        return lambda data: None if data is None else inner(data)
    if origin is tuple and args[-1] is ...:
        return _many(reader(args[0], own))
    if origin is tuple:
        return _some(tuple(reader(a, own) for a in args))
    if is_dataclass(hint):
        return _of_class(hint, own)
    return _plain(dict if origin is dict else hint)


def entry(place: str, data: Any) -> str:
    """How an entry of a list is called: by its number, and by its name where it has one."""
    named = data if isinstance(data, Mapping) else {key: getattr(data, key, None) for key in NAMED_BY}
    name = next((named[key] for key in NAMED_BY if isinstance(named.get(key), str) and named[key]), "")
    return f"{place} ({name})" if name else place


def _plain(kind: type) -> Reader:
    def read(data: Any) -> Any:
        if type(data) is not kind:
            raise WrongError(f"{_short(data)} is not {_WORDS[kind]}")
        return data

    return read


def _one_of(data: Any, allowed: tuple[Any, ...]) -> Any:
    if data not in allowed:
        raise WrongError(f"{_short(data)} is not one of {', '.join(map(str, allowed))}")
    return data


def _many(inner: Reader) -> Reader:
    def read(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list | tuple):
            raise WrongError(f"{_short(data)} is not a list")
        return tuple(_at(f"[{i}]", inner, item) for i, item in enumerate(data))

    return read


def _some(inner: tuple[Reader, ...]) -> Reader:
    def read(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list | tuple) or len(data) != len(inner):
            raise WrongError(f"{_short(data)} is not a list of {len(inner)}")
        return tuple(_at(f"[{i}]", one, item) for i, (one, item) in enumerate(zip(inner, data, strict=True)))

    return read


def _of_class(kind: Any, own: Mapping[Any, Reader]) -> Reader:
    hints = get_type_hints(kind)
    written = [f for f in fields(kind) if f.init]
    readers = {f.name: reader(hints[f.name], own) for f in written}
    needed = [f.name for f in written if f.default is MISSING and f.default_factory is MISSING]

    def read(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise WrongError(f"{_short(data)} is not {_WORDS[dict]}")
        for key in data:
            if key not in readers:
                near = difflib.get_close_matches(str(key), readers, 1)
                raise WrongError(f"there is no key {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
        for name in needed:
            if name not in data:
                raise WrongError(f"{name} is missing")
        return kind(**{key: _at(key, readers[key], value) for key, value in data.items()})

    return read


def _at(place: str, read: Reader, data: Any) -> Any:
    try:
        return read(data)
    except WrongError as error:
        raise error.within(entry(place, data) if place[0] == "[" else place) from None


def _short(data: Any) -> str:
    """A value as the file has it."""
    text = json.dumps(data, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
