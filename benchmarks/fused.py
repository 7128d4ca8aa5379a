"""Would products that share their input be faster as one?  A rank's layers, with q, k, v and gate, up apart and fused.

    python benchmarks/fused.py                       # on one GPU, some minutes
    python benchmarks/fused.py --tp 2 --tokens 16384 --layers 4

Layers of a Llama in plain torch, of the sizes that a rank of tp has, without collectives: what is apart and what is
fused differ in nothing else, and weights are fused from the start, which a converted model's would have to be made.
Forward and backward, the median of 20 steps: eager, compiled layer by layer, and that as one CUDA graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KEY_HEADS, HEAD, FFN = 4096, 32, 8, 128, 14336
WARM, STEPS = 5, 20


class Layer(nn.Module):
    """One layer: attention of a rank's heads with rotary positions, and a gated feed-forward."""

    def __init__(self, tp: int, fused: tuple[bool, bool]) -> None:
        super().__init__()
        self.query, self.key, self.ffn = HEADS // tp * HEAD, KEY_HEADS // tp * HEAD, FFN // tp
        self.qkv = columns([self.query, self.key, self.key], fused[0])
        self.gate_up = columns([self.ffn, self.ffn], fused[1])
        self.out, self.down = nn.Linear(self.query, WIDTH, bias=False), nn.Linear(self.ffn, WIDTH, bias=False)
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """The residual stream."""
        q, k, v = (self.heads(y) for y in products(self.qkv, self.before(x_BTD), [self.query, self.key, self.key]))
        q, k = (y * cos_TH + turned(y) * sin_TH for y in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = products(self.gate_up, self.between(x_BTD), [self.ffn, self.ffn])
        return x_BTD + self.down(F.silu(gate) * up)

    def heads(self, x_BTD: Tensor) -> Tensor:
        """Heads before positions."""
        return x_BTD.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def columns(sizes: list[int], fused: bool) -> nn.ModuleList:
    """Layers of these many features, or one of all."""
    return nn.ModuleList(nn.Linear(WIDTH, n, bias=False) for n in ([sum(sizes)] if fused else sizes))


def products(layers: nn.ModuleList, x: Tensor, sizes: list[int]) -> list[Tensor]:
    """What the layers make of one input."""
    made = [layer(x) for layer in layers]
    return made if len(made) > 1 else list(made[0].split(sizes, -1))


def turned(x: Tensor) -> Tensor:
    """For rotary positions."""
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


def milliseconds(tp: int, tokens: int, layers: int, fused: tuple[bool, bool], way: str) -> float:
    """Of a step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    stack = nn.ModuleList(Layer(tp, fused) for _ in range(layers))
    if way != "eager":
        for layer in stack:
            layer.compile()
    x, grad = torch.randn(1, tokens, WIDTH, requires_grad=True), torch.randn(1, tokens, WIDTH)
    cos, sin = torch.randn(tokens, HEAD), torch.randn(tokens, HEAD)

    def step() -> None:
        stack.zero_grad()
        x.grad = None
        y = x
        for layer in stack:
            y = layer(y, cos, sin)
        y.backward(grad)

    run: Callable[[], None] = step
    if way == "recorded":
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    times = []
    for _ in range(WARM + STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[WARM:])[STEPS // 2]


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    ways = ((False, False), (True, False), (False, True), (True, True))
    print("| tp | step | apart | q, k, v fused | gate, up fused | both | apart again |", "|---" * 7 + "|", sep="\n")
    for tp in options.tp:
        for way in ("eager", "compiled", "recorded"):
            found = [milliseconds(tp, options.tokens, options.layers, f, way) for f in (*ways, ways[0])]
            print(f"| {tp} | {way} |", " | ".join(f"{ms:.2f}" for ms in found), "|", flush=True)


if __name__ == "__main__":
    main()
