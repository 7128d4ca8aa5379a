"""What a graph does not have of a plan is told by its axis, so that only that one need be given up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tpconvert.planning import make_plan
from tpconvert.planning.make import captured
from tpconvert.planning.reproduce import NotHeldError, reproduce


def test_an_axis_that_is_not_found_is_named() -> None:
    torch.manual_seed(0)
    parts = [
        nn.Linear(8, 20),
        nn.Tanh(),
        nn.Linear(20, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 28),
        nn.Tanh(),
        nn.Linear(28, 8),
    ]
    module, inputs = nn.Sequential(*parts), (torch.randn(3, 8),)
    plan = make_plan(module, inputs, tp=2)
    lost = next(a for a in plan.axes if a.size == 28)
    other = replace(plan, axes=tuple(replace(a, size=14) if a is lost else a for a in plan.axes))
    reproduce(captured(module, inputs), plan)
    with pytest.raises(NotHeldError, match="no axis of 14 runs through all") as told:
        reproduce(captured(module, inputs), other)
    assert told.value.axes == {lost.name}
