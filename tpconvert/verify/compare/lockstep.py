"""All ranks in lockstep on recorded graphs: of the call with the example inputs, and of another where that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from tpconvert.analyze.capture.run import Trace, capture
from tpconvert.analyze.ops.rules import load_rules
from tpconvert.errors import SourceError
from tpconvert.planning.calls.otherwise import differing, touched
from tpconvert.planning.calls.ways import ways
from tpconvert.planning.layers import norms_apart
from tpconvert.planning.reproduce import reproduce
from tpconvert.spec.plan import Plan
from tpconvert.verify.compare.asked import Asked, asked, sliced_flow
from tpconvert.verify.measure.lastbits import checked
from tpconvert.verify.result import Check, Tolerance


class Lockstep:
    """What was found of the graphs of one module."""

    def __init__(
        self, module: nn.Module, plan: Plan, rules: Sequence[Path], tolerance: Tolerance, sliced: bool
    ) -> None:
        self.module, self.plan, self.rules, self.tolerance, self.sliced = module, plan, rules, tolerance, sliced
        self.ops: list[Check] = []
        self.asked: list[Asked] = []
        self.notes: list[str] = []
        self.parted = ""
        self.first: Trace

    def run(self, inputs: Any) -> None:
        """The call with the example inputs."""
        self.first = self.captured(inputs)
        self.compare(inputs, self.first, "eval")

    def run_other(self, inputs: Any) -> None:
        """The first other call that the module takes, where it does something else with what is cut."""
        for way in ways(self.module, inputs):
            try:
                trace = self.captured(way.inputs)
            except SourceError:
                continue
            if not any(n.meta["value"].isnan().any() for n in trace.outputs.values()):
                self.compare(way.inputs, trace, way.name)
                return

    def captured(self, inputs: Any) -> Trace:
        """The graph of one call, with values."""
        rules, apart = load_rules(self.rules), norms_apart(self.plan)
        return capture(self.module, inputs, values=True, rules=rules, apart=apart)

    def compare(self, inputs: Any, trace: Trace, mode: str) -> None:
        """Find the plan's axes in a graph, what it asks for, and every op's result."""
        found = reproduce(trace, self.plan, self.rules)
        flow = found.choice.flow
        sliced = sliced_flow(flow, self.plan) if self.sliced else None
        self.asked.append(asked(self.module, inputs, trace, found, self.plan, sliced, mode))
        if trace is not self.first and not touched(differing(self.first, trace), trace, flow):
            return
        emulation = found.emulate(sliced, self.tolerance.floor)
        ops, parted = checked(emulation, flow.ax, self.tolerance)
        self.ops += [replace(op, mode=mode) for op in ops]
        self.parted = self.parted or parted
        self.notes += [note for note in emulation.notes if note not in self.notes]
