"""Code in unusual forms: own linear layers, in-place ops, many kinds of outputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.frame import BATCH, CLASSES, FFN, LENGTH, WIDTH, Built, floats, framed, seeded


class InOutLinear(nn.Module):
    """A linear layer that stores its weight as (in, out)."""

    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inp, out) * inp**-0.5)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.weight.shape[1])


class TransposedLinear(nn.Linear):
    """A Linear whose forward is ``x @ W.T + b``."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class ScaledLinear(nn.Linear):
    """A Linear that scales what it computes, bias included, with a parameter of its own."""

    def __init__(self, inp: int, out: int) -> None:
        super().__init__(inp, out)
        self.scale = nn.Parameter(torch.ones(out))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Mlp(nn.Module):
    """Two layers of a given class around a GELU."""

    def __init__(self, width: int, layer: type[nn.Module], ffn: int) -> None:
        super().__init__()
        self.up, self.down = layer(width, ffn), layer(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def in_out_linear() -> Built:
    """Weights stored as (in, out), used with addmm."""
    return framed(Mlp, InOutLinear, FFN)


def transposed_linear() -> Built:
    """``x @ W.T`` in a subclass of Linear."""
    return framed(Mlp, TransposedLinear, FFN)


def scaled_linear() -> Built:
    """A Linear subclass whose row form must sum before it scales."""
    return framed(Mlp, ScaledLinear, FFN)


class ParentCalls(nn.Module):
    """The parent reads its children's weights and never calls them."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.log_gain = nn.Parameter(torch.zeros(ffn))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.up.weight, self.up.bias)
        h = F.relu(h) * torch.exp(self.log_gain)
        return F.linear(h, self.down.weight) + self.down.bias


def parent_calls() -> Built:
    """F.linear in the parent with the weights of nn.Linear children."""
    return framed(ParentCalls, FFN)


class InPlace(nn.Module):
    """In-place adds, masked_fill_ and assignment through an index."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, ffn), nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h += self.gate(x)
        h = torch.tanh(h)
        kept = h.clone()
        kept[:, 0] = 0.5
        kept[:, 1:3] *= 2.0
        kept.masked_fill_((torch.arange(h.shape[1], device=h.device) == 4)[None, :, None], -1.0)
        out = torch.empty_like(x)
        out[:] = self.down(kept * h)
        out.add_(x).mul_(0.5)
        return out


def in_place() -> Built:
    """In-place ops on cut and on whole values."""
    return framed(InPlace, FFN)


class Residuals(nn.Module):
    """A residual inside the cut region, and one where a whole value joins it."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.a, self.b, self.down = nn.Linear(width, ffn), nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.same, self.back = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        h = h + torch.tanh(self.b(x))
        y = self.norm(x + self.down(h))
        return y + self.back(y + F.relu(self.same(y)))


def residuals() -> Built:
    """Residuals over cut values and over a whole with what could be cut."""
    return framed(Residuals, FFN)


class Body(nn.Module):
    """The layers behind the modules that differ in what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH), nn.Linear(WIDTH, CLASSES)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x + self.down(F.silu(self.up(x)))
        return hidden, self.head(hidden)


class TupleOutput(Body):
    """Returns a tuple with a nested list and a None in it."""

    def forward(self, x: Tensor) -> tuple:
        hidden, logits = self.parts(x)
        return logits, None, [hidden, (hidden.mean(),)]


class DictOutput(Body):
    """Returns a dict."""

    def forward(self, x: Tensor) -> dict[str, object]:
        hidden, logits = self.parts(x)
        return {"logits": logits, "states": {"hidden": hidden}, "name": "body"}


@dataclass
class Outcome:
    """What :class:`DataclassOutput` returns."""

    logits: Tensor
    hidden: Tensor | None = None


class DataclassOutput(Body):
    """Returns a dataclass."""

    def forward(self, x: Tensor) -> Outcome:
        hidden, logits = self.parts(x)
        return Outcome(logits=logits, hidden=hidden)


def tuple_output() -> Built:
    """An output that is a nested tuple."""
    return seeded(TupleOutput), {"x": floats(BATCH, LENGTH, WIDTH)}


def dict_output() -> Built:
    """An output that is a nested dict."""
    return seeded(DictOutput), {"x": floats(BATCH, LENGTH, WIDTH)}


def dataclass_output() -> Built:
    """An output that is a dataclass."""
    return seeded(DataclassOutput), {"x": floats(BATCH, LENGTH, WIDTH)}
