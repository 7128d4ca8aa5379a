"""A model of any table and the proof of its plan, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from tests import hf_models, models
from tests.verify.own import OWN
from tpconvert.parallel import Mesh
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import Result, compare_on_rank

Disturb = Callable[[nn.Module, Mesh], None]


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The named model of any table and its inputs."""
    vanilla = models.MODELS | OWN
    return vanilla[name]() if name in vanilla else hf_models.build(name)


@cache
def planned(name: str, tp: int) -> Plan:
    """Its plan."""
    return make_plan(*built(name), tp=tp)


def proved(mesh: Mesh, name: str, plan: str, disturb: Disturb | None = None) -> Result | None:
    """What the comparison finds; ``plan`` is the text of a plan.json."""
    return compare_on_rank(*built(name), Plan.loads(plan), mesh, disturb=disturb)
