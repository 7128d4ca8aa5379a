"""Small models in which one fault of the mutation tests matters, and no other model has its place."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.frame import FFN, framed


class Grouped(nn.Module):
    """A softmax within each of four groups of six; the count of groups, unedited, still gives a shape that runs."""

    def __init__(self, width: int, groups: int = 4, size: int = 6) -> None:
        super().__init__()
        self.groups = groups
        self.up, self.down = nn.Linear(width, groups * size), nn.Linear(groups * size, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.view(*h.shape[:2], self.groups, -1).softmax(-1).flatten(2))


class Sliced(nn.Module):
    """A buffer that is read from its start, as far as it is needed."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.register_buffer("gain", torch.linspace(0.5, 2.0, ffn))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.tanh(h * self.gain[: h.shape[-1]]))


class Softmax(nn.Module):
    """The softmax of a parameter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(size))

    def forward(self) -> Tensor:
        return self.gain.softmax(-1)


class Shares(nn.Module):
    """Hidden features weighed by a softmax over all of them: a whole value of which each rank takes its part."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down, self.weights = nn.Linear(width, ffn), nn.Linear(ffn, width), Softmax(ffn)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * self.weights())


class Inline(nn.Module):
    """A norm that is used whole too, and a tanh after the second matrix: the collectives lie inside the forward."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(ffn, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(width, ffn) * ffn**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x, x.shape[-1:])
        return torch.tanh(F.linear(F.gelu(F.linear(h, self.up)), self.down)) * h


class HandNorm(nn.Module):
    """A norm of the hidden features, written out: over a cut width it still runs."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


class Frozen(nn.Module):
    """An MLP with a bias that is not trained, and a parameter that nothing reads."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.up.bias.requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Dropping(nn.Module):
    """Dropout of the cut hidden features, then of the whole result."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.down(self.inner(F.relu(self.up(x)))))


OWN = {
    "grouped": lambda: framed(Grouped),
    "sliced": lambda: framed(Sliced, FFN),
    "shares": lambda: framed(Shares, FFN),
    "inline": lambda: framed(Inline, FFN),
    "hand_norm": lambda: framed(HandNorm, FFN),
    "frozen": lambda: framed(Frozen, FFN),
    "dropping": lambda: framed(Dropping, FFN),
}
