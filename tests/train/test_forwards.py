"""Forwards given to modules: as their own in everything but what is asked, and compiled once for all layers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tpconvert.parallel import dry_mesh
from tpconvert.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpconvert.train.model.forwards import Checkpointed, Selective, give_forward
from tpconvert.train.model.fp8 import give_product

LAYERS = 12  # more than torch.compile compiles of one function


class Layer(nn.Module):
    """One of many, with a forward that is called with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 2048), nn.Linear(2048, 2048)

    def forward(self, x, *, scale):
        return x + scale * self.down(torch.relu(self.up(x)))[..., :16]


def layers(change):
    """Equal layers, as they are and changed."""
    torch.manual_seed(0)
    own = nn.ModuleList(Layer() for _ in range(LAYERS))
    changed = copy.deepcopy(own)
    for layer in changed:
        change(layer)
    return own, changed


def run(many):
    """What comes out, and every gradient."""
    torch.manual_seed(1)
    x = given = torch.randn(4, 16, requires_grad=True)
    for layer in many:
        x = layer(x, scale=0.5)
    x.sum().backward()
    return [x.detach(), given.grad, *(p.grad for p in many.parameters())]


def doubled(x, weight, bias=None):
    """Another product."""
    return F.linear(2 * x, weight, bias)


def ways():
    """What is changed of a layer."""
    return {
        "full": lambda layer: give_forward(layer, Checkpointed),
        "selective": lambda layer: give_forward(layer, Selective),
        "product": lambda layer: give_product([layer], F.linear),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ways())
def test_changed_layers_are_equal_and_compiled_once_for_all(way):
    torch.compiler.reset()
    own, changed = layers(ways()[way])
    counter = CompileCounterWithBackend("aot_eager")
    for layer in changed:
        layer.compile(backend=counter)
    for mine, theirs in zip(run(own), run(changed), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert counter.frame_count == 1
    assert type(changed[0]).__name__ == "Layer" and isinstance(changed[0], Layer)
    assert len({type(layer) for layer in changed}) == 1


def test_a_forward_that_was_set_on_the_module_is_still_the_one_that_runs():
    layer = Layer()
    layer.forward = lambda x, *, scale: x * scale
    give_forward(layer, Checkpointed)
    assert torch.equal(layer(torch.ones(2, 16), scale=3.0), 3 * torch.ones(2, 16))


def test_another_product_is_that_of_all_linear_layers_but_small_ones_and_those_that_do_more():
    class More(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    column, row = ColumnParallelLinear(32, 2048), RowParallelLinear(8192, 32)
    column.become((64, 2048), dry_mesh(0, 2, device="cpu"), "column")
    row.become((64, 8192), dry_mesh(0, 2, device="cpu"), False, 1)
    plain, small, odd, more = nn.Linear(2048, 2048), nn.Linear(64, 64), nn.Linear(2047, 2048), More(2048, 2048)
    parts = nn.ModuleList([column, row, plain, small, odd, more])
    inputs = [torch.randn(3, part.in_features) for part in parts]
    before = [part(x) for part, x in zip(parts, inputs, strict=True)]
    assert give_product([parts], doubled) == 3
    for number, (part, x) in enumerate(zip(parts, inputs, strict=True)):
        bias = part.bias if number < 3 else 0
        torch.testing.assert_close(part(x), before[number] * (1 + (number < 3)) - bias * (number < 3))
