"""A layer whose input has whole and cut segments, in a network that leaves layers out at random in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.planning import make_plan

MODEL, LAYERS = 12, 2


class DropPath(nn.Module):
    """Leaves a sample out in training; in evaluation it returns what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(len(x), 1, 1, dtype=x.dtype) + 0.5
        return x / 0.5 * kept.floor()


class Focal(nn.Module):
    """Queries, a context and gates from one matrix; two axes cross in ``context``, so one of them is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(MODEL, 2 * MODEL + 2), nn.Linear(MODEL, MODEL)
        self.mix = nn.Conv1d(MODEL, MODEL, 3, padding=1, groups=MODEL, bias=False)
        self.context = nn.Conv1d(MODEL, MODEL, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, c, gates = self.into(x).transpose(1, 2).contiguous().split([MODEL, MODEL, 2], 1)
        c = self.mix(c).tanh()
        c = c * gates[:, :1] + c.mean(2, keepdim=True).tanh() * gates[:, 1:]
        return self.out((q * self.context(c)).transpose(1, 2))


class Layer(nn.Module):
    """Its one ``drop`` is called for the focal part and for the mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.focal, self.drop = nn.LayerNorm(MODEL), nn.LayerNorm(MODEL), Focal(), DropPath()
        self.up, self.down = nn.Linear(MODEL, 46), nn.Linear(46, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.focal(self.norm1(x)))
        return x + self.drop(self.down(self.up(self.norm2(x)).relu()))


def built(head: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, MODEL), *(Layer() for _ in range(LAYERS)), nn.LayerNorm(MODEL))
    net.append(nn.Linear(MODEL, head))
    return net.double(), {"input": torch.randn(3, 7, 5, dtype=torch.float64)}


@pytest.mark.parametrize(("head", "tp"), [(8, 2), (3, 4)])
def test_every_layer_is_cut_though_some_choices_do_not_hold(pool: Pool, head: int, tp: int) -> None:
    """With a head that is cut, gradients are summed behind the layers; with one too small, at their inputs."""
    plan = make_plan(*built(head), tp=tp)
    for i in range(1, LAYERS + 1):
        assert plan[f"{i}.up.weight"].layout.cut and plan[f"{i}.down.weight"].layout.cut
        assert plan[f"{i}.focal.into.weight"].layout.cut and plan[f"{i}.focal.context.weight"].layout.cut
    assert pool.run(difference, tp, __name__, plan.dumps(), head)[0] is None
