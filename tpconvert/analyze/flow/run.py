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

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.flow.backward import Backward, slice_of
from tpconvert.analyze.flow.forward import (
    check_sums,
    gather_outputs,
    join_parts,
    make_local,
    scatter_wholes,
    walk,
)
from tpconvert.analyze.flow.once import check_once, is_zero
from tpconvert.analyze.flow.states import ConflictError, Flow, Host, Hosts, Placed, involved

__all__ = ["ConflictError", "Flow", "Host", "Hosts", "Placed", "involved", "is_zero", "slice_of", "trace_flow"]


def trace_flow(
    ax: Axes,
    cut_atoms: Iterable[Term],
    inline: frozenset[fx.Node] = frozenset(),
    early: frozenset[str] = frozenset(),
    lazy: frozenset[Call] = frozenset(),
) -> Flow:
    """The flow of one choice of atoms.

    ``inline`` lookups are summed where they are made; the forwards of ``early`` modules see no pending sums; gradients
    of ``lazy`` calls are summed at their own inputs, if they can be.  Raises ConflictError where the atoms cannot be
    cut.
    """
    flow = Flow(ax, frozenset(cut_atoms), inline, early, lazy)
    hosts = Hosts(ax)
    check_sums(flow)
    join_parts(flow, hosts)
    while walk(flow, hosts) or make_local(flow) or gather_outputs(flow, hosts):
        pass
    check_once(flow)
    scatter_wholes(flow, hosts)
    _close_zones(flow, hosts)
    return flow


def _close_zones(flow: Flow, hosts: Hosts) -> None:
    """Find the copies.  Where they fit no boundary, values that count once may give terms of their gradients too."""
    try:
        _find_copies(flow, hosts)
        if not flow.counted or all(p.host is not None for p in flow.copies):
            return
    except ConflictError:
        if not flow.counted:
            raise
    before = len([p for p in flow.copies if p.host is None])
    flow.paired = True
    _find_copies(flow, hosts)
    if before and before <= len([p for p in flow.copies if p.host is None]):
        flow.paired = False
        _find_copies(flow, hosts)


def _find_copies(flow: Flow, hosts: Hosts) -> None:
    """Find the copies; where one would stand inside a forward, try to close its zones at that module's input."""
    lazy = flow.lazy
    hopeless: frozenset[Call] = frozenset()
    while True:
        _clear(flow)
        try:
            Backward(flow, hosts, lazy - hopeless).run()
            inline = frozenset(p.call for p in flow.copies if p.host is None and p.call is not None)
        except ConflictError:
            if not lazy - hopeless:
                raise
            inline = lazy
        again = inline & lazy - hopeless
        if again:
            hopeless |= again
        elif inline - lazy:
            lazy |= inline
        else:
            return


def _clear(flow: Flow) -> None:
    flow.copies.clear()
    flow.zone.clear()
    flow.sum_grad.clear()
