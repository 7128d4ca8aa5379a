"""Run on ranks: a model as others cut it by a plan of ours, held to the whole one."""

import contextlib
import warnings
from copy import deepcopy

import torch
from torch import nn

from tests.hf_models import ready
from tpconvert.verify.measure.modes import Exact, tensors_of
from tpconvert.verify.measure.values import loss_of


def under_transformers(mesh, name: str, tp_plan: dict[str, str]) -> list[str]:
    """What differs in the outputs and gradients of a model that transformers cuts by ``tp_plan``."""
    from transformers.distributed import DistributedConfig

    whole, inputs = ready(name)
    model = untied(deepcopy(whole))
    asked = DistributedConfig(tp_plan=tp_plan, tp_size=mesh.degree)
    config, _, meshes = type(model).prepare_distribute_model(asked)
    model = type(model).maybe_distribute_model(model, config, meshes)
    model.tie_weights()
    return differences(model, whole, inputs)


def under_parallelize_module(mesh, name: str, code: str) -> list[str]:
    """The same for a model that the written function cuts."""
    from torch.distributed.device_mesh import init_device_mesh

    whole, inputs = ready(name)
    written: dict = {}
    exec(code, written)
    model = written["parallelize"](deepcopy(whole), init_device_mesh("cpu", (mesh.degree,)))
    return differences(model, whole, inputs)


def untied(model: nn.Module) -> nn.Module:
    """Every name a tensor of its own, as ``from_pretrained`` has it when it cuts; it ties them afterwards."""
    seen: set[int] = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        path, _, attribute = name.rpartition(".")
        if id(parameter) in seen:
            model.get_submodule(path).register_parameter(attribute, nn.Parameter(parameter.detach().clone()))
        seen.add(id(parameter))
    return model


def differences(model: nn.Module, whole: nn.Module, inputs) -> list[str]:
    """The outputs and gradients that differ, and parameters that no rank holds a part of though the plan says so."""
    wide = next(whole.parameters()).dtype is torch.float64
    bound = 1e-9 if wide else 2e-4
    found = [run(m, inputs, wide) for m in (model, whole)]
    out = []
    for have, want in zip(*found, strict=True):
        out += [f"{key}: not there" for key in want.keys() - have.keys()]
        for key in want.keys() & have.keys():
            error = (have[key] - want[key]).abs().max() / want[key].abs().max().clamp(min=1e-2)
            if not error <= bound:
                out.append(f"{key}: {error:.1e}")
    return out


def run(model: nn.Module, inputs, wide: bool):
    """The outputs, and the gradients of a loss of all of them, whole."""
    with warnings.catch_warnings(), Exact() if wide else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        output = model(**inputs)
        loss_of(output).backward()
    outputs = {slot: t.detach() for slot, t in tensors_of(output) if t.is_floating_point()}
    return outputs, {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which ranks may hold parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
