"""What two plans send for the same layers: ours, and the one that transformers wrote by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

SENT = {"copy": 2, "reduce": 2, "gather": 1, "scatter": 1}
"""Times that a value crosses between ranks, forward and backward together: a sum is a scatter and a gather."""


def no_dearer(module: nn.Module, inputs: Any, plan: Any, styles: Mapping[str, str]) -> dict[str, bool]:
    """For the weights of ``styles`` that our axes carry: whether their axis sends no more for each parameter it cuts.

    ``styles`` are those of transformers by the name of the weight.  Of column layers of one module the gradient of what
    they are given is counted once, as if it were summed once, though transformers sums it for each of them.  Axes with
    forwards written anew, where collectives stand inside, are left out.
    """
    rows = _rows(module, inputs)
    ours, theirs, mine, cut = (defaultdict[str, float](float) for _ in range(4))
    rewritten = tuple(f"{r.module}." for r in plan.rewrites)
    hidden = set()
    for b in plan.boundaries:
        ours[b.axis] += SENT.get(b.kind, 0) * _size(b.shape) * (b.calls if b.call < 0 else 1)
    summed: set[str] = set()
    for v in plan.verdicts:
        if v.axis and len(v.shape) == 2 and not v.tied_to:
            mine[v.axis] += _size(v.shape)
            hidden |= {v.axis} if v.name.startswith(rewritten) else set()
            if style := styles.get(v.name):
                layer = v.name.removesuffix(".weight")
                cut[v.axis] += _size(v.shape)
                theirs[v.axis] += rows.get(layer, 0.0) * _of_style(style, *v.shape)
                if "rowwise" not in style and layer.rpartition(".")[0] not in summed:
                    summed.add(layer.rpartition(".")[0])
                    theirs[v.axis] += rows.get(layer, 0.0) * SENT["copy"] * v.shape[1]
    axes = {v.name: v.axis for v in plan.verdicts if v.axis}
    asked = [(name, axes[name]) for name in styles if name in axes and axes[name] not in hidden]
    return {name: ours[a] * cut[a] <= theirs[a] * mine[a] for name, a in asked if cut[a]}


def _of_style(style: str, out: int, given: int) -> int:
    """How many elements cross between ranks for one row through a layer, the sum of a column layer's gradient aside."""
    if "rowwise" in style:
        return SENT["reduce"] * out + SENT["scatter"] * given * ("split_input" in style)
    return SENT["gather"] * out * ("gather_output" in style)


def _rows(module: nn.Module, inputs: Any) -> dict[str, float]:
    """How many rows each layer is given in one forward."""
    found: dict[str, float] = defaultdict(float)
    hooks = []
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):

            def count(part: nn.Module, given: tuple[Any, ...], made: Any, name: str = name) -> None:
                found[name] += made.numel() / part.out_features

            hooks.append(part.register_forward_hook(count))
    try:
        module(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
