"""A plan as Python code: ``parallelize_module`` with the styles of ``torch.distributed.tensor.parallel``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from torch import nn

from tpconvert.formats.express import Abilities, Expressed, folded, members
from tpconvert.formats.layerwise import Style
from tpconvert.spec.layout import local_size

CALLS: dict[Style, str] = {
    "column": "ColwiseParallel()",
    "column-gathered": "ColwiseParallel(output_layouts=Replicate())",
    "row": "RowwiseParallel()",
    "vocabulary": "RowwiseParallel(input_layouts=Replicate())",
}

ABILITIES = Abilities("a plan of parallelize_module", frozenset([*CALLS, "sum-grad", "lent"]), edits=True)

_HEAD = '''"""Cuts {name} on {tp} ranks with parallelize_module.  Written by tpconvert; change it as you like.

    mesh = init_device_mesh("cuda", ({tp},))
    parallelize(model, mesh)
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The same model, its parameters cut over the {tp} ranks of a one-dimensional mesh."""
    if mesh.size() != {tp}:
        raise ValueError(f"This plan is for {tp} ranks, the mesh has {{mesh.size()}}.")
'''


def dtensor_code(module: nn.Module, expressed: Expressed) -> str:
    """A Python module with one function, ``parallelize(model, mesh)``."""
    plan, styles = expressed.plan, expressed.styles
    lines = ["    plan = {", *_entries(module, styles), "    }", "    parallelize_module(model, mesh, plan)"]
    lines += [f"    {_get(name)} = {_get(first)}  # one tensor" for name, first in _tied(expressed)]
    for edit in plan.edits:
        value = local_size(edit.blocks, 0, plan.tp) // (local_size(edit.per, 0, plan.tp) if edit.per else 1)
        lines.append(f"    {_module(edit.module)}.{edit.attribute} = {value}  # of {edit.value}")
    summed = [name for name, style in styles.items() if style == "sum-grad"]
    if summed:
        lines += ["    for path in (", *(f"        {json.dumps(name)}," for name in summed), "    ):"]
        lines += ["        for parameter in model.get_submodule(path).parameters(recurse=False):"]
        lines += ["            parameter.register_hook(lambda grad: _summed(grad, mesh))"]
    text = _HEAD.format(name=_title(expressed), tp=plan.tp) + "\n".join([*lines, "    return model\n"])
    return text + (_SUMMED if summed else "") if summed else text.replace("import torch.distributed as dist\n", "")


_SUMMED = '''

def _summed(grad, mesh):
    """The gradient of a whole parameter of which every rank has a term: it meets this rank's heads only."""
    total = grad.clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total
'''


def _title(expressed: Expressed) -> str:
    source = expressed.plan.source
    return str(source.get("class") or source.get("name") or "the model").replace("\\", "/").replace('"', "'")


def _entries(module: nn.Module, styles: Mapping[str, Style]) -> Iterable[str]:
    """One line a pattern where it matches modules of this style only, else one a module."""
    every = [name for name, _ in module.named_modules()]
    wanted: dict[tuple[str, Style], list[str]] = {}
    for name, style in styles.items():
        if style in CALLS:
            wanted.setdefault((folded(name), style), []).append(name)
    for (pattern, style), names in wanted.items():
        exact = set(members(pattern, every)) == set(names) and _everywhere(pattern, every)
        for name in [pattern] if exact else names:
            yield f"        {json.dumps(name)}: {CALLS[style]},"


def _everywhere(pattern: str, every: Sequence[str]) -> bool:
    """Whether all modules that match the beginning of a pattern have what matches the rest; torch warns else."""
    tokens = pattern.split(".")
    found = [set(members(".".join(tokens[: i + 1]), every)) for i in range(len(tokens))]
    return all(around == {name.rpartition(".")[0] for name in inner} for around, inner in pairwise(found))


def _tied(expressed: Expressed) -> Iterable[tuple[str, str]]:
    """``(name, name of the same tensor that a layer cuts)`` of each other name of a cut tensor."""
    names: dict[str, list[str]] = {}
    for v in expressed.plan.verdicts:
        if v.layout.cut:
            names.setdefault(v.tied_to or v.name, []).append(v.name)
    for same in names.values():
        first = next(n for n in same if expressed.styles.get(n.rpartition(".")[0]) in CALLS)
        yield from ((name, first) for name in same if name != first)


def _get(name: str) -> str:
    path, _, attribute = name.rpartition(".")
    return f"{_module(path)}.{attribute}"


def _module(path: str) -> str:
    return f"model.get_submodule({json.dumps(path)})" if path else "model"
