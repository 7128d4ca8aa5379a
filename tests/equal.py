"""The comparison of a converted model with the whole one, for files of small networks."""

from __future__ import annotations

import importlib
from typing import Any

from tpconvert.parallel import Mesh
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank


def difference(mesh: Mesh, file: str, plan: str, *which: Any) -> str | None:
    """What differs on rank 0, None where nothing does.

    ``file`` is the test's ``__name__``; its ``built(*which)`` gives the module and its inputs, the same on each rank.
    """
    module, inputs = importlib.import_module(file).built(*which)
    result = compare_on_rank(module, inputs, Plan.loads(plan), mesh)
    return None if result is None or result.equal else result.verdict()
