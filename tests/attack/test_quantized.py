"""Quantized weights stay whole and say why; what is not quantized beside them is cut."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.frame import floats, seeded
from tpconvert.planning import make_plan
from tpconvert.verify import emulate_module


class Int8(nn.Module):
    """A matrix of bytes and a scale for each row."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (outer, inner), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(outer, 1) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Two(nn.Module):
    """Two pairs of matrices, one of them quantized later."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up, self.down, self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x + self.b(F.gelu(self.a(self.norm(x))))


class Frozen(Two):
    """The first pair runs without gradients, as packed weights must."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            kept = self.down(F.gelu(self.up(self.norm(x))))
        return x + kept + self.b(F.gelu(self.a(self.norm(x))))


def test_bytes_stay_whole_with_the_reason() -> None:
    def make() -> nn.Module:
        module = Two()
        module.up, module.down = Int8(24, 48), Int8(48, 24)
        return module

    module, inputs = seeded(make), {"x": floats(3, 7, 24)}
    plan = make_plan(module, inputs, tp=2)
    assert "take no gradient" in plan["up.weight"].reason
    assert {v.name for v in plan.verdicts if v.layout.cut} == {"a.weight", "a.bias", "b.weight"}
    assert emulate_module(module, inputs, plan).equal


def test_packed_weights_are_code_without_a_rule_and_the_rest_is_cut() -> None:
    def make() -> nn.Module:
        module = Frozen()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's note that its place has moved
            for name in ("up", "down"):
                packed = torch.ao.quantization.quantize_dynamic(nn.Sequential(getattr(module, name)), {nn.Linear})
                setattr(module, name, packed)
        return module

    module, inputs = seeded(make), {"x": floats(3, 7, 24)}
    plan = make_plan(module, inputs, tp=2)
    assert {v.name for v in plan.verdicts if v.layout.cut} == {"a.weight", "a.bias", "b.weight"}
    assert emulate_module(module, inputs, plan).equal
