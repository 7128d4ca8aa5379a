"""A plan's axes are found again in a trace, also where several have one size."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from tpconvert.planning import make_plan
from tpconvert.verify import emulate_module


def test_heads_and_head_dim_of_one_size_are_told_apart() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_head=8, n_layer=1, vocab_size=108, n_positions=32, use_cache=False)
    module = GPT2LMHeadModel(config).eval()
    inputs = {"input_ids": torch.randint(0, 100, (2, 13)), "use_cache": False}
    plan = make_plan(module, inputs, tp=2)
    assert plan["transformer.h.0.attn.c_attn.weight"].layout.to_json() == {"dim": 1, "blocks": [[8, 8], [8, 8], [8, 8]]}
    assert emulate_module(module, inputs, plan).equal


class Halves(nn.Module):
    """Both halves of a layer go into the next one, and the second is read besides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.side, self.down = nn.Linear(5, 12), nn.Linear(6, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.up(x).chunk(2, -1)
        return self.down(torch.cat([one.tanh(), other.sigmoid()], -1)) + self.side(other.relu())


def test_an_axis_whose_parameters_another_has_too_keeps_an_atom_of_its_own() -> None:
    """Which of the two is looked at first is chance, so they are asked several times."""
    inputs = (torch.randn(2, 5, generator=torch.Generator().manual_seed(0)),)
    plan = make_plan(Halves(), inputs, tp=2)
    assert {v.name: v.layout.dim for v in plan.verdicts if v.layout.cut} == {
        "up.weight": 0, "up.bias": 0, "side.weight": 1, "down.weight": 1,
    }  # fmt: skip
    assert len(plan.axes) == 2
    for _ in range(8):
        assert emulate_module(Halves(), inputs, plan).equal
