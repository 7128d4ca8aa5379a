"""A module called in another way: captured, what the plan needs for that as well, and the proof that it runs so.

The plan is held to it as it is to training (:mod:`tpconvert.planning.proof.held`).  Nothing is captured where the
forward has no argument to call it otherwise by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term
from tpconvert.analyze.capture.run import Trace
from tpconvert.analyze.choice.choose import Choice
from tpconvert.analyze.flow.run import Flow
from tpconvert.planning.proof.held import hold
from tpconvert.planning.proof.shapes import Fault, prove_shapes
from tpconvert.planning.proof.training import Training, compared
from tpconvert.planning.proof.ways import Way, ways
from tpconvert.spec.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One capture of another call."""

    way: Way
    trace: Trace
    differs: tuple[str, ...]
    """The modules that do something else than in the call that the plan is made for."""
    training: bool = False


class Evaluated:
    """What training does otherwise than a capture in evaluation, asked of forwards that are written anew alone.

    Where draws begin to differ between ranks is known from the call that the plan was made for.
    """

    def __init__(self, training: Training) -> None:
        self.training = training

    @property
    def fixed(self) -> set[Term]:
        """Sizes of the inputs that were never seen to be others."""
        return self.training.fixed

    def refusal(self, path: str) -> str:
        """Why a forward cannot be written anew."""
        return self.training.refusal(path)

    def constants(self, path: str) -> dict[Any, Any]:
        """What differs in training."""
        return self.training.constants(path)

    def get(self, path: str) -> dict[Any, Any]:
        """What differs in training and is asked of every module: not looked at."""
        return {}


class Otherwise:
    """The other calls of one module, each captured once."""

    def __init__(self, rules: Sequence[Path]) -> None:
        self.rules = rules
        self.failures: list[str] = []
        """Why the forward could be called in no other way."""
        self.known: dict[bool, Seen | None] = {}
        self.chosen: list[tuple[Seen, Choice]] = []
        """The plan's axes on each capture, of the plan that was held last."""
        self.at: Seen
        """The capture that a plan was held to last."""

    @property
    def traces(self) -> list[Trace]:
        """What was captured."""
        return [seen.trace for seen in self.known.values() if seen is not None]

    def held(self, plan: Plan, training: Training) -> Plan:
        """The plan, with what other calls need.  Raises VerifyError where one of them asks for something else."""
        self.chosen = []
        for seen in self.seen(training):
            self.at = seen

            def evaluated(ax: Axes, inputs: Any = seen.way.inputs) -> Evaluated:
                return Evaluated(Training(training.module, inputs, ax))

            found = hold(plan, training.trace, seen.trace, self.rules, None if seen.training else evaluated)
            plan = found.plan
            self.chosen.append((seen, found.choice))
        return plan

    def faults(self, plan: Plan, training: Training) -> list[Fault]:
        """The modules that do something else in another call, and do not run there as planned."""
        for seen, choice in self.chosen:
            if not (met := touched(seen.differs, seen.trace, choice.flow)):
                continue
            among = {a for n in met for a in choice.flow.atoms(n)} if all(n in choice.flow.cut for n in met) else None
            found = prove_shapes(training.module, seen.way.inputs, seen.trace, choice, plan, seen.training, among)
            if found:
                return [replace(f, why=f"{seen.way.name} {f.why}") for f in found]
        return []

    def seen(self, training: Training) -> list[Seen]:
        """The captures that a plan is held to: in evaluation, and in training too where that takes another path."""
        modes = (False, True) if training.other is not None and training.elsewhere() else (False,)
        for mode in modes:
            if mode not in self.known:
                self.known[mode] = self._captured(training, mode)
        return [seen for mode in modes if (seen := self.known[mode]) is not None]

    def _captured(self, training: Training, mode: bool) -> Seen | None:
        """The first other way that the forward takes, in this mode."""
        drawn = training.other.drawn if mode and training.other is not None else None
        failures = []
        for way in ways(training.module, training.inputs):
            trace = training.captured(way.inputs, training=mode, drawn=drawn)
            if isinstance(trace, Trace):
                return Seen(way, trace, differing(training.trace, trace), mode)
            failures.append(f"{way.name}: {trace}")
        self.failures += failures[:1]
        return None


def differing(trace: Trace, other: Trace) -> tuple[str, ...]:
    """The modules that do something else on ``other``, and those that only it calls."""
    found = [path for path, differs in compared(trace, other).items() if differs != {}]
    called = {c.module for c in trace.calls}
    return tuple(dict.fromkeys((*found, *(c.module for c in other.calls if c.module not in called))))


def touched(differs: Sequence[str], trace: Trace, flow: Flow) -> set[fx.Node]:
    """The values of cut regions that modules which do something else meet."""
    own = (node for node in trace.nodes if node.meta["call"] is not None and node.meta["call"].module in differs)
    met = (n for node in own for n in (node, *node.all_input_nodes))
    return {n for n in met if not flow.whole(n) or n in flow.gathered}
