"""Small language models written as people write them."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.attention import SdpaAttention
from tests.zoo.frame import BATCH, LENGTH, VOCAB, VOCAB_ODD, Built, seeded, words


class LiteralBlock(nn.Module):
    """A GPT block with its sizes as numbers in the code: no attribute can be edited."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.c_attn, self.c_proj = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(64, dim=2)
        q = q.view(b, t, 4, 16).transpose(1, 2)
        k = k.view(b, t, 4, 16).transpose(1, 2)
        v = v.view(b, t, 4, 16).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, 64))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class LiteralGpt(nn.Module):
    """Two literal blocks, learned positions, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, 64), nn.Embedding(32, 64)
        self.h = nn.ModuleList([LiteralBlock(), LiteralBlock()])
        self.ln_f = nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def nanogpt_literal() -> Built:
    """nanoGPT with literal sizes in forward."""
    return seeded(LiteralGpt), {"ids": words(BATCH, LENGTH)}


@dataclass
class GptConfig:
    """nanoGPT's own names."""

    n_layer: int = 2
    n_head: int = 12
    n_embd: int = 60
    vocab_size: int = 72
    block_size: int = 32
    dropout: float = 0.0
    bias: bool = True


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention: sizes from attributes, a mask in a buffer."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(config.dropout), nn.Dropout(config.dropout)
        self.n_head, self.n_embd = config.n_head, config.n_embd
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GptBlock(nn.Module):
    """Attention and MLP, each after its norm."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """nanoGPT with a tied head."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList([GptBlock(config) for _ in range(config.n_layer)]),
            "ln_f": nn.LayerNorm(config.n_embd),
        })  # fmt: skip
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        x = self.transformer.drop(self.transformer.wte(ids) + self.transformer.wpe(places))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def nanogpt() -> Built:
    """nanoGPT with its sizes read from attributes."""
    return seeded(Gpt, GptConfig()), {"ids": words(BATCH, LENGTH, vocab=72)}


def nanogpt_dropout() -> Built:
    """The same with dropout of 0.1 at the embedding, in attention and after both branches."""
    return seeded(Gpt, GptConfig(dropout=0.1)), {"ids": words(BATCH, LENGTH, vocab=72)}


class TinyLm(nn.Module):
    """An embedding, one attention layer, one MLP and a head."""

    def __init__(self, vocab: int, width: int = 22) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm1, self.norm2, self.norm3 = nn.RMSNorm(width), nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = SdpaAttention(width, 12, 12, 5)
        self.mlp = nn.Sequential(nn.Linear(width, 84), nn.GELU(), nn.Linear(84, width))
        self.head = nn.Linear(width, vocab)

    def body(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(self.norm1(x))
        return self.norm3(x + self.mlp(self.norm2(x)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(ids))


def vocab_odd() -> Built:
    """A vocabulary of 53 words, which no degree divides."""
    return seeded(TinyLm, VOCAB_ODD), {"ids": words(BATCH, LENGTH, vocab=VOCAB_ODD)}


class LogSoftmaxLm(TinyLm):
    """A head that ends in log-softmax over the vocabulary."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.log_softmax(super().forward(ids), dim=-1)


def log_softmax_head() -> Built:
    """Log-softmax over 60 words: the vocabulary is whole or gathered before it."""
    return seeded(LogSoftmaxLm, VOCAB), {"ids": words(BATCH, LENGTH)}


class PaddedLm(TinyLm):
    """A head tied to an embedding that has a padding word."""

    def __init__(self, vocab: int, width: int = 22) -> None:
        super().__init__(vocab, width)
        self.embed = nn.Embedding(vocab, width, padding_idx=45)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight


def tied_padding() -> Built:
    """A padding word, 45, that lies in the last rank's rows and occurs in the input."""
    ids = words(BATCH, LENGTH)
    ids[:, 2] = 45
    return seeded(PaddedLm, VOCAB), {"ids": ids}


class ScaledEmbedding(nn.Embedding):
    """An embedding that scales in its own forward."""

    def __init__(self, vocab: int, width: int, scale: float) -> None:
        super().__init__(vocab, width)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


class ScaledLm(TinyLm):
    """An LM on a scaled embedding whose weight the parent reads for its logits."""

    def __init__(self, vocab: int, width: int = 22) -> None:
        super().__init__(vocab, width)
        self.embed = ScaledEmbedding(vocab, width, math.sqrt(width))
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.body(ids), self.embed.weight)


def scaled_embedding() -> Built:
    """An embedding subclass that scales, and a head without a module."""
    return seeded(ScaledLm, VOCAB), {"ids": words(BATCH, LENGTH)}


class TwoHeads(TinyLm):
    """Logits for words and a score for each token, from one body."""

    def __init__(self, vocab: int, width: int = 22) -> None:
        super().__init__(vocab, width)
        self.score = nn.Sequential(nn.Linear(width, 28), nn.Tanh(), nn.Linear(28, 1))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(ids)
        return self.head(x), self.score(x).squeeze(-1)


def two_heads() -> Built:
    """Two heads on one body."""
    return seeded(TwoHeads, VOCAB), {"ids": words(BATCH, LENGTH)}
