"""Turn a whole module into a rank's part of it, in place, as a plan says."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from tpconvert.errors import PlanError
from tpconvert.parallel.calls.boundaries import Crossing, add_boundaries, crossing
from tpconvert.parallel.calls.kept import keep, refuse_converted
from tpconvert.parallel.calls.rewrite import rewritten_forms
from tpconvert.parallel.calls.surroundings import surround
from tpconvert.parallel.comm.collectives import parts_of, take
from tpconvert.parallel.comm.mesh import Mesh
from tpconvert.parallel.comm.random import add_switches
from tpconvert.parallel.fits import check_plan
from tpconvert.parallel.grads.together import sum_together
from tpconvert.parallel.layers.linear import (
    ColumnParallelLinear,
    DataSyncBatchNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    refuse_unsupported,
)
from tpconvert.parallel.layers.reads import Read, become, chains
from tpconvert.spec.layout import Layout, local_size
from tpconvert.spec.plan import Boundary, Edit, Plan, Slices, Verdict
from tpconvert.spec.sliced import sliced_form

WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What ``torch.compile(part)`` and torch's activation checkpointing put into the names of a part's tensors."""


@torch.inference_mode(False)
def parallelize(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    gather_output: bool = True,
    sequence_parallel: bool = False,
    waves: int | None = None,
) -> nn.Module:
    """The same module, now this rank's part.

    Its parameters may be whole, or on meta (then they stay there, in their local shapes, for :func:`load_local`).
    ``gather_output=False`` leaves the logits cut, for a vocab-parallel loss; :func:`output_gathers` says which and how.
    On a GPU rows of such logits may have gaps between them, where a rank's part of the words is of an odd size.
    ``sequence_parallel`` leaves each rank a slice of the tokens between cut regions, where the plan knows how; the
    length of a sequence must then be a multiple of the degree, or the size of a batch where whole sequences are shared.
    ``waves`` is in how many shares of the tokens regions end: each is summed over ranks while the next is computed.
    Without, that is one; two in compiled layers where what is summed is copied between GPUs.
    """
    if waves is not None and waves < 1:
        raise PlanError(f"waves is {waves}; it is a number of shares, at least 1.")
    summed = frozenset(b.module for b in plan.boundaries if _sums_output(b))
    plan = sliced_form(plan) if sequence_parallel and mesh.degree > 1 else plan
    check(module, plan, mesh)
    if mesh.degree == 1:
        return module
    mesh.connect(v.layout for v in plan.verdicts)
    cut_tensors(module, plan.verdicts, mesh)
    for edit in plan.edits:
        apply_edit(module, edit, mesh)
    left_out = () if gather_output else output_gathers(plan)
    boundaries = [b for b in plan.boundaries if b not in left_out]
    boundaries = swap_classes(module, plan, boundaries, mesh, summed, waves)
    _let_rows_lie_apart(module, plan, left_out)
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm) and part.process_group is None and not mesh.dry:
            become(part, DataSyncBatchNorm)
            part.become(mesh)
    graphs: dict[str, GraphModule] = {}
    for path in dict.fromkeys(rewrite.module for rewrite in plan.rewrites):
        forms = [rewrite for rewrite in plan.rewrites if rewrite.module == path]
        become(module.get_submodule(path), forward=rewritten_forms(module.get_submodule(path), forms, mesh, graphs))
    add_boundaries(module, boundaries, mesh, plan.slices if sequence_parallel else Slices())
    add_switches(module, plan.switches, mesh)
    surround(module, plan, mesh)
    sum_together(module, mesh)
    keep(module, plan, mesh)
    return module


def output_gathers(plan: Plan) -> tuple[Boundary, ...]:
    """The gathers of logits that ``gather_output=False`` leaves out; ``dim`` and ``blocks`` tell how they stay cut."""
    heads = {a.name for a in plan.axes if a.pattern in ("vocabulary", "head")}
    return tuple(
        b
        for b in plan.boundaries
        if b.kind == "gather" and b.blocks and b.side == "output" and (b.module == "" or b.axis in heads)
    )


def _let_rows_lie_apart(module: nn.Module, plan: Plan, left_out: tuple[Boundary, ...]) -> None:
    """Tell the layers whose logits stay cut that the loss takes rows with gaps between them."""
    axes = {b.axis for b in left_out}
    for verdict in plan.verdicts:
        layer = module.get_submodule(verdict.name.rpartition(".")[0])
        if verdict.axis in axes and isinstance(layer, ColumnParallelLinear):
            layer.tp_apart = True


def load_local(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a rank's parameters and buffers their values; each tensor is taken as it is, with its dtype and device.

    ``tensors`` has at least one name of each tied tensor.  Raises PlanError where a persistent tensor is missing,
    has no place, or has another shape.
    """
    places = dict(named_tensors(module))
    for name, tensor in tensors.items():
        if name not in places:
            raise PlanError(f"{name}: the module has no parameter or buffer of that name.")
        if tensor.shape != places[name].shape:
            raise PlanError(
                f"{name}: the part has shape {_spell(tensor.shape)}, the module needs {_spell(places[name].shape)}."
            )
    new: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        old = places[name]
        if id(old) not in new:
            is_parameter = isinstance(old, nn.Parameter)
            new[id(old)] = nn.Parameter(tensor, requires_grad=old.requires_grad) if is_parameter else tensor
    persistent = set(module.state_dict(keep_vars=True))
    for name, old in places.items():
        if id(old) not in new and old.is_meta and name in persistent:
            raise PlanError(f"{name}: no value was given for it.")
    for name, old in places.items():
        if id(old) in new:
            _assign(module, name, new[id(old)])


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every name of every parameter and buffer."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def planned_tensors(module: nn.Module, known: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """The same by the names ``known`` to a plan, though the module or its parts be wrapped since."""
    module = module.module if isinstance(module, DistributedDataParallel) else module
    for name, tensor in named_tensors(module):
        if name not in known:  # a part that was wrapped before it was planned is known by the longer name
            for inner in WRAPPED:
                name = name.replace(inner, "")
        yield name, tensor


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter rather than a buffer; those of a script module are of no class of their own."""
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


def check(module: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Raise PlanError where the plan is not for this module and mesh."""
    if plan.tp != mesh.degree:
        raise PlanError(
            f"The plan is for tp={plan.tp}, the mesh has {mesh.degree} ranks.", hint=f"Use --tp {mesh.degree}."
        )
    refuse_converted(module)
    check_plan(module, plan)


# -- tensors --------------------------------------------------------------------------------------------------


def cut_tensors(module: nn.Module, verdicts: Iterable[Verdict], mesh: Mesh) -> None:
    """Replace each cut tensor's data by the rank's part; parameters stay the same objects, ties stay ties."""
    done: dict[int, tuple[str, Layout]] = {}
    tensors = dict(named_tensors(module))
    for verdict in verdicts:
        tensor = tensors[verdict.name]
        first, layout = done.setdefault(id(tensor), (verdict.name, verdict.layout))
        if layout != verdict.layout:
            raise PlanError(f"{verdict.name}: it is tied to {first}, so both must be cut alike.")
        if first != verdict.name or not verdict.layout.cut:
            continue
        if isinstance(tensor, nn.Parameter):
            grad = tensor.grad
            tensor.grad = None
            tensor.data = part(tensor.data, layout, mesh)
            tensor.grad = None if grad is None else part(grad, layout, mesh)
        else:
            local = part(tensor, layout, mesh)
            for name, other in tensors.items():
                if other is tensor:
                    _assign(module, name, local)


def part(tensor: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """This rank's part of a whole tensor, in memory of its own."""
    if layout.dim is None:
        return tensor
    return take(tensor, layout.dim, layout.pieces(mesh.rank, mesh.degree))


def _assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    table = owner._parameters if attribute in owner._parameters else owner._buffers
    table[attribute] = tensor


# -- edits ----------------------------------------------------------------------------------------------------


def apply_edit(root: nn.Module, edit: Edit, mesh: Mesh) -> None:
    """Give one integer its value on this rank."""
    where = f"{edit.module or 'the root module'}: {edit.attribute}"
    new = local_size(edit.blocks, mesh.rank, mesh.degree)
    if edit.per:
        new //= local_size(edit.per, mesh.rank, mesh.degree)
    module = root.get_submodule(edit.module)
    first, *path = edit.attribute.split(".")
    try:
        setattr(module, first, _edited(getattr(module, first), path, edit.value, new, where))
    except (AttributeError, IndexError, KeyError, TypeError):
        raise PlanError(f"{where} is not there to be edited.", hint="Plan this module again.") from None


def _edited(old: Any, path: list[str], value: int, new: int, where: str) -> Any:
    """``old`` with the integer at ``path`` replaced; objects on the way are copied, since others may share them."""
    if not path:
        if old != value:
            raise PlanError(
                f"{where} is {old!r}, the plan was made when it was {value}.", hint="Plan this module again."
            )
        return new
    key, *rest = path
    if isinstance(old, dict):
        return {**old, key: _edited(old[key], rest, value, new, where)}
    if isinstance(old, tuple | list):
        items = list(old)
        items[int(key)] = _edited(items[int(key)], rest, value, new, where)
        return type(old)(*items) if hasattr(old, "_fields") else type(old)(items)
    own = copy.copy(old)
    setattr(own, key, _edited(getattr(old, key), rest, value, new, where))
    return own


# -- classes --------------------------------------------------------------------------------------------------


def swap_classes(
    root: nn.Module, plan: Plan, boundaries: list[Boundary], mesh: Mesh, summed: frozenset[str], waves: int | None
) -> list[Boundary]:
    """Give modules their parallel classes and their reads; return the boundaries that no layer absorbed.

    ``summed`` are the modules at which the plan has a sum, in any of its forms.
    """
    of_module: dict[str, dict[str, Verdict]] = {}
    for verdict in plan.verdicts:
        path, _, attribute = verdict.name.rpartition(".")
        of_module.setdefault(path, {})[attribute] = verdict
    rewritten = {r.module for r in plan.rewrites}
    done: set[int] = set()
    for path, verdicts in of_module.items():
        module = root.get_submodule(path)
        if id(module) in done:
            continue
        done.add(id(module))
        layer = None if path in rewritten else _layer_for(module, path, verdicts, path in summed)
        reads = {a: r for a, v in verdicts.items() if (r := _read_for(v, mesh)) is not None}
        own = _own_sum(boundaries, path) if layer is not None and _may_sum(module, layer, verdicts) else None
        shares: Crossing | None = None
        if own is not None and own.kind == "reduce_scatter":
            if layer is RowParallelLinear and "bias" in reads:
                reads["bias"] = Read(mesh, sum_grad=True)  # of which each rank has the gradient of its slice
                shares = crossing(own, mesh, plan.slices)
            else:
                own = None
        boundaries = [b for b in boundaries if b is not own]
        become(module, layer, reads)
        if layer is not None:
            extra: tuple[Any, ...] = (path,) if layer is ColumnParallelLinear else (own is not None,)
            if layer is RowParallelLinear:
                extra = (*extra, waves, shares)
            elif layer is VocabParallelEmbedding:
                extra = (*extra, parts_of(0, verdicts["weight"].layout.blocks, mesh))
            module.become(verdicts["weight"].shape, mesh, *extra)
    return boundaries


def _may_sum(module: nn.Module, layer: type[nn.Module], verdicts: dict[str, Verdict]) -> bool:
    """Whether the layer may make the sum at its output itself.

    Not where the user's forward goes on after ``super().forward``: what it reads there meets a term of the sum.
    """
    if layer is ColumnParallelLinear or type(module).forward not in (nn.Linear.forward, nn.Embedding.forward):
        return False
    bias = verdicts.get("bias")
    return bias is None or bias.once


def _own_sum(boundaries: list[Boundary], path: str) -> Boundary | None:
    """The sum of the module's whole output, in whatever form."""
    return next((b for b in boundaries if b.module == path and _sums_output(b, ("reduce", "reduce_scatter"))), None)


def _sums_output(b: Boundary, kinds: tuple[str, ...] = ("reduce",)) -> bool:
    """Whether a boundary is the reduce of all that a module returns, whichever call it is."""
    return b.kind in kinds and b.side == "output" and b.slots == ("",) and b.call == -1


def _layer_for(module: nn.Module, path: str, verdicts: dict[str, Verdict], reduced: bool) -> type[nn.Module] | None:
    """The parallel class that does what the verdicts and the boundary ask, or None where hooks do it."""
    weight = verdicts.get("weight")
    if weight is None or not weight.layout.cut:
        return None
    if isinstance(module, nn.Linear) and chains(type(module), nn.Linear):
        if weight.layout.dim == 0:
            return ColumnParallelLinear
        return RowParallelLinear
    if isinstance(module, nn.Embedding) and weight.layout.dim == 0 and reduced:
        if not chains(type(module), nn.Embedding):
            raise PlanError(
                f"{path}: {type(module).__name__} looks words up in code of its own, so it cannot be cut by words.",
                hint=f"Use --set {path}.weight=whole.",
            )
        refuse_unsupported(module, path)
        return VocabParallelEmbedding
    return None


def _read_for(verdict: Verdict, mesh: Mesh) -> Read | None:
    if not (verdict.sum_grad or verdict.once):
        return None
    parts = parts_of(verdict.layout.dim, verdict.layout.blocks, mesh) if verdict.layout.cut else None
    return Read(mesh, verdict.sum_grad, verdict.once, parts)


def _spell(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
