"""A module called in another way: captured, what the plan needs for that as well, and the proof that it runs so.

The plan is held to it as it is to training (:mod:`tpconvert.planning.proof.held`).  Nothing is captured where the
forward has no argument to call it otherwise by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx, nn

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term
from tpconvert.analyze.capture.run import Trace
from tpconvert.analyze.choice.choose import Choice
from tpconvert.analyze.flow.run import Flow
from tpconvert.analyze.trace.copies import without_values
from tpconvert.errors import VerifyError
from tpconvert.planning.calls.sides import DEEPEST, Sides, asked_in, told_in
from tpconvert.planning.calls.ways import Way, ways
from tpconvert.planning.proof.compare import Calls, constants_that_differ
from tpconvert.planning.proof.held import hold
from tpconvert.planning.proof.shapes import Fault, prove_shapes
from tpconvert.planning.proof.training import Training, children, compared
from tpconvert.spec.plan import Plan

OPS, MORE = 5000, 4
"""A forward that does more ops in another call, and so many times more than in the first, is not followed further."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One capture of another call."""

    way: Way
    trace: Trace
    module: nn.Module
    """What was called: the model, without its values where the inputs are large."""
    differs: tuple[str, ...]
    """The modules that do something else than in the call that the plan is made for."""
    training: bool = False
    branched: bool = False
    """Whether it is of the other side of a branch."""

    @property
    def by_size(self) -> bool:
        """Whether that is of a branch on sizes alone, which forwards that are written anew look at."""
        return self.branched and not self.training and not self.way.turned


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

    def __init__(self, rules: Sequence[Path], branches: bool = False) -> None:
        self.rules, self.branches = rules, branches
        self.failures: list[str] = []
        """Why the forward could be called in no other way."""
        self.known: dict[bool, list[Seen]] = {}
        """Those in other ways, in evaluation and in training."""
        self.near: Set[str] | None = None
        self.sides: dict[bool, list[Seen]] = {}
        """Those of other sides of branches, for the modules that were :attr:`near` when these were asked for."""
        self.reached: list[Seen] = []
        """The sides of branches that were reached in evaluation."""
        self.chosen: list[tuple[Seen, Choice]] = []
        """The plan's axes on each capture, of the plan that was held last."""
        self.at: Seen
        """The capture that a plan was held to last."""

    @property
    def traces(self) -> list[Trace]:
        """What was captured."""
        return [seen.trace for mode in (*self.known.values(), *self.sides.values()) for seen in mode]

    @property
    def flows(self) -> list[Flow]:
        """The flows of the calls that a plan was held to last."""
        return [choice.flow for _, choice in self.chosen]

    def held(self, plan: Plan, training: Training, flow: Flow) -> Plan:
        """The plan, whose flow is given, with what other calls need.

        Raises VerifyError where one of them asks for something else.
        """
        self.chosen = []
        for seen in self.seen(training, flow, plan):
            if seen.branched and not within_reach(seen, training.trace, flow, plan):
                continue
            self.at = seen

            def evaluated(ax: Axes, seen: Seen = seen) -> Evaluated:
                return Evaluated(Training(seen.module, seen.way.inputs, ax))

            asked = None if seen.training else evaluated
            found = hold(plan, training.trace, seen.trace, self.rules, asked, guarded=seen.by_size)
            plan = found.plan
            if seen.branched and seen.training:
                _refuse_written(plan, seen.differs)
            self.chosen.append((seen, found.choice))
        return plan

    def faults(self, plan: Plan, training: Training) -> list[Fault]:
        """The modules that do something else in another call, and do not run there as planned."""
        for seen, choice in self.chosen:
            if not (met := touched(seen.differs, seen.trace, choice.flow)):
                continue
            if seen.by_size and any(r.module in seen.differs for r in plan.rewrites):
                continue  # which refuse such a call
            among = {a for n in met for a in choice.flow.atoms(n)} if all(n in choice.flow.cut for n in met) else None
            found = prove_shapes(seen.module, seen.way.inputs, seen.trace, choice, plan, seen.training, among)
            if found:
                return [replace(f, why=f"{seen.way.name} {f.why}") for f in found]
        return []

    def seen(self, training: Training, flow: Flow, plan: Plan) -> list[Seen]:
        """The captures that a plan is held to: in evaluation, and in training too where that takes another path."""
        near = None if self.branches else asking_near(training.trace, training.other, flow, plan)
        if near != self.near:
            self.near, self.sides, self.reached = near, {}, []
        for mode in (False, True):
            if mode in self.known and mode in self.sides:
                continue
            elsewhere = mode and training.other is not None and bool(training.elsewhere())
            if mode not in self.known:
                self.known[mode] = list(self._asked(training, mode)) if elsewhere or not mode else []
            self.sides[mode] = list(self._sides(training, mode, elsewhere))
        return [seen for mode in (False, True) for seen in (*self.known[mode], *self.sides[mode])]

    def _sides(self, training: Training, mode: bool, elsewhere: bool) -> Iterator[Seen]:
        """The sides of branches that the inputs do not take; in training what it has besides or does otherwise."""
        if self.near is not None and not self.near:
            return iter(())
        anew = elsewhere or not mode or asks_more(training)
        return self._branched(training, mode) if anew else self._trained(training)

    def _asked(self, training: Training, mode: bool) -> Iterator[Seen]:
        """The first other way that the forward takes, in this mode."""
        failures: list[str] = []
        seen = self._first(ways(training.module, training.inputs), training, mode, failures)
        self.failures += failures[:1] if seen is None else []
        if seen is not None:
            yield replace(seen, differs=differing(training.trace, seen.trace))

    def _branched(self, training: Training, mode: bool) -> Iterator[Seen]:
        """The calls that reach other sides of branches, in this mode, and sides of the branches that lie there."""
        rules = training.trace.rules
        ax = Axes(training.other, rules) if mode and training.other is not None else training.ax
        mine = {False: Calls(ax.trace)}
        left = [Sides(ax, Way("", training.inputs), near=self.near)]
        known = asked_in(ax.trace)
        while left:
            for side in (sides := left.pop(0)):
                seen = self._first(side, training, mode, [])
                if seen is None:
                    continue
                sides.told |= told_in(seen.trace)
                if self.near is None and sides.depth < DEEPEST and (more := asked_in(seen.trace) - known):
                    left.append(Sides(Axes(seen.trace, rules), seen.way, frozenset(known), sides.depth + 1))
                    known |= more
                self.reached += [seen] if seen.way.asked and not mode else []
                if seen.way.large not in mine:  # without values a forward may do other ops, at any size
                    alike = self._first([Way("", training.inputs, large=True)], training, mode, [])
                    mine[True] = Calls(alike.trace) if alike is not None else mine[False]
                if differs := branching(mine[seen.way.large], Calls(seen.trace)):
                    yield replace(seen, differs=differs, branched=True)

    def _trained(self, training: Training) -> Iterator[Seen]:
        """The sides that were reached in evaluation and that training does something else at than it does elsewhere."""
        if training.other is None:
            return
        usual = set(branching(Calls(training.trace), Calls(training.other)))
        for reached in self.reached:
            seen = self._first([reached.way], training, True, [])
            if seen is not None and set(branching(Calls(reached.trace), Calls(seen.trace))) - usual:
                differs = branching(Calls(training.other), Calls(seen.trace))
                yield replace(seen, differs=differs, branched=True)

    def _first(self, calls: Iterable[Way], training: Training, mode: bool, failures: list[str]) -> Seen | None:
        """The first of these calls that the forward takes; ``failures`` say why it takes those before it not."""
        drawn = training.other.drawn if mode and training.other is not None else None
        most = OPS + MORE * len(training.trace.graph.nodes)
        for way in calls:
            at = training
            if way.large:
                at = Training(without_values(training.module), way.inputs, training.ax)
            trace = at.captured(way.inputs, training=mode, drawn=drawn, turned=way.turned, most=most)
            if isinstance(trace, Trace):
                return Seen(way, trace, at.module, (), mode)
            failures.append(f"{way.name}: {trace}")
        return None


def _refuse_written(plan: Plan, differs: Sequence[str]) -> None:
    """Raise VerifyError where a forward is written anew that takes another path in training alone."""
    if paths := [r.module or "the model" for r in plan.rewrites if r.module in differs]:
        raise VerifyError(f"The forward of {paths[0]} is written anew and takes another path in training there.")


def asks_more(training: Training) -> bool:
    """Whether forwards in training decide more than they do in evaluation."""
    if training.other is None:
        return False
    here, there = (sum(len(c.decided) + len(c.answers) for c in t.calls) for t in (training.trace, training.other))
    return there > here


def asking_near(trace: Trace, trained: Trace | None, flow: Flow, plan: Plan) -> frozenset[str]:
    """The modules whose own forwards ask about values or gradients, and are given, make, pass on or return what is cut.

    Whatever others do instead, they do it with whole values.
    """
    asking = {c.module for t in (trace, trained) if t is not None for c in t.calls if c.answers}
    if not asking:
        return frozenset()
    cut = {n for n in trace.nodes if not flow.whole(n) or n in flow.gathered}
    joined = {b.module for b in plan.boundaries if b.side == "output" and b.kind in ("reduce", "gather")}
    met = {n.meta["call"].module for n in cut if n.meta["call"] is not None}
    for call in trace.calls:
        given, returned = (not cut.isdisjoint(values.values()) for values in (call.inputs, call.outputs))
        met |= {call.module} if given or returned else set()
        if call.parent is not None and (given or (returned and call.module not in joined)):
            met.add(call.parent.module)
    return frozenset(asking & met)


def branching(mine: Calls, other: Calls) -> tuple[str, ...]:
    """The modules that take another path, and those that are called there alone."""
    return tuple(p for p in other.of_module if constants_that_differ(mine[p], other[p]) != {})


def differing(trace: Trace, other: Trace) -> tuple[str, ...]:
    """The modules that do something else on ``other``, and those that only it calls."""
    found = [path for path, differs in compared(trace, other).items() if differs != {}]
    called = {c.module for c in trace.calls}
    return tuple(dict.fromkeys((*found, *(c.module for c in other.calls if c.module not in called))))


def within_reach(seen: Seen, trace: Trace, flow: Flow, plan: Plan) -> bool:
    """Whether what lies at the other side of a branch may meet a value of a cut region.

    It cannot where nothing that the forward is given, makes or is returned is one, where it calls no other part, and
    reads no parameter that is cut.
    """
    differs = set(seen.differs)
    cut = {node for name, node in seen.trace.parameters.items() if plan[name].layout.cut}
    own = (n for n in seen.trace.nodes if n.meta["call"] is not None and n.meta["call"].module in differs)
    if any(not cut.isdisjoint(n.all_input_nodes) for n in own):
        return True
    values = {n for n in trace.nodes if n.meta["call"] is not None and n.meta["call"].module in differs}
    for call in trace.calls:
        if call.module in differs or (call.parent is not None and call.parent.module in differs):
            values.update(call.inputs.values(), call.outputs.values())
    mine, theirs = children(trace), children(seen.trace)
    return any(set(theirs.get(p, ())) - set(mine.get(p, ())) for p in differs) or any(
        not flow.whole(n) or n in flow.gathered for n in values
    )


def touched(differs: Sequence[str], trace: Trace, flow: Flow) -> set[fx.Node]:
    """The values of cut regions that modules which do something else meet."""
    own = (node for node in trace.nodes if node.meta["call"] is not None and node.meta["call"].module in differs)
    met = (n for node in own for n in (node, *node.all_input_nodes))
    return {n for n in met if not flow.whole(n) or n in flow.gathered}
