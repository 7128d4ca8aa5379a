"""Gradients that nobody would sum, where a column-parallel layer is given a value that was made in a way not planned.

Such a layer gives its input a term of a gradient, and a copy sums the terms.  It stands where the value came from when
the model was planned.  In a further turn of a loop, say, the forward may make that value itself, and there is no copy:
the term then meets what was summed over ranks or put together, whose backward takes it for the whole gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from tpconvert.errors import PlanError
from tpconvert.parallel.comm import collectives

MOST = 256
"""Nodes of autograd that are looked at; a value that is further from its copy is taken as it is."""


def refusing_unsummed(x: Tensor, path: str) -> Tensor:
    """The input ``x`` of a layer, whose gradient is refused, if one comes, where it would be taken for whole.

    A backward through it then raises PlanError.  Where nothing is made of what the layer returns, none comes.
    """
    if not _meets_whole(x):
        return x
    guarded = x.view_as(x)
    guarded.register_hook(partial(_refuse, path))
    return guarded


def _meets_whole(x: Tensor) -> bool:
    """Whether a gradient, on its way back from ``x``, meets what takes it for whole before anything sums it."""
    pending: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    while pending and len(seen) < MOST:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", None)
        ways = getattr(node, "ways", None) if getattr(function, "__module__", "") == collectives.__name__ else None
        if ways is None:
            if getattr(function, "takes_whole", False):
                return True
            pending += [each for each, _ in node.next_functions]
        elif _takes_whole(*ways[:2]):
            return True
    return False


def _takes_whole(there: Any, back: Any) -> bool:
    """Whether a collective puts together what ranks have, and takes the gradient it is given for that of all of it."""
    together = (collectives.summed, collectives.summed_slice, collectives.joined, collectives.joined_slices)
    return there in together and back not in (collectives.summed, collectives.summed_slice)


def _refuse(path: str, _: Tensor) -> None:
    raise PlanError(
        f"{path}: it was given a value whose gradient nobody sums over ranks: when the model was planned, that was "
        "made in another way.",
        hint="Plan the model with inputs for which its forward takes this way (a loop as many turns).",
    )
