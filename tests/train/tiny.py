"""A small language model in one file, its plan by hand, and plain training of it in one process."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, HEAD, HIDDEN = 259, 12, 3, 5, 22


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD) for _ in range(3))
        self.o = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in (self.q(x), self.k(x), self.v(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Lm(nn.Module):
    def __init__(self, dropout: float = 0.0, unit: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(dropout), Layer(dropout)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.unused = nn.Linear(2, 2)
        self.unit = unit

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return 9 * logits / logits.norm(dim=-1, keepdim=True) if self.unit else logits


def _built(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    from tests.models import perturb

    torch.manual_seed(1)
    return perturb(Lm(**settings)).to(dtype), {"ids": torch.arange(14).view(2, 7)}


def lm():
    return _built()


def lm_bf16():
    return _built(torch.bfloat16)


def lm_dropout():
    return _built(dropout=0.3)


class Failing(Lm):
    """Fails on rank 1 in training: with an exception, or as if the machine had gone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        if self.training and os.environ.get("RANK") == "1":
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("this model cannot add")
        return super().forward(ids)


def lm_raises():
    return Failing("raises"), {"ids": torch.arange(14).view(2, 7)}


def lm_killed():
    return Failing("killed"), {"ids": torch.arange(14).view(2, 7)}


def lm_unit():
    """Logits that are still worked on after the head, so that a loss of cut logits would be of the wrong ones."""
    return _built(unit=True)


def plan_by_hand(module: nn.Module, tp: int, name: str):
    from tests.parallel.same import columns, plan_of, rows
    from tpconvert.spec.plan import Axis, Boundary, Edit

    heads, words, hidden = (HEADS, HEAD), rows(WORDS), (HIDDEN, 1)
    cut = {"embed.weight": words, "head.weight": words}
    flags, boundaries, edits = {}, [], []
    for layer in ("layers.0", "layers.1"):
        for part in "qkv":
            cut[f"{layer}.attention.{part}.weight"] = cut[f"{layer}.attention.{part}.bias"] = rows(heads)
        cut[f"{layer}.attention.o.weight"] = columns(heads)
        cut[f"{layer}.up.weight"] = cut[f"{layer}.up.bias"] = rows(hidden)
        cut[f"{layer}.down.weight"] = columns(hidden)
        flags[f"{layer}.attention.o.bias"] = flags[f"{layer}.down.bias"] = {"once": True}
        boundaries += [
            Boundary("copy", f"{layer}.norm1", "output", ("",)),
            Boundary("reduce", f"{layer}.attention.o", "output", ("",)),
            Boundary("copy", f"{layer}.norm2", "output", ("",)),
            Boundary("reduce", f"{layer}.down", "output", ("",)),
        ]
        edits.append(Edit(f"{layer}.attention", "heads", HEADS, rows(HEADS).blocks))
    boundaries += [
        Boundary("reduce", "embed", "output", ("",)),
        Boundary("copy", "norm", "output", ("",)),
        Boundary("gather", "head", "output", ("",), axis="vocabulary", dim=2, blocks=words.blocks, shape=(2, 7, WORDS)),
    ]
    axes = (Axis("vocabulary", "vocabulary", WORDS, ("embed.weight", "head.weight")),)
    return plan_of(
        module, tp, cut, flags, boundaries=tuple(boundaries), edits=tuple(edits), axes=axes, source={"name": name}
    )


def make_folder(out: Path, tp: int, function: str = "lm", *, by_hand: bool = True) -> Path:
    """The sharded folder of one of the functions above."""
    from tpconvert.checkpoint import module_weights, shard
    from tpconvert.planning import make_plan

    name = f"{__file__}:{function}"
    module, inputs = globals()[function]()
    plan = plan_by_hand(module, tp, name) if by_hand else make_plan(module, inputs, tp=tp, source={"name": name})
    shard(module_weights(module), plan, out)
    return out


def make_text(path: Path, characters: int = 4000) -> Path:
    """Text with something to learn in it, every stretch of it unlike the others."""
    text = "".join(f"{i} times {i % 7} is {i * (i % 7)}.\n" for i in range(characters))
    path.write_text(text[:characters])
    return path


def train_plainly(
    config, function: str = "lm", dtype: torch.dtype = torch.float64, norms: list[float] | None = None
) -> tuple[nn.Module, list[float]]:
    """The model after training it whole, in one process, by torch's own optimizer and clipping; and all losses.

    The gradient norms are added to ``norms``.
    """
    from tpconvert.train.data.run import Batches, Position, make_sequences
    from tpconvert.train.examples.text import open_tokens, tokenize
    from tpconvert.train.examples.tokenizer import ByteTokenizer

    training, tokenizer = config.training, ByteTokenizer()
    module = globals()[function]()[0].to(dtype).train()
    tokens = open_tokens(tokenize(config.data, tokenizer, Path(config.data.cache)))
    batches = Batches((make_sequences(config, tokens, tokenizer),), training.seed, training.global_batch_size, 1, 0, 1)
    decay = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": training.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer
    if training.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=training.lr)
    else:
        optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, eps=training.eps, foreach=False)
    losses, steps = [], batches.steps(Position())
    for step in range(training.steps):
        (batch,), _ = next(steps)
        for group in optimizer.param_groups:
            group["lr"] = training.lr * 0.5 * (1 + math.cos(math.pi * step / training.steps))
        loss = F.cross_entropy(module(batch.ids).flatten(0, 1), batch.labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        if norms is not None:
            norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return module, losses
