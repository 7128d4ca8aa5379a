"""However the work is shared out, the steps are those of plain training in one process."""

import json
from functools import cache

import pytest
import torch
from torch import nn

from tests.train.test_loop import changed, run, settings, worst
from tests.train.tiny import make_folder, train_plainly
from tpconvert.errors import TrainError
from tpconvert.train.model.shards import share_out
from tpconvert.train.settings.config import Parallelism
from tpconvert.train.together.ranks import sum_gradients

TABLE = [
    (50, 2, 2, {}),
    (50, 2, 2, {"data_parallel": "fsdp"}),
    (12, 2, 2, {"data_parallel": "fsdp", "reshard_after_forward": False}),
    (12, 1, 4, {"data_parallel": "fsdp"}),
    (12, 2, 2, {"activation_checkpointing": "selective"}),
    (12, 2, 2, {"data_parallel": "fsdp", "activation_checkpointing": "full", "sequence_parallel": True}),
    (12, 4, 1, {"activation_checkpointing": "selective", "sequence_parallel": True}),
]


@cache
def plain(text: str) -> tuple[list[float], list[float]]:
    from tpconvert.train.settings.config import make_config

    norms: list[float] = []
    return train_plainly(make_config(json.loads(text)), norms=norms)[1], norms


@pytest.mark.parametrize(("steps", "tp", "dp", "parallelism"), TABLE, ids=str)
def test_steps_are_those_of_one_process(run_ranks, tmp_path_factory, steps: int, tp: int, dp: int, parallelism: dict):
    shared = tmp_path_factory.getbasetemp() / "equal"
    shared.mkdir(exist_ok=True)
    config = settings(shared, steps=steps, optimizer="adamw", clip=0.5, micro_batch_size=1, lr=0.01)
    losses, norms = plain(json.dumps(config.model_dump(mode="json")))
    config = changed(config, parallelism=parallelism, logging={"jsonl": True})
    folder = shared / f"model-{tp}"
    if not folder.exists():
        make_folder(folder, tp, by_hand=False)
    out = tmp_path_factory.mktemp("run")
    every = run_ranks(run, tp, folder, config, out, dp=dp, timeout=180)
    assert losses[-1] < 0.9 * losses[0] and max(norms) > 0.5
    for ours in every:
        assert worst(ours, losses) < 1e-9
    seen = [json.loads(line)["grad_norm"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert worst(seen, norms) < 1e-7  # clipped by a norm in float32 at least


class Fork(nn.Module):
    """Parts of which a dp rank uses one by its number, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
        self.every = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, which: int | None) -> torch.Tensor:
        return self.every(x) if which is None else self.parts[which](self.every(x))


class Forks(nn.Module):
    """Two such layers, and a scalar, which FSDP does not take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Fork(), Fork()])
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, which: int | None) -> torch.Tensor:
        return self.gain * self.layers[1](self.layers[0](x, which), which)


def gradients(mesh, settings: dict, uses: list[list[int | None]]) -> dict[str, list | None]:
    module = Forks()
    shards = share_out(module, list(module.layers), mesh, Parallelism(**settings))
    for number, which in enumerate(mine := uses[mesh.dp_rank]):
        loss = module(torch.full((2, 3), 1.0 + mesh.dp_rank + number), which).square().sum()
        shards.before_backward(module, loss, last=number == len(mine) - 1)
        loss.backward()
    sum_gradients(module, mesh, 1 << 20)
    whole = {
        n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in module.named_parameters()
    }
    return {n: None if g is None else g.tolist() for n, g in whole.items()}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("uses", [[[0], [1]], [[0, 1], [0, 0]], [[0, None], [1, None]], [[None, 1], [None, None]]])
def test_parts_that_only_some_dp_ranks_use_have_the_gradients_of_ddp(run_ranks, uses: list, reshard: bool):
    ddp = run_ranks(gradients, 1, {}, uses, dp=2)
    fsdp = run_ranks(gradients, 1, {"data_parallel": "fsdp", "reshard_after_forward": reshard}, uses, dp=2)
    assert ddp[0]["layers.0.parts.2.weight"] is None and ddp[0]["layers.0.parts.1.weight"] is not None
    for one, other in zip(ddp, fsdp, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert (other[name] is None) == (value is None), name
            torch.testing.assert_close(torch.tensor(other[name] or 0.0), torch.tensor(value or 0.0))


class Dropping(nn.Sequential):
    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self[which](x)


def dropped(mesh) -> str:
    module = Dropping(nn.Linear(3, 3), nn.Linear(3, 3))
    shards = share_out(module, list(module), mesh, Parallelism(data_parallel="fsdp"))
    loss = module(torch.ones(2, 3), mesh.dp_rank).sum()
    with pytest.raises(TrainError) as error:
        shards.before_backward(module, loss, last=True)
    return error.value.message


def test_a_layer_that_some_dp_ranks_leave_out_is_told_before_any_weight_changes(run_ranks):
    said = run_ranks(dropped, 1, dp=2)
    assert "dp rank 0 left out the layer of 1.bias" in said[0]
    assert "dp rank 1 left out the layer of 0.bias" in said[1]
