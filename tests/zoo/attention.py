"""Self-attention in its many forms; each core maps (batch, length, width) to itself."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.frame import BATCH, LENGTH, WIDTH, Built, Framed, floats, framed, seeded


def causal(scores: Tensor) -> Tensor:
    """Scores with minus infinity where a query would see a later key."""
    q, k = scores.shape[-2:]
    return scores.masked_fill(torch.ones(q, k, dtype=torch.bool, device=scores.device).triu(1), float("-inf"))


class Attention(nn.Module):
    """Separate q, k and v with biases and a softmax written out; subclasses change one step each."""

    def __init__(self, width: int, heads: int, kv: int, head_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.kv, self.head_dim = heads, kv, head_dim
        self.q = nn.Linear(width, heads * head_dim, bias=bias)
        self.k = nn.Linear(width, kv * head_dim, bias=bias)
        self.v = nn.Linear(width, kv * head_dim, bias=bias)
        self.o = nn.Linear(heads * head_dim, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(b, t, self.kv, self.head_dim).transpose(1, 2)
        v = self.v(x).view(b, t, self.kv, self.head_dim).transpose(1, 2)
        return self.o(self.attend(q, k, v).transpose(1, 2).reshape(b, t, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(causal(self.scores(q, k)), dim=-1) @ v

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) * self.head_dim**-0.5


def attention() -> Built:
    """12 heads of 5."""
    return framed(Attention, 12, 12, 5)


def attention_odd() -> Built:
    """7 heads of 5: uneven pieces or whole."""
    return framed(Attention, 7, 7, 5)


class GqaInterleave(Attention):
    """Key and value heads repeated with repeat_interleave."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rep = self.heads // self.kv
        return super().attend(q, k.repeat_interleave(rep, dim=1), v.repeat_interleave(rep, dim=1))


def gqa_interleave() -> Built:
    """12 query heads on 4 key heads."""
    return framed(GqaInterleave, 12, 4, 5)


def gqa_few() -> Built:
    """12 query heads on 2 key heads: at tp 4 each key head is held by two ranks."""
    return framed(GqaInterleave, 12, 2, 5)


class GqaExpand(Attention):
    """Key and value heads repeated with expand and reshape."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, self.spread(k), self.spread(v))

    def spread(self, x: Tensor) -> Tensor:
        b, kv, t, d = x.shape
        return x[:, :, None].expand(b, kv, self.heads // kv, t, d).reshape(b, self.heads, t, d)


def gqa_expand() -> Built:
    """12 query heads on 6 key heads: cut by 2 and by 3."""
    return framed(GqaExpand, 12, 6, 5)


class GqaSdpa(Attention):
    """Grouped heads left to scaled_dot_product_attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def gqa_sdpa() -> Built:
    """12 query heads on 4 key heads inside one op."""
    return framed(GqaSdpa, 12, 4, 6, bias=False)


def mqa() -> Built:
    """6 query heads broadcast against a single key head."""
    return framed(Attention, 6, 1, 5)


class SdpaAttention(Attention):
    """Plain heads in scaled_dot_product_attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def slopes(heads: int) -> Tensor:
    """ALiBi's slope of each head."""
    return torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])


class AlibiBuffer(Attention):
    """ALiBi with its slopes in a buffer."""

    def __init__(self, width: int, heads: int, kv: int, head_dim: int) -> None:
        super().__init__(width, heads, kv, head_dim)
        self.register_buffer("slopes", slopes(heads))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[-2], device=k.device)
        return super().scores(q, k) + self.slopes[:, None, None] * (places[None, :] - places[:, None])


def alibi_buffer() -> Built:
    """ALiBi slopes in a buffer of 12 heads."""
    return framed(AlibiBuffer, 12, 12, 5)


class AlibiComputed(Attention):
    """ALiBi with slopes computed from the number of heads in forward."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        slope = 2.0 ** (-8 * torch.arange(1, self.heads + 1, device=q.device, dtype=q.dtype) / self.heads)
        places = torch.arange(k.shape[-2], device=k.device)
        return super().scores(q, k) + slope.view(self.heads, 1, 1) * (places[None, :] - places[:, None])


def alibi_computed() -> Built:
    """ALiBi slopes made in forward: dividing the head count alone would give wrong slopes."""
    return framed(AlibiComputed, 12, 12, 5)


class HeadNorms(Attention):
    """Queries and keys normalised within each head by weights shared over heads."""

    def __init__(self, width: int, heads: int, kv: int, head_dim: int) -> None:
        super().__init__(width, heads, kv, head_dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(self.q_norm(q), self.k_norm(k))


def head_norms() -> Built:
    """Whole norm weights on cut heads: their gradients must be summed."""
    return framed(HeadNorms, 12, 12, 5)


class WidthNorm(SdpaAttention):
    """Queries normalised over all heads together."""

    def __init__(self, width: int, heads: int, kv: int, head_dim: int) -> None:
        super().__init__(width, heads, kv, head_dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(heads * head_dim), nn.RMSNorm(kv * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_norm(self.q(x)).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_norm(self.k(x)).view(b, t, self.kv, self.head_dim).transpose(1, 2)
        v = self.v(x).view(b, t, self.kv, self.head_dim).transpose(1, 2)
        return self.o(self.attend(q, k, v).transpose(1, 2).reshape(b, t, -1))


def width_norm() -> Built:
    """A norm over the whole width of the queries: whole, or gathered."""
    return framed(WidthNorm, 12, 12, 5)


class Rotary(SdpaAttention):
    """Rotary positions from tables kept in buffers."""

    def __init__(self, width: int, heads: int, kv: int, head_dim: int, places: int = 32) -> None:
        super().__init__(width, heads, kv, head_dim)
        angle = torch.outer(torch.arange(places), 100.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angle.sin().repeat(1, 2), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.turn(q), self.turn(k), v)

    def turn(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        t = x.shape[-2]
        return x * self.cos[:t] + turned * self.sin[:t]


def rotary() -> Built:
    """Rotary positions; head_dim 6 in two halves."""
    return framed(Rotary, 12, 12, 6)


class RelativeBias(Attention):
    """A learned bias for each bucket of distance and each head, as in T5."""

    def __init__(self, width: int, heads: int, kv: int, head_dim: int, buckets: int = 9) -> None:
        super().__init__(width, heads, kv, head_dim)
        self.buckets = buckets
        self.bias = nn.Embedding(buckets, heads)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[-2], device=k.device)
        bucket = (places[None, :] - places[:, None]).clamp(-(self.buckets // 2), self.buckets // 2) + self.buckets // 2
        return super().scores(q, k) + self.bias(bucket).permute(2, 0, 1)[None]


def relative_bias() -> Built:
    """A bias table of 9 buckets by 12 heads."""
    return framed(RelativeBias, 12, 12, 5)


class FusedPerHead(SdpaAttention):
    """q, k and v fused head by head, as in GPT-NeoX."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        nn.Module.__init__(self)
        self.heads, self.head_dim = heads, head_dim
        self.qkv = nn.Linear(width, heads * 3 * head_dim)
        self.o = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, self.heads, 3 * self.head_dim).transpose(1, 2).chunk(3, dim=-1)
        return self.o(self.attend(q, k, v).transpose(1, 2).reshape(b, t, self.heads * self.head_dim))


def fused_per_head() -> Built:
    """One weight of 12 heads x 3 x 5 rows."""
    return framed(FusedPerHead, 12, 5)


class FusedPerGroup(FusedPerHead):
    """Each group's queries, then its key and its value, fused as in Falcon."""

    def __init__(self, width: int, groups: int, rep: int, head_dim: int) -> None:
        super().__init__(width, groups * rep, head_dim)
        self.groups, self.rep = groups, rep
        self.qkv = nn.Linear(width, groups * (rep + 2) * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        fused = self.qkv(x).view(b, t, self.groups, self.rep + 2, self.head_dim)
        q, k, v = fused[..., :-2, :], fused[..., [-2], :], fused[..., [-1], :]
        k, v = torch.broadcast_to(k, q.shape), torch.broadcast_to(v, q.shape)
        q, k, v = (z.flatten(2, 3).transpose(1, 2) for z in (q, k, v))
        return self.o(self.attend(q, k, v).transpose(1, 2).reshape(b, t, self.heads * self.head_dim))


def fused_per_group() -> Built:
    """4 groups of 3 queries, one key and one value."""
    return framed(FusedPerGroup, 4, 3, 5)


class EinsumAttention(nn.Module):
    """Attention in einsum only; q, k and v are one parameter (3, width, heads, head_dim)."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, width, heads, head_dim) * width**-0.5)
        self.out = nn.Parameter(torch.randn(heads, head_dim, width) * (heads * head_dim) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("btd,cdhk->cbhtk", x, self.qkv).unbind(0)
        weights = (torch.einsum("bhik,bhjk->bhij", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
        return torch.einsum("bhij,bhjk,hkd->bid", weights, v, self.out)


def einsum_attention() -> Built:
    """A fused parameter of four dims; a contraction of three operands at the end."""
    return framed(EinsumAttention, 12, 5)


class EinsumLayers(nn.Module):
    """Two layers of attention out of parameters (layer, 3, width, heads, head_dim)."""

    def __init__(self, width: int, heads: int, head_dim: int, layers: int = 2) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(layers, 3, width, heads, head_dim) * width**-0.5)
        self.out = nn.Parameter(torch.randn(layers, heads, head_dim, width) * (heads * head_dim) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.qkv.shape[0]):
            q, k, v = torch.einsum("b t d, c d h k -> c b h t k", x, self.qkv[i])
            mixed = F.scaled_dot_product_attention(q, k, v)
            x = x + torch.einsum("bhik,hkd->bid", mixed, self.out[i])
        return x


def einsum_layers() -> Built:
    """A fused parameter of five dims that holds every layer."""
    return framed(EinsumLayers, 12, 5)


class LatentAttention(nn.Module):
    """Low-rank q and kv with a rope part of the key that all heads share, as in DeepSeek."""

    def __init__(self, width: int, heads: int, nope: int, rope: int, v_dim: int, q_rank: int, kv_rank: int) -> None:
        super().__init__()
        self.heads, self.nope, self.rope, self.v_dim, self.kv_rank = heads, nope, rope, v_dim, kv_rank
        self.q_a, self.q_norm = nn.Linear(width, q_rank, bias=False), nn.RMSNorm(q_rank)
        self.q_b = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(width, kv_rank + rope, bias=False), nn.RMSNorm(kv_rank)
        self.kv_b = nn.Linear(kv_rank, heads * (nope + v_dim), bias=False)
        self.o = nn.Linear(heads * v_dim, width)
        self.register_buffer("angle", torch.outer(torch.arange(32.0), torch.tensor([1.0, 0.1])).repeat(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(b, t, self.heads, self.nope + self.rope).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        latent, k_rope = self.kv_a(x).split([self.kv_rank, self.rope], dim=-1)
        kv = self.kv_b(self.kv_norm(latent)).view(b, t, self.heads, self.nope + self.v_dim).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)
        k_rope = self.turn(k_rope.view(b, 1, t, self.rope)).expand(b, self.heads, t, self.rope)
        q, k = torch.cat((q_nope, self.turn(q_rope)), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
        mixed = torch.softmax(causal(q @ k.mT * q.shape[-1] ** -0.5), dim=-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(b, t, self.heads * self.v_dim))

    def turn(self, x: Tensor) -> Tensor:
        angle, half = self.angle[: x.shape[-2]], self.rope // 2
        return x * angle.cos() + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * angle.sin()


def latent_attention() -> Built:
    """12 heads of 6 + 4 (keys) and 5 (values), ranks 14 and 16."""
    return framed(LatentAttention, 12, 6, 4, 5, 14, 16)


class ParallelBlock(nn.Module):
    """One norm feeds attention and MLP, and one residual takes both: one copy and one sum are enough."""

    def __init__(self, width: int, heads: int, head_dim: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = SdpaAttention(width, heads, heads, head_dim)
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h) + self.down(F.gelu(self.up(h)))


def parallel_block() -> Built:
    """Two parallel blocks, one after the other."""
    module = seeded(lambda: Framed(nn.Sequential(*(ParallelBlock(WIDTH, 12, 5, 84) for _ in range(2)))))
    return module, {"x": floats(BATCH, LENGTH, WIDTH)}
