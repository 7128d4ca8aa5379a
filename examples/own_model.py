"""A model of one's own, no transformers in it, with sizes written into the forward.

    tpconvert plan   examples/own_model.py:build --tp 2
    tpconvert verify examples/own_model.py:build --tp 2
    tpconvert shard  examples/own_model.py:build --tp 2 -o own-tp2
    tpconvert train  own-tp2 --config examples/train-own.yaml

A SOURCE that is a function returns the module and example inputs: keyword arguments as a dict, or a tuple.  To train it
on data that is no text, a function returns a dataset, and another the loss of a batch of it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(96, 3 * 96)
        self.out = nn.Linear(96, 96)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).split(96, dim=2)
        q, k, v = (t.view(batch, length, 6, 16).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, 96))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(96), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(96), nn.Linear(96, 384), nn.Linear(384, 96)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 96)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, 500, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    return Model(), {"ids": torch.randint(0, 500, (2, 13))}


class Sequences(Dataset[dict[str, Tensor]]):
    """Numbers that go up by one and the same step; the step has to be found out from the first two."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, step = index % 500, 1 + index // 500
        return {"ids": (first + step * torch.arange(33)) % 500}


def examples() -> Dataset[dict[str, Tensor]]:
    return Sequences()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["ids"][:, 1:].flatten())
