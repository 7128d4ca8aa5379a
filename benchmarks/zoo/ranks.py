"""What runs on each rank of the pool."""

from __future__ import annotations

import warnings
from typing import Any


def compare(mesh: Any, path: str) -> dict[str, Any]:
    """The comparison of a kept model with its converted one; on rank 0 what was found."""
    import torch

    from benchmarks.zoo.measure import of_result
    from tpconvert.spec.plan import Plan
    from tpconvert.verify.compare.checks import compare_on_rank

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, inputs, plan = torch.load(path, weights_only=False)  # our own file of a moment ago
        result = compare_on_rank(module, inputs, Plan.loads(plan), mesh)
    return of_result(result) if result is not None else {}
