"""The two models called in other ways: at another size, with padding hidden, with packed documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpconvert.errors import PlanError
from tpconvert.planning.calls.ways import packed, ways
from tpconvert.source.blame import told
from tpconvert.verify.compare.sizes import other_size
from tpconvert.verify.measure.decided import Decisions
from tpconvert.verify.measure.modes import tensors_of

if TYPE_CHECKING:
    from tpconvert.verify.compare.checks import Pair


def compare_other_size(pair: Pair) -> None:
    """Outputs for fewer rows and a shorter sequence than the plan was made with, where the model takes them."""
    smaller = other_size(pair.inputs)
    if smaller is not None and (refusal := _compare(pair, smaller, "other size", "Another batch size and length were")):
        pair.note(refusal)


def compare_ways(pair: Pair) -> None:
    """Outputs and gradients in the first other way in which the whole model has both.

    Fused attention in bfloat16 has no gradients for rows that see nothing, as padding on the left makes them.
    """
    refusals = []
    for way in ways(pair.whole, pair.inputs):
        pair.mislaid = False
        refusals.append(_compare(pair, way.inputs, way.name, f"A call {way.name} was", gradients=True))
        if not (refusals[-1] or pair.mislaid):
            break
    if refusals and all(refusals):
        pair.note(refusals[0])
    for way in packed(pair.whole, pair.inputs):
        _compare(pair, way.inputs, way.name, f"A call {way.name} was")


def _compare(pair: Pair, inputs: Any, mode: str, said: str, gradients: bool = False) -> str:
    """Compare what both return for other inputs; or why there is nothing to compare of the whole model.

    Inputs that ranks cannot share are left out, and a plan that refuses them is told.
    """
    given = pair.fit(inputs)
    if given is None:
        return ""
    kept, pair.inputs = pair.inputs, given
    try:
        refusal = _outputs(pair, mode, said)
        if gradients and not refusal:
            pair.run_mode("train", mode)
        return refusal
    except PlanError as error:
        pair.note(f"{said} not tried: the plan refuses this ({error.message})")
        return ""
    finally:
        pair.inputs = kept


def _outputs(pair: Pair, mode: str, said: str) -> str:
    """Compare what both return in evaluation; or why the whole model gives no numbers."""
    for module in (pair.whole, pair.local):
        module.eval()
    with torch.no_grad(), pair.exact(), (decisions := Decisions(pair.dtype)).of(True):
        try:
            whole = pair.run(pair.whole)
        except Exception as error:
            return f"{said} not tried: the model does not run so ({told(error)})."
    if mode != "other size" and any(tensor.isnan().any() for _, tensor in tensors_of(whole)):
        return f"{said} not compared: the whole model itself gives an output that is not a number."
    with torch.no_grad(), pair.exact(), decisions.of(False):
        pair.outputs(whole, pair.run(pair.local), mode)
    return ""
