"""Compile the repeated layers of a model, so that the network hides behind arithmetic where it can."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from tpconvert.errors import PlanError
from tpconvert.parallel.comm.random import draws_apart, meshes_of
from tpconvert.parallel.layers.linear import RowParallelLinear


def compile_layers(
    module: nn.Module, *, gather_again: bool = True, fullgraph: bool = True, **options: Any
) -> list[nn.Module]:
    """Compile each repeated layer of ``module`` in place, and return them.

    A layer is one graph forward and one backward, in which sums and gathers run beside arithmetic that does not need
    them, and narrow products of one value (q, k and v) are one.  With ``gather_again`` a layer keeps a rank's slice of
    what sequence parallelism gathers, and gathers it again for its backward.  Norms that stand beside the layers are
    compiled too.  ``options`` are those of torch's compiler.  Raises PlanError where there are no layers, and warns
    where ranks would draw numbers of their own.
    """
    from tpconvert.parallel.compiled.schedule import HideCollectives, JointPass  # loads torch's compiler
    from tpconvert.parallel.compiled.substitute import pairs_of

    layers = list(layers_of(module))
    if not layers:
        raise PlanError(f"{type(module).__name__} has no list of equal layers to compile.", hint="Compile it whole.")
    warn_of_equal_draws(module, layers)
    own: dict[str, Any] = {
        "post_grad_custom_post_pass": HideCollectives(pairs_of(module)),
        "joint_custom_post_pass": JointPass(gather_again),
        "reorder_for_peak_memory": False,
    }
    for part in module.modules():
        if isinstance(part, RowParallelLinear):
            part.tp_hides = True
    for layer in layers:
        layer.compile(fullgraph=fullgraph, options={**own, **options})
    for norm in norms_of(module):
        norm.compile(options={**own, **options})
    return layers


def warn_of_equal_draws(module: nn.Module, layers: list[nn.Module]) -> None:
    """Tell, on the first rank, where compiled layers draw numbers that the ranks of plain ones draw apart."""
    inside = {part for layer in layers for part in layer.modules()}
    apart = [path for path, part in module.named_modules() if part in inside and draws_apart(part)]
    if apart and all(mesh.rank == mesh.dp_rank == 0 for mesh in meshes_of(module)):
        more = f" and {len(apart) - 1} like it" if apart[1:] else ""
        warnings.warn(
            f"{apart[0]}{more}: compiled, all tp ranks drop the same entries of their parts, not each its own. "
            "Set this dropout to 0 if that matters, or do not compile.",
            stacklevel=3,
        )


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """The repeated layers: members of the outermost lists of modules of one class that have parameters."""
    for child in module.children():
        items = list(child.children())
        listed = isinstance(child, nn.ModuleList | nn.Sequential) and len(items) > 1
        if listed and len({type(i) for i in items}) == 1 and next(items[0].parameters(), None) is not None:
            yield from items
        else:
            yield from layers_of(child)


def norms_of(module: nn.Module) -> Iterator[nn.Module]:
    """What stands beside the repeated layers and has vectors for parameters only, and no parts or state."""
    layers = set(layers_of(module))
    lists = {m for m in module.modules() if layers.intersection(m.children())}
    for holder in module.modules():
        for beside in holder.children() if lists.intersection(holder.children()) else ():
            parameters = list(beside.parameters())
            vectors = bool(parameters) and all(p.dim() == 1 for p in parameters)
            if vectors and not (list(beside.children()) or list(beside.buffers())):
                yield beside
