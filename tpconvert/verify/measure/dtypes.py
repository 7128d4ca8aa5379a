"""The dtype and the device in which two models are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tpconvert.analyze.trace.trees import map_tensors
from tpconvert.errors import NotRunError
from tpconvert.source.blame import told, users_line
from tpconvert.verify.measure.modes import Exact, Widened, call
from tpconvert.verify.result import BFLOAT16, FLOAT32, FLOAT64, Tolerance

PRECISIONS = {"float64": (FLOAT64, FLOAT32), "float32": (FLOAT32,), "bfloat16": (BFLOAT16,)}
"""What is asked for -> what is tried, in that order."""


def precision(
    module: nn.Module, inputs: Any, tolerances: Sequence[Tolerance] = (FLOAT64, FLOAT32)
) -> tuple[Tolerance, Any]:
    """Make the model float64 where its kernels have float64, else float32; or what else is asked for, in that order."""
    for tolerance in tolerances:
        wide = Widened(dtype_of(tolerance))
        module._apply(wide.made)
        given = map_tensors(wide.made, inputs)
        try:
            with torch.no_grad(), Exact(dtype_of(tolerance)):
                call(module, given)
            return tolerance, given
        except (RuntimeError, NotImplementedError) as error:
            failure = error
    line = users_line(failure)
    where = f"{line.filename}:{line.lineno} in {line.name}: " if line else ""
    names = " nor in ".join(str(dtype_of(t)).removeprefix("torch.") for t in tolerances)
    without = "neither" if len(tolerances) > 1 else "not"
    raise NotRunError(f"The model runs {without} in {names}: {where}{told(failure)}") from failure


def dtype_of(tolerance: Tolerance) -> torch.dtype:
    """The dtype that a tolerance is for."""
    return {FLOAT64: torch.float64, FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}[tolerance]


def generators(device: torch.device) -> list[torch.device]:
    """The devices besides the CPU whose random numbers a model may draw."""
    return [device] if device.type == "cuda" else []
