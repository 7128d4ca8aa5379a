import pytest
import torch
from torch import nn

from tpconvert.train.settings.config import Training
from tpconvert.train.steps.optimizer import (
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    set_learning_rate,
)


def rates(**training) -> list[float]:
    t = Training(steps=100, lr=1.0, **training)
    return [learning_rate(s, t) for s in range(1, 101)]


def test_the_rate_rises_over_warmup_then_falls():
    linear = rates(schedule="linear", warmup_steps=10)
    assert linear[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert linear[10] == 1.0 and linear[55] == 0.5 and 0 < linear[-1] < 0.02


def test_cosine_is_half_way_down_in_the_middle_and_ends_at_min_lr():
    cosine = rates(schedule="cosine", min_lr=0.1)
    assert cosine[0] == 1.0 and cosine[50] == pytest.approx(0.55) and cosine[-1] == pytest.approx(0.1, abs=1e-3)
    assert cosine == sorted(cosine, reverse=True)


def test_constant_stays():
    assert set(rates(schedule="constant")) == {1.0}


def test_norms_and_biases_do_not_decay():
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = make_optimizer(module.named_parameters(), Training(weight_decay=0.3))
    decays = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {n: decays[p] for n, p in module.named_parameters()} == {
        "0.weight": 0.3, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0,
    }  # fmt: skip


def test_frozen_parameters_are_left_out():
    module = nn.Linear(3, 4)
    module.bias.requires_grad_(False)
    groups = make_optimizer(module.named_parameters(), Training()).param_groups
    assert [p for g in groups for p in g["params"]] == [module.weight]


def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("settings", [{}, {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "sgd"}])
def test_optimizer_state_goes_out_by_name_and_comes_back_bit_identical(settings: dict):
    torch.manual_seed(0)
    training = Training(**settings)
    x = torch.randn(5, 3)
    one = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = make_optimizer(one.named_parameters(), training)
    for _ in range(3):
        step(one, optimizer, x)
    kinds, updates = optimizer_tensors(optimizer, dict(one.named_parameters()))
    kinds = {k: {n: t.clone() for n, t in v.items()} for k, v in kinds.items()}
    two = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    two.load_state_dict(one.state_dict())
    other = make_optimizer(two.named_parameters(), training)
    load_optimizer_tensors(other, dict(two.named_parameters()), kinds, updates)
    for opt, module in ((optimizer, one), (other, two)):
        set_learning_rate(opt, 0.01)
        step(module, opt, x)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
