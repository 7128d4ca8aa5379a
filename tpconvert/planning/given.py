"""A plan that was read from a file, held to the module that it is given for.

What tpconvert wrote was proved when it was made.  What somebody changed since is run dry as the first and the last
rank, with slices of the sequence too where it has them, and compared with what the module asks for where these axes are
cut; that the numbers are right only values show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import nn

from tpconvert.analyze.capture.run import Inputs, Trace
from tpconvert.analyze.ops.rules import load_rules
from tpconvert.analyze.trace.copies import copied, light
from tpconvert.errors import PlanError, SourceError, VerifyError
from tpconvert.parallel import parallelize
from tpconvert.parallel.comm.mesh import dry_mesh
from tpconvert.parallel.fits import check_plan
from tpconvert.planning.layers import norms_apart
from tpconvert.planning.make import captured
from tpconvert.planning.proof.held import hold
from tpconvert.spec.plan import MEND, Plan


@torch.inference_mode(False)
@torch.enable_grad()
def hold_given(
    module: nn.Module, inputs: Inputs, plan: Plan, where: str, *, changed: bool, rules: Sequence[Path] = ()
) -> None:
    """Raise PlanError where the plan of the file ``where`` is not for this module; a ``changed`` one is tried out.

    ``rules`` are those that the plan was made with.
    """
    check_plan(module, plan, where)
    if not changed or plan.tp == 1:
        return
    module, apart, known = light(module), norms_apart(plan), load_rules(rules)
    trace = captured(module, inputs, known, apart)
    sliced = (False,) if plan.slices.reason else (False, True)
    for rank, slices in product(sorted({0, plan.tp - 1}), sliced):
        local = copied(module)
        try:
            parallelize(local, plan, dry_mesh(rank, plan.tp), sequence_parallel=slices)
            _compare(trace, captured(local, inputs, known, apart), rank)
        except PlanError as error:
            raise PlanError(f"{where}: {error.message}", hint=error.hint or MEND) from None
        except SourceError as error:
            form = " with slices of the sequence" if slices else ""
            text = f"{where}: with it, rank {rank} cannot run the model{form}: {error.message}"
            raise PlanError(text, hint=MEND) from None
    plain = replace(plan, boundaries=tuple(replace(b, sliced=None, moved=False) for b in plan.boundaries))
    try:
        hold(plain, trace, trace, rules)
    except (VerifyError, PlanError) as error:
        hint = f"{MEND} One that was made with --rules needs them here too."
        raise PlanError(f"{where}: the model asks for something else: {error.message}", hint=hint) from None


def _compare(trace: Trace, found: Trace, rank: int) -> None:
    """Raise PlanError where a rank returns something of another shape."""
    whole, here = _returned(trace), _returned(found)
    for slot, shape in whole.items():
        if here.get(slot, shape) != shape:
            at = f" at {slot}" if slot else ""
            raise PlanError(
                f"with it, rank {rank} returns {list(here[slot])}{at} where the whole model returns {list(shape)}."
            )


def _returned(trace: Trace) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that a forward returns."""
    return {slot: tuple(node.meta["shape"]) for slot, node in trace.outputs.items() if "shape" in node.meta}
