"""How much a step computes, counted from the model's own forward, and how much its GPU could."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from tpconvert.analyze.trace.trees import map_tensors
from tpconvert.errors import TPConvertError
from tpconvert.planning.calls.sizes import resized
from tpconvert.planning.make import captured
from tpconvert.source import Source

PEAKS = (
    ("GB200", 2500),
    ("B200", 2250),
    ("B100", 1750),
    ("GH200", 989),
    ("H200 NVL", 835),
    ("H200", 989),
    ("H100 NVL", 835),
    ("H100 PCIe", 756),
    ("H100", 989),
    ("H800", 989),
    ("A100", 312),
    ("A800", 312),
    ("A40", 150),
    ("A30", 165),
    ("A10", 125),
    ("L40S", 362),
    ("L40", 181),
    ("L4", 121),
    ("RTX 6000 Ada", 364),
    ("RTX 4090", 165),
    ("RTX 3090", 71),
    ("MI325X", 1307),
    ("MI300X", 1307),
    ("MI250X", 383),
)
"""Part of a GPU's name -> TFLOP/s that its maker states for dense bf16 products; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a step asks of each of ``gpus``."""

    gpus: int = 1
    flops: int = 0
    """Of the whole model's products in one step over all GPUs; 0 where it is not known."""
    peak: float = 0.0
    """FLOP/s of one GPU; 0 where it is not known."""

    def rate(self, step_seconds: float) -> float | None:
        """TFLOP/s of each GPU."""
        return self.flops / (step_seconds * self.gpus * 1e12) if self.flops else None

    def share(self, step_seconds: float) -> float | None:
        """Of what each GPU could: MFU."""
        rate = self.rate(step_seconds)
        return rate * 1e12 / self.peak if rate is not None and self.peak else None


def peak_flops(name: str) -> float:
    """FLOP/s of a GPU by its name; 0 for one that is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA GeForce GT 710")
    (989000000000000.0, 0.0)
    """
    return next((peak * 1e12 for part, peak in PEAKS if part.lower() in name.lower()), 0.0)


def device_peak(device: torch.device, stated: float | None, precision: str) -> float:
    """FLOP/s: what the configuration states in TFLOP/s, else what the name of a GPU says for products in 16 bits."""
    if stated is not None:
        return stated * 1e12
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return 0.0
    return peak_flops(torch.cuda.get_device_name(device))


def model_flops(source: Source, sequences: int, length: int) -> int:
    """FLOPs of the matrix products of one step of the whole model; 0 if its forward cannot be run without values.

    Counted op by op, on one sequence of that length where the inputs are words; what is computed again for backward
    does not count.  Backward has two products for each of forward's.
    """
    shapes: list[tuple[int, ...]] = []
    map_tensors(lambda tensor: shapes.append(_shape(tensor, length)), source.inputs)
    try:
        with FlopCounterMode(display=False, custom_mapping=_APART) as counted:
            trace = captured(source.module, resized(source.inputs, shapes))
    except TPConvertError:
        return 0
    experts = sum(_grouped(node) for node in trace.nodes if "grouped_mm" in str(node.target))
    return 3 * sequences * (counted.get_total_flops() + experts)


def _grouped(node: fx.Node) -> int:
    """Products of experts, each with the rows that are its own: every row of the first meets one of them.

    Taken from the trace, since on meta torch runs them in few dtypes and widths.
    """
    a, b = (arg.meta["shape"] for arg in node.all_input_nodes[:2])
    return 2 * int(prod(a[-2:]) if len(a) > len(b) else prod(a)) * int(b[-1])


_APART = {
    getattr(torch.ops.aten, name): lambda *_, **__: 0
    for name in ("_grouped_mm", "_scaled_grouped_mm")
    if hasattr(torch.ops.aten, name)
}


def _shape(tensor: Tensor, length: int) -> tuple[int, ...]:
    """One sequence of it."""
    words = tensor.dim() == 2 and not tensor.is_floating_point()
    return (1, length) if words else (1, *tensor.shape[1:]) if tensor.dim() else ()
