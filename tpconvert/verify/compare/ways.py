"""The two models called in other ways: at another size, with padding hidden, with packed documents, at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpconvert.analyze.capture.run import descending_into_functionals
from tpconvert.checkpoint.tensors.pieces import gather_pieces
from tpconvert.errors import PlanError
from tpconvert.parallel.comm.collectives import summed
from tpconvert.planning.calls.ways import packed, ways
from tpconvert.source.blame import told
from tpconvert.verify.compare.sizes import other_size
from tpconvert.verify.measure.modes import differentiate, tensors_of
from tpconvert.verify.measure.values import UNEQUAL, gradient_of, largest, loss_of, relative

if TYPE_CHECKING:
    from tpconvert.verify.compare.checks import Pair

LOOSE = 1e-5
"""For a model as it is, which may go down to float32 inside."""


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
    with torch.no_grad(), pair.exact(), (decisions := pair.decisions()).of(True):
        try:
            whole = pair.run(pair.whole)
        except Exception as error:
            return f"{said} not tried: the model does not run so ({told(error)})."
    if mode != "other size" and any(tensor.isnan().any() for _, tensor in tensors_of(whole)):
        return f"{said} not compared: the whole model itself gives an output that is not a number."
    with torch.no_grad(), pair.exact(), decisions.of(False):
        pair.outputs(whole, pair.run(pair.local), mode)
    return ""


def compare_random(pair: Pair) -> None:
    """With dropout and other draws, ranks that hold the same must get the same.

    What is drawn is looked at as well as what comes of it: a sum over ranks hides whose numbers went into it.
    """
    expected = pair.chance
    if not pair.trains or not pair.drops or expected is None:
        return
    pair.local.zero_grad(set_to_none=True)
    drawn = pair.decisions()
    with pair.plain(), descending_into_functionals(), drawn.of(True):  # as where the whole model was seen
        output = pair.run(pair.local)
    with pair.plain():
        differentiate(loss_of(output))  # type: ignore[arg-type]
    for name, tensor in tensors_of(output):
        if tensor.is_floating_point():
            _same(pair, name, tensor.detach())
    for kind, whole, own in (("draw", expected.drawn, drawn.drawn), ("dropout", expected.dropped, drawn.dropped)):
        if pair.over_ranks(0.0 if [op for op, _ in own] == [op for op, _ in whole] else UNEQUAL):
            continue  # it left out other layers, at random
        for i, ((op, there), (_, here)) in enumerate(zip(whole, own, strict=True)):
            if pair.over_ranks(0.0 if here.shape == there.shape else UNEQUAL):
                continue
            if kind == "draw":
                _same(pair, f"{kind} {i + 1} ({op})", here.to(pair.dtype))
            else:  # of terms of a sum, some ranks may have none to drop
                kept, dropped = (summed((here == n).to(pair.dtype), pair.mesh) for n in (1, -1))
                error = UNEQUAL if ((kept > 0) & (dropped > 0)).any() else 0.0
                pair.add("replicas", f"{kind} {i + 1} ({op})", pair.over_ranks(error), "train")
    local = dict(pair.local.named_parameters(remove_duplicate=False))
    found = dict(pair.parts("parameter", lambda name: gradient_of(local[name])))
    floor = pair.floor * max((largest(p) for parts in found.values() for p in parts), default=0.0)
    bound = max(pair.bound, LOOSE)
    for name, parts in found.items():
        first = gather_pieces(parts, pair.plan[name].layout, pair.plan[name].shape)
        pair.add("replicas", f"gradient of {name}", pair.worst(name, parts, first, floor), "train", bound)


def _same(pair: Pair, name: str, tensor: Tensor) -> None:
    """Check that all ranks have this."""
    mean = summed(tensor, pair.mesh) / pair.mesh.degree
    pair.add("replicas", name, pair.over_ranks(relative(tensor, mean)), "train", max(pair.bound, LOOSE))
