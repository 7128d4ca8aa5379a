"""Stacks of linear layers and convolutions."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.frame import BATCH, CLASSES, FFN, FFN_FEW, LENGTH, WIDTH, Built, floats, framed, seeded


def stack(*sizes: int) -> nn.Sequential:
    """Linear layers of the sizes with ReLU, GELU and Tanh in turn between them."""
    layers: list[nn.Module] = []
    for i, (inp, out) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(inp, out), (nn.ReLU, nn.GELU, nn.Tanh)[i % 3]()]
    return nn.Sequential(*layers[:-1])


def mlp() -> Built:
    """Four linear layers in a Sequential; 84 and 28 hidden features."""
    return seeded(stack, WIDTH, FFN, 26, FFN_FEW, CLASSES), {"input": floats(BATCH, WIDTH)}


def mlp_odd() -> Built:
    """Hidden features 35 and 17: nothing divides by 2, 3 or 4."""
    return seeded(stack, 23, 35, 17, 11), {"input": floats(BATCH, 23)}


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, ffn: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ffn, bias=bias)
        self.up = nn.Linear(width, ffn, bias=bias)
        self.down = nn.Linear(ffn, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def gated_mlp() -> Built:
    """A gated MLP without biases."""
    return framed(GatedMlp, FFN)


def gated_mlp_bias() -> Built:
    """A gated MLP with biases: the row bias must be added once."""
    return framed(GatedMlp, 44, bias=True)


class FusedGatedMlp(nn.Module):
    """Gate and up in one weight, one after the other."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * ffn)
        self.down = nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def fused_gated_mlp() -> Built:
    """Gate and up as two segments of one weight."""
    return framed(FusedGatedMlp, FFN)


def fused_gated_mlp_odd() -> Built:
    """Twice 27 features: the fused width divides by 2 while its halves do not."""
    return framed(FusedGatedMlp, 27)


class InterleavedGatedMlp(FusedGatedMlp):
    """Gate and up in one weight, taking turns."""

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        return self.down(F.silu(both[..., ::2]) * (both[..., 1::2] + 1))


def interleaved_gated_mlp() -> Built:
    """Gate and up interleaved, row by row."""
    return framed(InterleavedGatedMlp, FFN)


class UnequalSplit(nn.Module):
    """Three segments of unequal sizes from one linear layer, each used in its own way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = (24, 12, 24)
        self.fused = nn.Linear(width, sum(self.sizes))
        self.mid = nn.Linear(12, width)
        self.down = nn.Linear(24, width)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.fused(x).split(self.sizes, dim=-1)
        return self.down(a * torch.sigmoid(c)) + self.mid(F.gelu(b))


def unequal_split() -> Built:
    """One fused weight in segments of 24, 12 and 24."""
    return framed(UnequalSplit)


class Autoencoder(nn.Module):
    """The same weight up and, transposed, down."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, ffn)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x)) @ self.up.weight + self.bias


def mlp_transposed_tie() -> Built:
    """One weight used for both directions, with a bias added after the contraction."""
    return framed(Autoencoder, FFN)


class TiedPair(nn.Module):
    """Two MLPs that own one first weight between them."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(width, ffn), nn.ReLU(), nn.Linear(ffn, width))
        self.b = nn.Sequential(nn.Linear(width, ffn), nn.Tanh(), nn.Linear(ffn, width))
        self.b[0].weight = self.a[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + self.a(x))


def mlp_tied_pair() -> Built:
    """Two layers with one tied weight under two names."""
    return framed(TiedPair, FFN)


class CalledTwice(nn.Module):
    """One layer run twice, as ALBERT does."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.layer = GatedMlp(width, ffn, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(x)
        return x + self.layer(x)


def called_twice() -> Built:
    """A module that is called twice in one forward."""
    return framed(CalledTwice, FFN)


class ConvNet(nn.Module):
    """Convolutions with batch norm, then linear layers on the flattened picture."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.conv2, self.bn2 = nn.Conv2d(12, 28, 3, bias=False), nn.BatchNorm2d(28)
        self.fc1 = nn.Linear(28 * 3 * 4, FFN)
        self.fc2 = nn.Linear(FFN, CLASSES)

    def forward(self, picture: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(picture)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


def conv_net() -> Built:
    """A conv + linear net; the picture is 8 by 10."""
    return seeded(ConvNet), {"picture": floats(BATCH, 3, 8, 10)}


class ConvMixer(nn.Module):
    """Patches, then depthwise and pointwise convolutions."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 2, stride=2)
        self.depth = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.BatchNorm2d(width)
        self.up = nn.Conv2d(width, inner, 1)
        self.mix = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.down = nn.Conv2d(inner, width, 1)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, picture: Tensor) -> Tensor:
        x = F.gelu(self.patch(picture))
        x = x + self.norm(F.gelu(self.depth(x)))
        x = x + self.down(F.gelu(self.mix(self.up(x))))
        return self.head(x.mean(dim=(2, 3)))


def conv_mixer() -> Built:
    """A depthwise convolution between pointwise ones, mean-pooled."""
    return seeded(ConvMixer, 26, 36), {"picture": floats(BATCH, 3, 8, 10)}


class Uncuttable(nn.Module):
    """Every feature dim meets an op that needs all of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width + 2)
        self.a, self.b = nn.Linear(width, width + 2), nn.Linear(width + 2, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(torch.cumsum(self.a(self.norm1(x)), dim=-1))
        return torch.softmax(self.b(x), dim=-1)


def uncuttable() -> Built:
    """A module in which nothing can be cut."""
    return seeded(Uncuttable, 13), {"x": floats(BATCH, LENGTH, 13)}
