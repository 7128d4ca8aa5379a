"""The other sides of the branches that a forward takes, where its example inputs take one of them.

What a forward decides by the size of an input is decided otherwise by inputs of another size: the nearest for which
the comparison has the other answer.  A question about values (``if mask.all():``, ``x.max().item()``) is answered
otherwise by whoever captures.  So a plan is held to what lies there as well, as directed testing reaches it (Godefroid,
Klarlund and Sen, DART, PLDI 2005): one branch at a time, and those inside of the sides so reached.  Not found are
branches on what the caller passes and on settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term, atoms, find, leaves, segments
from tpconvert.analyze.capture.run import Call, Trace
from tpconvert.analyze.trace.call import Answer, Turn
from tpconvert.analyze.trace.provenance import Attribute, Expression, dims_read, evaluate
from tpconvert.planning.calls.sizes import OtherSizes
from tpconvert.planning.calls.ways import Way

LARGEST, SMALL = 1 << 14, 1 << 6
"""The largest size that is tried, and the largest that a forward is run with values for."""
MANY, FEW = 1025, 65
"""A size that is beyond most that a forward makes numbers of, and one for forwards that loop over it."""
DEEPEST = 3
"""How many branches are taken otherwise at once."""
FAR, NEAR = 10_000, 9
"""What is told of values in place of a number: one beyond all that a forward compares it with, or that much more."""
LONGEST = 256
"""The longest list of numbers that is told otherwise."""
TIMES = {" the first time": slice(1), " each time": slice(None), " the last time": slice(-1, None)}
"""Which of the questions at one line are answered otherwise."""
MOST = 12
"""Questions of one kind that are answered otherwise, one of each that modules of one class ask alike."""

Sizes = Mapping[Term, int]
"""Other sizes of the inputs' dims."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A comparison of integers of which a size of the inputs was one, and its answer."""

    module: str
    question: Callable[[Any, Any], bool]
    left: Expression
    right: Expression
    answer: bool

    @property
    def otherwise(self) -> Any:
        """The other answer to it, as :func:`told_in` names those that were given."""
        return self.module, self.question, outline(self.left), outline(self.right), not self.answer


class Sides:
    """The other sides of the branches of a forward that was captured by calling it in this ``way``.

    ``known`` are questions that are not asked anew (:func:`asked_in`): those of captures before.

    ``near`` are modules of which alone questions are answered otherwise: of values and gradients, by yes or no or one
    number, each time they are asked; None for all questions.
    """

    def __init__(
        self, ax: Axes, way: Way, known: Set[Any] = frozenset(), depth: int = 1, *, near: Set[str] | None = None
    ) -> None:
        self.ax, self.way, self.known, self.depth, self.near = ax, way, known, depth, near
        self.kinds = kinds(ax.trace)
        self.told: set[Any] = set()
        """The answers that captures since have given (:func:`told_in`): these sides have been reached."""

    def __iter__(self) -> Iterator[list[Way]]:
        """Each by the calls of which the first that the forward takes reaches it."""
        yield from islice(self.by_sizes(), MOST if self.near is None else 0)
        yield from islice(self.by_values(), MOST)

    # -- sizes --------------------------------------------------------------------------------------------

    def by_sizes(self) -> Iterator[list[Way]]:
        """Inputs of other sizes, by which a comparison has another answer that no inputs before have reached.

        And larger ones, and of one index where numbers are made of them, for not all that a forward does by a size is a
        comparison of it.  Not every model takes every size: the nearest two are tried, and the nearest multiple or
        divisor.
        """
        others = OtherSizes(self.ax, self.way.inputs)
        for asked in self.comparisons(others):
            if asked.otherwise not in self.told and (found := list(self.turning(asked, others))):
                whole = [c for c in found if all(new % t.n == 0 or t.n % new == 0 for t, new in c.items())]
                tried = (self.resized(others, sizes) for sizes in (*found[:1], *whole[:1], *found[1:2]))
                yield [replace(way, asked=True) for way in tried]
        if others.roots and not self.known:
            yield self.together(others, {t: 2 * t.n + 1 for t in others.roots})
        if (counted := self.counted(others)) and not self.known:
            yield self.together(others, dict.fromkeys(counted, 1))
        inner = {find(t) for (_, dim), t in others.free.items() if dim > 0}
        for n in sorted({t.n for t in inner} if not self.known else ()):
            equal = [t for t in others.roots if t.n == n]
            far = (MANY, FEW) if len(equal) == 1 else (FEW,)
            yield [self.resized(others, dict.fromkeys(equal, new)) for new in far if new > n]

    def together(self, others: OtherSizes, sizes: Sizes) -> list[Way]:
        """The calls with all these sizes changed at once, and with those that are equal by themselves."""
        equal = [{t: new for t, new in sizes.items() if t.n == n} for n in sorted({t.n for t in sizes})]
        return [self.resized(others, changed) for changed in (sizes, *(equal if len(equal) > 1 else ()))]

    def resized(self, others: OtherSizes, sizes: Sizes) -> Way:
        """The call with some sizes of the inputs changed."""
        changed = " and ".join(f"{new} for {old}" for old, new in sorted({(t.n, new) for t, new in sizes.items()}))
        large = self.way.large or any(new > max(t.n, SMALL) for t, new in sizes.items())
        return Way(self.named(f"with {changed} in the inputs' sizes"), others.to(sizes), self.way.turned, large)

    def counted(self, others: OtherSizes) -> list[Term]:
        """The inputs' sizes of which a forward made numbers: what it compared them with is not known."""
        asked = {find(self.ax.of(node)[dim]) for call in self.ax.trace.calls for node, dim in call.sized}
        asked = {a for t in asked for a in (t, *leaves(t))}
        return [t for t in others.roots if t.n > 1 and asked & {t, *leaves(t)}]

    def named(self, name: str) -> str:
        """The name of a call that is this one with something more changed."""
        return f"{self.way.name} and {name.removeprefix('with ')}" if self.way.name else name

    def comparisons(self, others: OtherSizes) -> Iterator[Asked]:
        """The comparisons that hang on a size of the inputs that may be another."""
        free = {a for t in others.roots for a in (t, *leaves(t))}
        known: set[Any] = set()
        for call in self.ax.trace.calls:
            for (question, left, right), answer in call.decided.items():
                terms = [self.ax.of(n)[i] for side in (left, right) for n, i in dims_read(side)]
                kind = self.kinds[call]
                key = (kind, question, self.spelled(left), self.spelled(right))
                if key in known or (kind, question, outline(left), outline(right)) in self.known:
                    continue
                if any(free & {find(t), *leaves(t)} for t in terms):
                    known.add(key)
                    yield Asked(call.module, question, left, right, answer)

    def turning(self, asked: Asked, others: OtherSizes) -> Iterator[Sizes]:
        """Sizes by which the answer is another, the nearest first: of all that are equal, or else of one of these."""
        marks = {n + d for n in (*self.numbers(asked.left), *self.numbers(asked.right)) for d in (-1, 0, 1)}
        powers = {(1 << k) + d for k in range(LARGEST.bit_length()) for d in (0, 1)}
        equal = [[t for t in others.roots if t.n == n] for n in sorted({t.n for t in others.roots})]
        for groups in (equal, [[t] for group in equal if len(group) > 1 for t in group]):
            found = False
            for group in groups:
                old = group[0].n
                near = {*range(1, MANY), *marks, *powers}
                for new in sorted((n for n in near if 0 < n <= LARGEST), key=lambda n: (abs(n - old), -n)):
                    sizes = dict.fromkeys(group, new)
                    if new != old and self.answer(asked, sizes) not in (asked.answer, None):
                        found = True
                        yield sizes
            if found:
                break

    def answer(self, asked: Asked, sizes: Sizes) -> bool | None:
        """The answer at other sizes of the inputs; None where there is none."""
        try:
            return bool(asked.question(self.value(asked.left, sizes), self.value(asked.right, sizes)))
        except (ArithmeticError, ValueError):
            return None

    def value(self, expression: Expression, sizes: Sizes) -> Any:
        """An expression at other sizes of the inputs."""
        if isinstance(expression, float):
            return expression
        return evaluate(expression, self.attribute, lambda node, dim: size(self.ax.of(node)[dim], sizes))

    def attribute(self, attribute: Attribute) -> int:
        """An integer of a module or of an object that modules hold."""
        held = getattr(self.ax.trace.owners[attribute.owner], attribute.name)
        return int(held if attribute.item is None else held[attribute.item])

    def numbers(self, expression: Expression) -> Iterator[int]:
        """The numbers that an expression is made of, and what it comes to."""
        if isinstance(expression, Attribute):
            yield self.attribute(expression)
        elif isinstance(expression, int | float):
            yield int(expression)
        elif expression[0] != "dim":
            yield int(self.value(expression, {}))
            for part in expression[1:]:
                yield from self.numbers(part)

    def spelled(self, expression: Expression) -> Any:
        """An expression, the same for all modules in which it means the same."""
        if isinstance(expression, Attribute):
            return expression.name, self.attribute(expression)
        if not isinstance(expression, tuple):
            return expression
        if expression[0] == "dim":
            return "dim", expression[1].meta["op"], repr(self.ax.of(expression[1])[expression[2]])
        return expression[0], self.spelled(expression[1]), self.spelled(expression[2])

    # -- values -------------------------------------------------------------------------------------------

    def by_values(self) -> Iterator[list[Way]]:
        """The same inputs, what modules of one class ask about values at one line being answered otherwise.

        Where it is asked several times, as in a loop, the first, all and the last of these.
        """
        asked: dict[tuple[type, str, type], dict[str, list[tuple[int, Answer]]]] = {}
        for call in self.ax.trace.calls:
            if self.near is not None and call.module not in self.near:
                continue
            for number, (answer, line, time) in enumerate(timed(call)):
                if call.index == 0 and (self.kinds[call], line, time) not in self.known:
                    paths = asked.setdefault((self.kinds[call], line, type(answer)), {})
                    paths.setdefault(call.module, []).append((number, answer))
        for (_, line, kind), paths in asked.items():
            several = self.near is None and any(len(times) > 1 for times in paths.values())
            if self.near is not None and kind not in (bool, int, float):
                continue
            for when, times in TIMES.items() if several else [("", slice(None))]:
                told = [(path, number, answer) for path, all_ in paths.items() for number, answer in all_[times]]
                for others in zip(*(instead(answer) for *_, answer in told), strict=True):
                    where = f"at {Path(line).name}{when}"
                    yield [self.turned(told, answers, where) for answers in zip(*others, strict=True)]

    def turned(self, told: Sequence[Turn], answers: Sequence[Answer], where: str) -> Way:
        """The call in which these are told something else of values."""
        turned = {(path, number, answer) for (path, number, _), answer in zip(told, answers, strict=True)}
        name = self.named(f"with {answers[0]} {where}")
        return Way(name, self.way.inputs, self.way.turned | turned, self.way.large, asked=True)


def kinds(trace: Trace) -> dict[Call, type]:
    """The classes of the modules that were called: all of one ask the same questions."""
    modules = dict(trace.module.named_modules())
    return {call: type(modules.get(call.module)) for call in trace.calls}


def asked_in(trace: Trace) -> set[Any]:
    """The questions of a capture, the same in captures of other sizes."""
    out: set[Any] = set()
    for call, kind in kinds(trace).items():
        out |= {(kind, question, outline(left), outline(right)) for question, left, right in call.decided}
        out |= {(kind, line, time) for _, line, time in timed(call)}
    return out


def timed(call: Call) -> Iterator[tuple[Answer, str, int]]:
    """What a forward was told of values, at which line, and how often it was asked there before."""
    times: Counter[str] = Counter()
    for answer, line in call.answers:
        yield answer, line, times[line]
        times[line] += 1


def told_in(trace: Trace) -> set[Any]:
    """The answers to comparisons in a capture, the same in captures of other sizes."""
    return {
        (call.module, question, outline(left), outline(right), answer)
        for call in trace.calls
        for (question, left, right), answer in call.decided.items()
    }


def outline(expression: Expression) -> Any:
    """An expression, the same in captures of other sizes."""
    if isinstance(expression, Attribute):
        return expression.name
    if not isinstance(expression, tuple):
        return expression
    return ("dim", expression[2]) if expression[0] == "dim" else (expression[0], *map(outline, expression[1:]))


def instead(answer: Answer) -> tuple[tuple[Answer, ...], ...]:
    """What to say in place of an answer: the other one, or other numbers, each with what to say if the call fails so.

    A number beyond all that a forward compares it with may be a number of turns as well.
    """
    if isinstance(answer, Sequence):
        each = [instead(item) for item in answer] if len(answer) <= LONGEST else []
        alike = {tuple(map(len, groups)) for groups in each}
        return tuple(tuple(zip(*others, strict=True)) for others in zip(*each, strict=True)) if len(alike) == 1 else ()
    if isinstance(answer, bool):
        return ((not answer,),)
    near = 2 * abs(answer) + NEAR
    if isinstance(answer, int):
        return ((0,), (answer + 1,), (answer + 2,), (FAR, near))
    return ((float(-FAR), -near), (float(FAR), near))


def size(term: Term, sizes: Sizes) -> int:
    """How many indices a dim has at other sizes of the inputs."""
    term = find(term)
    if term in sizes:
        return sizes[term]
    if term.kind == "P":
        return prod(size(t, sizes) for t in atoms(term))
    return sum(size(t, sizes) for t in segments(term)) if term.kind == "S" else term.n
