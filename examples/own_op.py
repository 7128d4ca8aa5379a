"""A model with an operation of one's own, which tpconvert cannot know.

tpconvert plan examples/own_op.py:build --tp 2                                  the layer stays whole, and says why
tpconvert plan examples/own_op.py:build --tp 2 --rules examples/own_rule.toml   one line about the op, and it is cut
tpconvert plan examples/own_op.py:build --tp 2 --rules examples/own_rule.toml --set layers.0=whole
"""

import torch
from torch import Tensor, nn


@torch.library.custom_op("own::squared_relu", mutates_args=())
def squared_relu(x: Tensor) -> Tensor:
    return x.relu() ** 2


@squared_relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * 2 * x.relu()


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


squared_relu.register_autograd(_backward, setup_context=_keep)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.ops.own.squared_relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Model(), (torch.randn(2, 13, 32),)
