"""What a choice of axes makes of every value, forward and backward, and the collectives that follow.

Forward, a value on a rank is *cut* (a part), *partial* (a term of a sum) or *whole*.  A contraction over a cut axis
makes a partial value, which stays partial through linear ops and is *reduced* as late as a module boundary allows.

Backward, the gradient of a value that every rank holds may be a term of a sum: that is so where the value enters an
op with a cut or partial result.  Such a gradient is summed once for each value, at the nearest boundary upstream (a
*copy*), or where the parameter is read.  Values between the boundary and the op form a zone of partial gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from tpconvert.analyze.axes import Axes
from tpconvert.analyze.backward import Backward, slice_of
from tpconvert.analyze.forward import check_once, check_sums, gather_outputs, is_zero, make_local, scatter_wholes, walk
from tpconvert.analyze.states import ConflictError, Flow, Host, Hosts, Placed, involved
from tpconvert.analyze.terms import Term

__all__ = ["ConflictError", "Flow", "Host", "Hosts", "Placed", "involved", "is_zero", "slice_of", "trace_flow"]


def trace_flow(ax: Axes, cut_atoms: Iterable[Term], inline: frozenset[fx.Node] = frozenset()) -> Flow:
    """The flow of one choice of atoms; ``inline`` lookups are summed where they are made.

    Raises ConflictError where they cannot be cut.
    """
    flow = Flow(ax, frozenset(cut_atoms), inline)
    hosts = Hosts(ax)
    check_sums(flow)
    while walk(flow, hosts) or make_local(flow) or gather_outputs(flow, hosts):
        pass
    check_once(flow)
    scatter_wholes(flow, hosts)
    Backward(flow, hosts).run()
    return flow
