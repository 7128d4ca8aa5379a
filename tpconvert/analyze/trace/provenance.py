"""Integers that remember where they came from, so that a size in the graph names the attribute to divide.

While a forward is captured, the integer attributes of its modules (and of the plain objects they hold, such as
configs) are replaced by :class:`Int`.  It behaves as the int it is; arithmetic on it builds an expression.  A size
argument made from one then says ``view(b, t, num_heads, hidden // num_heads)`` rather than ``view(2, 13, 8, 6)``.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

Expression = Any
"""An int; an Attribute; ``("dim", node, index)``; or ``(function, left, right)``."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """``owner.name``, where ``owner`` is the id of a module or of an object modules hold; ``item`` for sequences."""

    owner: int
    name: str
    item: int | None = None


class Formulas(list[Expression]):
    """Expressions that fed a formula: something other than an integer that remembers."""

    def decided(self, question: Callable[[Any, Any], bool], left: Expression, right: Expression, answer: bool) -> None:
        """Python compared two integers."""


class Int(int):
    """An int with the expression that made it.  ``formulas`` is told of formulas it fed and comparisons it was in."""

    expression: Expression
    formulas: Formulas

    def __new__(cls, value: int, expression: Expression, formulas: Formulas) -> Int:
        """An int of this value that was made so."""
        self = int.__new__(cls, value)
        self.expression = expression
        self.formulas = formulas
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)

    def __copy__(self) -> int:
        return int(self)

    def __float__(self) -> float:
        self.formulas.append(self.expression)
        return float(int(self))

    def __truediv__(self, other: Any) -> Any:
        self.formulas.append(self.expression)
        return int(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        self.formulas.append(self.expression)
        return other / int(self)

    def __pow__(self, other: Any, mod: Any = None) -> Any:
        self.formulas.append(self.expression)
        return pow(int(self), other, mod)

    def __rpow__(self, other: Any, mod: Any = None) -> Any:
        self.formulas.append(self.expression)
        return pow(other, int(self), mod)

    def __bool__(self) -> bool:
        answer = int(self) != 0
        self.formulas.decided(operator.ne, self.expression, 0, answer)
        return answer

    def __neg__(self) -> Int:
        return Int(-int(self), (operator.sub, 0, self.expression), self.formulas)

    __hash__ = int.__hash__


def expression(value: int, formulas: Formulas | None = None) -> Expression:
    """How ``value`` was made; a plain int is a literal, and so is one kept from a capture of other ``formulas``."""
    known = isinstance(value, Int) and (formulas is None or value.formulas is formulas)
    return value.expression if known else int(value)  # type: ignore[attr-defined]


def _arithmetic(function: Callable[[int, int], int]) -> tuple[Any, Any]:
    def forward(self: Int, other: Any) -> Any:
        if type(other) is not int and type(other) is not Int:
            self.formulas.append(self.expression)
            return function(int(self), other)
        right = expression(other, self.formulas)
        return Int(function(int(self), int(other)), (function, self.expression, right), self.formulas)

    def reverse(self: Int, other: Any) -> Any:
        if type(other) is not int:
            self.formulas.append(self.expression)
            return function(other, int(self))
        return Int(function(other, int(self)), (function, other, self.expression), self.formulas)

    return forward, reverse


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _forward, _reverse = _arithmetic(getattr(operator, _name))
    setattr(Int, f"__{_name}__", _forward)
    setattr(Int, f"__r{_name}__", _reverse)


_MIRRORED = {operator.lt: operator.gt, operator.gt: operator.lt, operator.le: operator.ge, operator.ge: operator.le}


def _comparison(question: Callable[[Any, Any], bool]) -> Any:
    def compare(self: Int, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        answer = question(int(self), other if type(other) is float else int(other))
        right = other if type(other) is float else expression(other, self.formulas)
        self.formulas.decided(question, self.expression, right, answer)
        if isinstance(other, Int) and other.formulas is not self.formulas:  # one of them is from a capture before
            other.formulas.decided(_MIRRORED.get(question, question), other.expression, int(self), answer)
        return answer

    return compare


for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(Int, f"__{_name}__", _comparison(getattr(operator, _name)))


def _forgetting(name: str) -> Any:
    plain = getattr(int, name)

    def method(self: Int, *others: Any) -> Any:
        self.formulas.append(self.expression)
        return plain(int(self), *others)

    return method


for _name in ("and", "or", "xor", "lshift", "rshift", "divmod"):
    setattr(Int, f"__{_name}__", _forgetting(f"__{_name}__"))
    setattr(Int, f"__r{_name}__", _forgetting(f"__r{_name}__"))
for _name in ("bit_length", "bit_count", "__abs__", "__invert__"):
    setattr(Int, _name, _forgetting(_name))


def attributes(expr: Expression) -> set[Attribute]:
    """The attributes an expression is made from."""
    if isinstance(expr, Attribute):
        return {expr}
    if isinstance(expr, tuple) and expr[0] != "dim":
        return attributes(expr[1]) | attributes(expr[2])
    return set()


def reads_shape(expr: Expression) -> bool:
    """Whether an expression is made from a tensor's size."""
    return isinstance(expr, tuple) and (expr[0] == "dim" or any(reads_shape(e) for e in expr[1:]))


def dims_read(expr: Expression) -> list[tuple[Any, int]]:
    """``(tensor, dim)`` of each size an expression is made from."""
    if not isinstance(expr, tuple):
        return []
    return [(expr[1], expr[2])] if expr[0] == "dim" else [d for e in expr[1:] for d in dims_read(e)]


def evaluate(expr: Expression, value: Callable[[Attribute], int], dim: Callable[[Any, int], int]) -> int:
    """The expression's value under other attribute values and other dims."""
    if isinstance(expr, int):
        return expr
    if isinstance(expr, Attribute):
        return value(expr)
    if expr[0] == "dim":
        return dim(expr[1], expr[2])
    return expr[0](evaluate(expr[1], value, dim), evaluate(expr[2], value, dim))  # type: ignore[no-any-return]


def held_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """``(attribute, object)`` for the plain objects a module holds: configs and the like."""
    for name, value in vars(module).items():
        kind = type(value)
        if (
            name.startswith("_")
            or isinstance(value, nn.Module | type)
            or kind.__module__.split(".")[0] in ("torch", "builtins")
        ):
            continue
        if hasattr(value, "__dict__") and not callable(value):
            yield name, value


@contextmanager
def remembering(module: nn.Module, formulas: Formulas) -> Iterator[dict[int, Any]]:
    """Replace integer attributes by :class:`Int` for the duration; yields id -> owner."""
    owners: dict[int, Any] = {id(m): m for m in module.modules()}
    for m in list(module.modules()):
        for _, value in held_objects(m):
            owners.setdefault(id(value), value)
    undo: list[tuple[dict[str, Any], str, Any]] = []
    for key, owner in owners.items():
        space = vars(owner)
        for name, value in list(space.items()):
            wrapped = _wrap(value, key, name, formulas)
            if wrapped is not value:
                undo.append((space, name, value))
                space[name] = wrapped
    try:
        with past_caches(owners.values()):
            yield owners
    finally:
        for space, name, value in undo:
            space[name] = value


@contextmanager
def past_caches(owners: Iterable[Any]) -> Iterator[None]:
    """Run cached functions of modules, of classes and of objects anew where an integer that remembers is given them.

    It is equal to any other of its value, so a cache would give what was made for another tensor, of another layer or
    of a capture before, and would keep for all calls to come what was made for this one.
    """
    undo: list[tuple[Any, str, Any]] = []
    for holder, name in list(_caches(owners)):  # this module's own are among them
        value = vars(holder)[name]
        bare = _bare(value)
        undo.append((holder, name, value))
        anew = _past_cache(bare)
        setattr(holder, name, anew if bare is value else staticmethod(anew))
    try:
        yield
    finally:
        for holder, name, value in undo:
            setattr(holder, name, value)


def _caches(owners: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """``(holder, name)`` of each cached function."""
    sizes = [len(vars(module)) for module in list(sys.modules.values()) if type(module) is ModuleType]
    for module, name in _caches_of_modules(len(sizes), sum(sizes)):
        if _is_cache(vars(module).get(name)):
            yield module, name
    for holder in [*owners, *{base for owner in owners for base in type(owner).__mro__}]:
        yield from [(holder, name) for name, value in vars(holder).items() if _is_cache(value)]


@functools.lru_cache(maxsize=1)
def _caches_of_modules(count: int, names: int) -> list[tuple[ModuleType, str]]:
    """Those in as many modules of as many names: a hundred thousand are looked at again where some were added."""
    modules = [module for module in list(sys.modules.values()) if type(module) is ModuleType]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if _is_cache(value)]


def _bare(value: Any) -> Any:
    return value.__func__ if type(value) is staticmethod else value  # others may be proxies, which warn


def _is_cache(value: Any) -> bool:
    return type(_bare(value)) is functools._lru_cache_wrapper


@functools.cache
def _past_cache(cached: Any) -> Any:
    @functools.wraps(cached)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (cached.__wrapped__ if _remembers((args, tuple(kwargs.values()))) else cached)(*args, **kwargs)

    for name in ("cache_clear", "cache_info"):
        setattr(call, name, getattr(cached, name))
    return call


def _remembers(value: Any) -> bool:
    return isinstance(value, Int) or (isinstance(value, tuple) and any(map(_remembers, value)))


def _wrap(value: Any, owner: int, name: str, formulas: Formulas) -> Any:
    if type(value) is int and value > 1:
        return Int(value, Attribute(owner, name), formulas)
    if type(value) in (tuple, list) and value and all(type(v) is int for v in value):
        return type(value)(Int(v, Attribute(owner, name, i), formulas) if v > 1 else v for i, v in enumerate(value))
    return value


def integers(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Int]]:
    """``(path, value)`` of each integer with a memory."""
    if isinstance(tree, Int):
        return [(path, tree)]
    if isinstance(tree, tuple | list):
        return [x for i, t in enumerate(tree) for x in integers(t, (*path, i))]
    if isinstance(tree, dict):
        return [x for k, t in tree.items() for x in integers(t, (*path, k))]
    if isinstance(tree, slice):
        return [x for k in ("start", "stop", "step") for x in integers(getattr(tree, k), (*path, k))]
    return []
