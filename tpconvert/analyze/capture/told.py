"""What forwards are told where they ask for what may be another thing at another time."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from tpconvert.analyze.trace.call import Call, Turn, listed
from tpconvert.analyze.watch import running

GRADED = frozenset([".requires_grad", ".is_leaf"])
"""Ask for gradients."""


class Told:
    """The answers to questions that have another one: what was found, or what ``turned`` has in its place.

    ``stack`` holds the calls that are under way.
    """

    def __init__(self, turned: Set[Turn], stack: list[Call], blind: Callable[[], bool]) -> None:
        self.turned, self.stack, self.blind = frozenset(turned), stack, blind
        self.instead = {(path, number): answer for path, number, answer in turned}

    def of_values(self, found: Any) -> Any:
        """What values say: yes, no, or numbers."""
        return listed(self.answer(found) if type(found) in (bool, int, float, list) else found)

    def of_gradients(self, found: bool) -> bool:
        """Whether there are gradients: while a forward is recorded, and not at every other time."""
        return found if self.blind() or not self.stack else bool(self.answer(found))

    def answer(self, found: Any) -> Any:
        """What the call under way is told."""
        call = self.stack[-1]
        found = self.instead.get((call.module, len(call.answers)), found)
        call.answers.append((found, running.line()))
        return found
