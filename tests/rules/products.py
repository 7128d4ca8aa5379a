"""Uses of the ops that contract, normalise and reduce."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rules.one import Buffer, Case, bits, case, numbers, places, positive

X, Y, Z = (3, 5), (5, 7), (3, 5, 7)


PRODUCTS: dict[str, list[Case]] = {
    "linear": [case(F.linear, X, (7, 5), (7,)), case(F.linear, Z, (11, 7)), case(F.linear, (5,), (7, 5), (7,))],
    "bilinear": [case(F.bilinear, (3, 5), (3, 7), (11, 5, 7), (11,))],
    "matmul": [
        case(torch.matmul, X, Y),
        case(torch.matmul, (2, 1, 3, 5), (7, 5, 11)),
        case(torch.matmul, (5,), (3, 5, 7)),
        case(torch.matmul, Z, (7,)),
        case(torch.matmul, (5,), (5,)),
    ],
    "mm": [case(torch.mm, X, Y)],
    "bmm": [case(torch.bmm, Z, (3, 7, 11))],
    "mv": [case(torch.mv, X, (5,))],
    "dot": [case(torch.dot, (5,), (5,))],
    "__rmatmul__": [case(Tensor.__rmatmul__, Y, X)],
    "addmm": [
        case(torch.addmm, (7,), X, Y),
        case(torch.addmm, (3, 7), X, Y),
        case(lambda b, x, w: torch.addmm(b, x, w, beta=2.0, alpha=3.0), (7,), X, Y),
        case(lambda b, x, w: b.clone().addmm_(x, w), (3, 7), X, Y),
    ],
    "addmv": [case(torch.addmv, (3,), X, (5,))],
    "baddbmm": [case(torch.baddbmm, (3, 5, 11), Z, (3, 7, 11)), case(torch.baddbmm, (5, 11), Z, (3, 7, 11))],
    "einsum": [
        case(lambda x, y: torch.einsum("ij,jk->ik", x, y), X, Y),
        case(lambda x, y: torch.einsum("ij,jk", x, y), X, Y),
        case(lambda x, y: torch.einsum("...ij,kj->...ik", x, y), Z, (11, 7)),
        case(lambda x, y, z: torch.einsum("bij,bj,k->ki", x, y, z), Z, (3, 7), (11,)),
        case(lambda x: torch.einsum("ij->j", x), X),
        case(lambda x, y: torch.einsum("i...,...j->...ij", x, y), X, (5, 7)),
        case(lambda x: torch.einsum("ijj->ij", x), (3, 5, 5)),
    ],
    "tensordot": [
        case(lambda x, y: torch.tensordot(x, y, 1), Z, (7, 11)),
        case(torch.tensordot, (2, 5, 7), (5, 7, 11)),
        case(lambda x, y: torch.tensordot(x, y, dims=([0, -1], [1, 0])), Z, (7, 3, 11)),
    ],
    "kron": [case(torch.kron, X, (2, 7)), case(torch.kron, (5,), X), case(torch.kron, (3, 1), (1, 5))],
    "cosine_similarity": [
        case(F.cosine_similarity, Z, Z),
        case(lambda x, y: F.cosine_similarity(x, y, dim=-1), Z, (5, 7)),
        case(lambda x, y: F.cosine_similarity(x, y, dim=0), Z, Z),
        case(lambda x, y: F.cosine_similarity(x[:, None], y[None], dim=-1), X, (7, 5)),
    ],
    "pairwise_distance": [
        case(F.pairwise_distance, Z, Z),
        case(lambda x, y: F.pairwise_distance(x, y, keepdim=True), X, X),
    ],
    "outer": [case(torch.outer, (3,), (5,))],
    "ger": [case(torch.ger, (3,), (5,))],
    "scaled_dot_product_attention": [
        case(F.scaled_dot_product_attention, (2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13)),
        case(
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
            (2, 3, 5, 7),
            (2, 3, 11, 7),
            (2, 3, 11, 13),
            (3, 1, 11),
        ),
        case(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            (2, 15, 5, 7),
            (2, 3, 5, 7),
            (2, 3, 5, 7),
        ),
        case(F.scaled_dot_product_attention, (3, 5, 7), (3, 11, 7), (3, 11, 13)),
        case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (3, 5, 7), (1, 11, 7), (3, 11, 13)),
    ],
    "embedding": [
        case(lambda w, i: F.embedding(i, w), (7, 5), places(2, 3, below=7)),
        case(lambda w, i: F.embedding(i, w, padding_idx=6), (7, 5), places(2, 3, below=7)),
        case(lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), (7, 5), places(5, 3, below=7)),
    ],
    "embedding_bag": [
        case(lambda w, i: F.embedding_bag(i, w), (7, 5), places(2, 3, below=7)),
        case(lambda w, i, b: F.embedding_bag(i, w, b, mode="max"), (7, 5), places(11, below=7), torch.tensor([0, 4])),
        case(
            lambda w, i, s: F.embedding_bag(i, w, per_sample_weights=s, mode="sum"),
            (7, 5),
            places(2, 3, below=7),
            (2, 3),
        ),
    ],
    "conv1d": [
        case(F.conv1d, (2, 3, 7), (5, 3, 2), (5,)),
        case(lambda x, w, b: F.conv1d(x, w, b, groups=3), (2, 6, 7), (15, 2, 2), (15,)),
        case(lambda x, w: F.conv1d(x, w, groups=5, padding=1), (2, 5, 7), (5, 1, 2)),
        case(F.conv1d, (3, 7), (5, 3, 2)),
    ],
    "conv2d": [
        case(F.conv2d, (2, 3, 7, 5), (5, 3, 2, 2), (5,)),
        case(lambda x, w: F.conv2d(x, w, groups=3), (2, 3, 7, 5), (6, 1, 2, 2)),
    ],
    "conv3d": [case(F.conv3d, (2, 3, 5, 3, 2), (5, 3, 2, 2, 1))],
    "conv_transpose1d": [
        case(F.conv_transpose1d, (2, 3, 7), (3, 5, 2), (5,)),
        case(lambda x, w: F.conv_transpose1d(x, w, groups=3), (2, 6, 7), (6, 5, 2)),
    ],
    "conv_transpose2d": [case(F.conv_transpose2d, (2, 3, 7, 5), (3, 5, 2, 2), (5,))],
    "conv_transpose3d": [case(F.conv_transpose3d, (2, 3, 5, 3, 2), (3, 5, 2, 2, 1))],
    "cdist": [case(torch.cdist, X, (7, 5)), case(torch.cdist, (2, 3, 5), (2, 7, 5))],
    "linalg_solve_triangular": [
        case(
            lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
            numbers(3, 5, 5).tril() + 2 * torch.eye(5),
            (3, 5, 7),
        ),
        case(
            lambda a, b: torch.linalg.solve_triangular(a, b, upper=False, left=False),
            numbers(3, 5, 5).tril() + 2 * torch.eye(5),
            (3, 7, 5),
        ),
    ],
}

NORMS: dict[str, list[Case]] = {
    "layer_norm": [
        case(lambda x, w, b: F.layer_norm(x, (5, 7), w, b), Z, (5, 7), (5, 7)),
        case(lambda x: F.layer_norm(x, (7,)), Z),
    ],
    "rms_norm": [case(lambda x, w: F.rms_norm(x, (7,), w), Z, (7,))],
    "batch_norm": [
        case(lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), Z, (5,), (5,), Buffer(numbers(5)), Buffer(positive(5))),
        case(lambda x, w: F.batch_norm(x, None, None, w, training=True), Z, (5,)),
    ],
    "instance_norm": [
        case(lambda x, w: F.instance_norm(x, weight=w), Z, (5,)),
        case(
            lambda x, m, v: F.instance_norm(x, m, v, use_input_stats=False), Z, Buffer(numbers(5)), Buffer(positive(5))
        ),
    ],
    "group_norm": [
        case(lambda x, w, b: F.group_norm(x, 3, w, b), (2, 15, 7), (15,), (15,)),
        case(lambda x: F.group_norm(x, 5), (2, 5, 7)),
    ],
    "_weight_norm": [
        case(lambda v, g: torch._weight_norm(v, g, 0), (5, 3), (5, 1)),
        case(lambda v, g: torch._weight_norm(v, g, 0), (5, 3, 2), (5, 1, 1)),
        case(lambda v, g: torch._weight_norm(v, g, 1), (5, 3), (1, 3)),
    ],
    "norm": [
        case(lambda x: torch.norm(x, dim=1), Z),
        case(lambda x: x.norm(2, -1, True), Z),
        case(lambda x: x.norm(), Z),
    ],
    "linalg_vector_norm": [case(lambda x: torch.linalg.vector_norm(x, 2, dim=(0, 2)), Z)],
    "softmax": [case(lambda x: x.softmax(-1), Z), case(lambda x: F.softmax(x, dim=1), Z)],
    "_softmax": [case(lambda x: torch._softmax(x, 1, False), Z)],
    "log_softmax": [case(lambda x: F.log_softmax(x, dim=0), Z)],
    "logcumsumexp": [case(lambda x: torch.logcumsumexp(x, 1), Z)],
    "cumsum": [case(lambda x: x.cumsum(1), Z), case(lambda x: torch.cumsum(x, dim=-1), Z)],
    "cumprod": [case(lambda x: x.cumprod(1), Z)],
    "flip": [
        case(lambda x: x.flip(1), Z),
        case(lambda x: x.flip(0, 2), Z),
        case(lambda x: torch.flip(x, dims=(0, -1)), Z),
    ],
    "roll": [
        case(lambda x: x.roll(1, 1), Z),
        case(lambda x: torch.roll(x, (1, 2), (0, 2)), Z),
        case(lambda x: x.roll(2), Z),
    ],
    "argsort": [case(lambda x: x.argsort(1), Z), case(lambda x: x.argsort(), Z)],
    "sort": [
        case(lambda x: x.sort(1), Z),
        case(lambda x: torch.sort(x), Z),
        case(lambda x: torch.sort(x, descending=True, dim=0), Z),
    ],
    "msort": [case(torch.msort, Z)],
    "topk": [case(lambda x: x.topk(2, 1), Z), case(lambda x: torch.topk(x, 2, dim=0), Z), case(lambda x: x.topk(7), Z)],
    "kthvalue": [
        case(lambda x: x.kthvalue(2, 1), Z),
        case(lambda x: x.kthvalue(2, 1, True), Z),
        case(lambda x: x.kthvalue(2), Z),
    ],
    "tril": [case(torch.tril, Z)],
    "triu": [case(lambda x: x.triu(1), Z)],
}


def reductions() -> dict[str, list[Case]]:
    out: dict[str, list[Case]] = {}
    one = ["argmax", "argmin", "prod", "median", "max", "min"]
    several = [
        "sum",
        "nansum",
        "mean",
        "var",
        "std",
        "amax",
        "amin",
        "var_mean",
        "std_mean",
        "count_nonzero",
        "logsumexp",
    ]
    for name in [*one, *several]:
        f = getattr(torch, name)
        dims = [1] if name in one else [1, (0, 2)]
        out[name] = [case(lambda x, f=f, d=d: f(x, dim=d), Z) for d in dims]
        out[name] += [case(f, Z)] if name != "logsumexp" else []
        out[name] += [case(lambda x, f=f: f(x, dim=-1, keepdim=True), Z)] if name != "count_nonzero" else []
    out["aminmax"] = [case(lambda x: torch.aminmax(x, dim=1), Z), case(torch.aminmax, Z)]
    for f in (torch.any, torch.all):
        out[f.__name__] = [case(lambda x, f=f: f(x, 1), bits(*Z)), case(f, bits(*Z))]
    out["max"] += [case(torch.max, Z, (5, 7)), case(lambda x: x.max(1), Z)]
    out["min"] += [case(torch.min, Z, (5, 7)), case(lambda x: x.min(1, True), Z)]
    out["median"] += [case(lambda x: x.median(1), Z)]
    out["var"] += [
        case(lambda x: x.var(1), Z),
        case(lambda x: x.var(-1, keepdim=True, unbiased=False), Z),
        case(lambda x: x.var(unbiased=False), Z),
    ]
    out["std"] += [case(lambda x: torch.std(x, 1, False), Z)]
    out["var_mean"] += [
        case(lambda x: torch.var_mean(x, 1, unbiased=False), Z),
        case(lambda x: torch.var_mean(x, [0, 2], keepdim=True), Z),
    ]
    out["sum"] += [
        case(lambda x: x.sum(), Z),
        case(lambda x: x.sum(-1, True), Z),
        case(lambda x: x.sum((0, 1), dtype=torch.float64), Z),
    ]
    out["sum"] += [case(lambda x: x.sum(()), Z), case(lambda x: x.sum(axis=1), Z)]
    out["mean"] += [case(lambda x: x.mean(0, True), Z), case(lambda x: x.mean((0, 1)), Z)]
    return out
