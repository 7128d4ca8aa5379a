"""Axes that are as large as a size of the inputs in the captured call, and in no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from tpconvert.analyze.axes.terms import leaves
from tpconvert.analyze.trace.provenance import expression

if TYPE_CHECKING:
    from tpconvert.analyze.axes.run import Axes


def block_chance(ax: Axes) -> None:
    """Block dims that a forward makes as large as the inputs are, where no size of the inputs is among their factors.

    The inputs' sizes that parameters ask for are what they are.
    """
    inputs = ax.input_atoms
    free = inputs - {a for node in ax.trace.parameters.values() for t in ax.of(node) for a in leaves(t)}
    for node, sites in ax.sites.items():
        for site in sites:
            size = argument(node, site.path)
            made = expression(size) if isinstance(size, int) else None  # a tensor of one number may be given as a size
            if not isinstance(made, tuple) or made[0] != "dim" or not isinstance(made[1].meta["shape"], tuple):
                continue
            asked = leaves(ax.of(made[1])[made[2]])
            if asked and asked <= free and not leaves(site.term) & inputs:
                ax.block(site.term, node, "a size of the inputs stands inside the cut dim, so no plan fits all sizes")


def argument(node: fx.Node, path: tuple[Any, ...]) -> Any:
    """The argument at ``path`` of ``(args, kwargs)``."""
    value: Any = (node.args, node.kwargs)
    for step in path:
        value = getattr(value, step) if isinstance(value, slice) else value[step]
    return value
