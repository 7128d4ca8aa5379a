"""Layers that torch ships: attention, transformers, recurrent nets."""

import torch
from torch import Tensor, nn

from tests.zoo.frame import BATCH, CLASSES, LENGTH, MEMORY, VOCAB, Built, floats, seeded, words


class SelfAttention(nn.Module):
    """nn.MultiheadAttention on itself."""

    def __init__(self, heads: int, head_dim: int, *, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        width = heads * head_dim
        self.need_weights = need_weights
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=batch_first)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.head(x + self.attention(h, h, h, need_weights=self.need_weights)[0])


def mha_batch_first() -> Built:
    """12 heads of 5, batch first, attention weights returned."""
    module = seeded(SelfAttention, 12, 5, batch_first=True, need_weights=True)
    return module, {"x": floats(BATCH, LENGTH, 60)}


def mha_length_first() -> Built:
    """4 heads of 6, length first, without attention weights."""
    module = seeded(SelfAttention, 4, 6, batch_first=False, need_weights=False)
    return module, {"x": floats(LENGTH, BATCH, 24)}


class CrossAttention(nn.Module):
    """nn.MultiheadAttention on another sequence whose keys and values have widths of their own."""

    def __init__(self, heads: int, head_dim: int, kdim: int, vdim: int, *, batch_first: bool, bias_kv: bool) -> None:
        super().__init__()
        width = heads * head_dim
        self.key, self.value = nn.Linear(14, kdim), nn.Linear(14, vdim)
        self.attention = nn.MultiheadAttention(
            width, heads, kdim=kdim, vdim=vdim, batch_first=batch_first, add_bias_kv=bias_kv
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mixed, _ = self.attention(x, self.key(memory), self.value(memory), need_weights=False)
        return self.norm(x + mixed)


def mha_cross_batch_first() -> Built:
    """Keys of width 26 and values of width 34."""
    module = seeded(CrossAttention, 12, 5, 26, 34, batch_first=True, bias_kv=False)
    return module, {"x": floats(BATCH, LENGTH, 60), "memory": floats(BATCH, MEMORY, 14, seed=2)}


def mha_cross_length_first() -> Built:
    """Length first, with the extra key and value that add_bias_kv learns."""
    module = seeded(CrossAttention, 4, 6, 26, 34, batch_first=False, bias_kv=True)
    return module, {"x": floats(LENGTH, BATCH, 24), "memory": floats(MEMORY, BATCH, 14, seed=2)}


class Encoder(nn.Module):
    """An embedding, nn.TransformerEncoder and a classifier."""

    def __init__(self, *, norm_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 30)
        layer = nn.TransformerEncoderLayer(30, 6, 44, dropout, batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(30, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))


def encoder_norm_first() -> Built:
    """nn.TransformerEncoder with the norms before."""
    return seeded(Encoder, norm_first=True), {"ids": words(BATCH, LENGTH)}


def encoder_norm_last() -> Built:
    """nn.TransformerEncoder with the norms after."""
    return seeded(Encoder, norm_first=False), {"ids": words(BATCH, LENGTH)}


def encoder_dropout() -> Built:
    """The same with dropout of 0.1: inside attention, between the layers of the MLP, and on both residuals."""
    return seeded(Encoder, norm_first=False, dropout=0.1), {"ids": words(BATCH, LENGTH)}


class Decoder(nn.Module):
    """nn.TransformerDecoder with a causal mask over a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        layer = nn.TransformerDecoderLayer(24, 4, 44, dropout=0.0, batch_first=True, activation="gelu")
        self.layers = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        return self.head(self.layers(self.embed(ids), memory, tgt_mask=mask))


def decoder() -> Built:
    """nn.TransformerDecoder: self- and cross-attention."""
    return seeded(Decoder), {"ids": words(BATCH, LENGTH), "memory": floats(BATCH, MEMORY, 24, seed=2)}


class Translator(nn.Module):
    """nn.Transformer between two embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(53, 60), nn.Embedding(72, 60)
        self.core = nn.Transformer(60, 12, 1, 1, 84, dropout=0.0, batch_first=True)
        self.head = nn.Linear(60, 72)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.core(self.source(source), self.target(target), tgt_mask=mask))


def translator() -> Built:
    """nn.Transformer with a causal target."""
    inputs = {"source": words(BATCH, MEMORY, vocab=53), "target": words(BATCH, LENGTH, vocab=72)}
    return seeded(Translator), inputs


class Recurrent(nn.Module):
    """An LSTM between linear layers: its state is whole, the layers around it may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid = nn.Linear(22, 84), nn.Linear(84, 26)
        self.lstm = nn.LSTM(26, 18, batch_first=True)
        self.out, self.head = nn.Linear(18, 28), nn.Linear(28, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.mid(torch.relu(self.up(x))))
        return self.head(torch.relu(self.out(x)))


def recurrent() -> Built:
    """An LSTM between two MLPs."""
    return seeded(Recurrent), {"x": floats(BATCH, LENGTH, 22)}
