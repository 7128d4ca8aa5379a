"""What the modules of the zoo share: sizes, seeded building, and a residual frame around one core.

Sizes never coincide by accident: a fault that swaps two dims must not be hidden by equal numbers.
"""

from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, MEMORY = 3, 7, 11
WIDTH = 22  # a model width that is no multiple of a head size
FFN, FFN_FEW = 84, 28  # 84 is cut by 2, 3 and 4; 28 by 2 and 4
VOCAB, VOCAB_ODD = 60, 53
CLASSES = 10

Inputs = dict[str, Any]  # keyword arguments of forward
Built = tuple[nn.Module, Inputs]


def seeded(make, *args, seed: int = 0, **kwargs):
    """What ``make(*args, **kwargs)`` returns when the random state is ``seed``; the caller's state is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*args, **kwargs)


def floats(*shape: int, seed: int = 1) -> Tensor:
    """Seeded normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def words(*shape: int, vocab: int = VOCAB, seed: int = 1) -> Tensor:
    """Seeded word ids; the last word of the vocabulary always occurs."""
    ids = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
    ids.view(-1)[-1] = vocab - 1
    return ids


class Framed(nn.Module):
    """``head(x + core(norm(x)))``: a whole value enters the core, its result joins the residual, a head reads both."""

    def __init__(self, core: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.core = core
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = x + self.core(self.norm(x))
        return self.head(x)


def framed(make, *args, width: int = WIDTH, **kwargs) -> Built:
    """A seeded ``make(width, *args, **kwargs)`` inside a :class:`Framed`, with its input."""
    module = seeded(lambda: Framed(make(width, *args, **kwargs), width))
    return module, {"x": floats(BATCH, LENGTH, width)}
