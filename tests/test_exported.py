"""The recorder and ``torch.export`` see the same parameters flow into the same ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import exported
from benchmarks.zoo.exported import disagreement, of_export, of_trace
from tests.hf_models import build
from tests.models import MODELS
from tests.zoo.frame import floats

NAMES = ["attention", "nanogpt_literal", "latent_attention", "conv_mixer", "tied_padding", "relative_bias"]


@pytest.mark.parametrize("name", [*NAMES, "llama_tied_bias", "gpt2", "t5", "bert_masked_lm"])
def test_both_see_the_same_relations(name: str) -> None:
    module, inputs = MODELS[name]() if name in MODELS else build(name)
    assert disagreement(module.eval(), inputs) == []
    assert len(of_trace(module, inputs)) >= len(list(module.parameters()))


class Hidden(nn.Module):
    """A second matrix that is applied out of sight of torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(22, 22), nn.Linear(22, 22)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch._C.DisableTorchFunction():
            return self.b(h)


def test_what_torch_functions_do_not_show_is_related_all_the_same() -> None:
    assert disagreement(Hidden().eval(), {"x": floats(3, 22)}) == []


class Cast(nn.Module):
    """A matrix that is cast where it is used, and a bias that is given the shape of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(22, 22), nn.Linear(22, 22)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return nn.functional.linear(h.float(), self.b.weight.float()) + self.b.bias.expand_as(h)


def test_what_is_made_of_a_parameter_alone_counts_as_it() -> None:
    module, inputs = Cast().eval(), {"x": floats(3, 22)}
    assert disagreement(module, inputs) == []
    assert ("a.weight", "b.weight") in of_trace(module, inputs)


def test_a_relation_that_one_of_them_misses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missed, made_up = ("a.weight", "b.weight"), ("b.weight", "a.weight")
    seen = of_trace(Hidden().eval(), {"x": floats(3, 22)})
    assert missed in seen
    monkeypatch.setattr(exported, "of_trace", lambda module, inputs: seen - {missed} | {made_up})
    found = disagreement(Hidden().eval(), {"x": floats(3, 22)})
    assert found == ["only torch.export: a.weight -> b.weight", "only the trace: b.weight -> a.weight"]


def test_what_cannot_be_exported_has_no_second_opinion() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    assert of_export(Branches(), {"x": floats(3, 22)}) is None
    assert disagreement(Branches(), {"x": floats(3, 22)}) is None
