"""A plan that was read from a file, held to the module that it is given for.

What tpconvert wrote was proved when it was made.  What somebody changed since is run dry as the first and the last
rank, which shows what does not fit together; that the numbers are right only values show.
"""

from __future__ import annotations

from torch import nn

from tpconvert.analyze.capture.run import Inputs, Trace
from tpconvert.analyze.trace.copies import copied
from tpconvert.errors import PlanError, SourceError
from tpconvert.parallel import parallelize
from tpconvert.parallel.comm.mesh import dry_mesh
from tpconvert.parallel.fits import check_plan
from tpconvert.planning.layers import norms_apart
from tpconvert.planning.make import captured, light
from tpconvert.spec.plan import MEND, Plan


def hold_given(module: nn.Module, inputs: Inputs, plan: Plan, where: str, *, changed: bool) -> None:
    """Raise PlanError where the plan of the file ``where`` is not for this module; ``changed`` ones are tried out."""
    check_plan(module, plan, where)
    if not changed or plan.tp == 1:
        return
    module, apart = light(module), norms_apart(plan)
    whole = _returned(captured(module, inputs, apart=apart))
    for rank in sorted({0, plan.tp - 1}):
        local = copied(module)
        try:
            parallelize(local, plan, dry_mesh(rank, plan.tp))
            found = _returned(captured(local, inputs, apart=apart))
        except PlanError as error:
            raise PlanError(f"{where}: {error.message}", hint=error.hint or MEND) from None
        except SourceError as error:
            raise PlanError(f"{where}: with it, rank {rank} cannot run the model: {error.message}", hint=MEND) from None
        for slot, shape in whole.items():
            if found.get(slot, shape) != shape:
                raise PlanError(
                    f"{where}: with it, rank {rank} returns {list(found[slot])}{f' at {slot}' if slot else ''} where "
                    f"the whole model returns {list(shape)}.",
                    hint=MEND,
                )


def _returned(trace: Trace) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that a forward returns."""
    return {slot: tuple(node.meta["shape"]) for slot, node in trace.outputs.items() if "shape" in node.meta}
