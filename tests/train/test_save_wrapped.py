"""A loop of one's own saves and clips what torch has wrapped, under the names that the plan knows."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tpconvert
from tpconvert.checkpoint import load_rank, read_plan
from tpconvert.errors import CheckpointError


def each_layer(model, wrap):
    layers = model.model.layers
    for i in range(len(layers)):
        layers[i] = wrap(layers[i])
    return model


WRAPS = {
    "ddp": lambda model, mesh: DistributedDataParallel(model, process_group=mesh.dp_group),
    "fsdp": lambda model, mesh: fully_shard(model, mesh=DeviceMesh.from_group(mesh.dp_group, "cpu")),
    "compiled": lambda model, mesh: each_layer(model, lambda layer: torch.compile(layer, backend="eager")),
    "checkpointed": lambda model, mesh: each_layer(model, checkpoint_wrapper),
}


def wrapped(mesh, folder: str, out: str, way: str):
    """The gradient norm, and whether all tensors came back from what was saved."""
    plan = read_plan(Path(folder))
    plain = tpconvert.load(folder, mesh)
    ids = torch.arange(12).view(2, 6)
    plain(input_ids=ids, labels=ids).loss.backward()
    norm = tpconvert.clip_grad_norm_(plain, 0.1, mesh, plan)

    model = WRAPS[way](tpconvert.load(folder, mesh), mesh)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.testing.assert_close(tpconvert.clip_grad_norm_(model, 0.1, mesh, plan), norm)
    for module in (plain, model):
        torch.optim.SGD(module.parameters(), lr=1.0).step()
    tpconvert.save(model, folder, out, mesh)
    saved, parameters = load_rank(Path(out), mesh.rank), dict(plain.named_parameters())
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, parameters[name].detach())
    return len(saved)


@pytest.mark.parametrize("way", WRAPS)
def test_what_torch_wraps_is_clipped_and_saved_by_the_names_of_the_plan(run_ranks, sharded: Path, tmp_path: Path, way):
    assert all(run_ranks(wrapped, 2, str(sharded), str(tmp_path / "out"), way, dp=2, timeout=120))


def of_another(mesh, folder: str, out: str):
    with pytest.raises(CheckpointError, match="the module has no parameter or buffer of that name to save"):
        tpconvert.save(nn.Linear(2, 2), folder, out, mesh)


def test_a_module_without_the_tensors_is_refused(run_ranks, sharded: Path, tmp_path: Path):
    run_ranks(of_another, 2, str(sharded), str(tmp_path / "out"))
