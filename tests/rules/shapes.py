"""Uses of the ops that move, split, join and make dims."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.rules.elementwise import ELEMENTWISE
from tests.rules.one import Case, case

X, Y, Z = (3, 5), (5, 7), (3, 5, 7)


def shapes() -> dict[str, list[Case]]:
    return {
        "view": [
            case(lambda x: x.view(3, 5, 7), (15, 7)),
            case(lambda x: x.view(-1, 7), Z),
            case(lambda x: x.view(2, 3, 35), (6, 5, 7)),
            case(lambda x: x.view(6, 35), (2, 15, 7)),
            case(lambda x: x.view((3, 1, 35)), Z),
        ],
        "reshape": [
            case(lambda x: x.reshape(15, 7), Z),
            case(lambda x: torch.reshape(x, (3, -1)), Z),
            case(lambda x: x.reshape(-1), X),
        ],
        "_unsafe_view": [case(lambda x: torch.ops.aten._unsafe_view(x, (15, 7)), Z)],
        "view_as": [case(lambda x, y: x.view_as(y), (15, 7), Z)],
        "reshape_as": [case(lambda x, y: x.reshape_as(y), (15, 7), Z)],
        "flatten": [case(lambda x: x.flatten(1), Z), case(torch.flatten, Z), case(lambda x: x.flatten(0, 1), Z)],
        "ravel": [case(torch.ravel, Z)],
        "squeeze": [
            case(lambda x: x.squeeze(1), (3, 1, 5)),
            case(torch.squeeze, (3, 1, 5)),
            case(lambda x: x.squeeze(0), (3, 1, 5)),
        ],
        "unsqueeze": [case(lambda x: x.unsqueeze(1), X), case(lambda x: x.unsqueeze(-1), X)],
        "unflatten": [
            case(lambda x: x.unflatten(1, (3, 5)), (2, 15)),
            case(lambda x: x.unflatten(-1, (3, -1)), (2, 15)),
        ],
        "transpose": [
            case(lambda x: x.transpose(0, -1), Z),
            case(lambda x: torch.transpose(x, 1, 2), Z),
            case(lambda x: x.transpose(dim0=0, dim1=1), Z),
        ],
        "swapaxes": [case(lambda x: x.swapaxes(0, 1), Z)],
        "swapdims": [case(lambda x: x.swapdims(0, 1), Z)],
        "t": [case(lambda x: x.t(), X), case(lambda x: x.t(), (5,))],
        ".T": [case(lambda x: x.T, X)],
        ".mT": [case(lambda x: x.mT, Z)],
        ".H": [case(lambda x: x.H, X)],
        "adjoint": [case(lambda x: x.adjoint(), Z)],
        "permute": [
            case(lambda x: x.permute(2, 0, 1), Z),
            case(lambda x: torch.permute(x, (-1, 0, 1)), Z),
            case(lambda x: x.permute(dims=(1, 0, 2)), Z),
        ],
        "movedim": [case(lambda x: x.movedim(0, -1), Z), case(lambda x: torch.movedim(x, (0, 1), (1, 2)), Z)],
        "moveaxis": [case(lambda x: x.moveaxis(-1, 0), Z)],
        "expand": [
            case(lambda x: x.expand(7, 3, 5), X),
            case(lambda x: x.expand(-1, 5), (3, 1)),
            case(lambda x: x[:, None].expand(3, 7, 5), X),
            case(lambda x: x.expand((7, -1, -1)), X),
        ],
        "broadcast_to": [case(lambda x: torch.broadcast_to(x, (7, 3, 5)), X)],
        "expand_as": [case(lambda x, y: x.expand_as(y), (3, 1), X)],
        "repeat": [
            case(lambda x: x.repeat(1, 2), X),
            case(lambda x: x.repeat(7, 1, 2), X),
            case(lambda x: x.repeat(1, 7), (3, 1)),
            case(lambda x, n: x.repeat(1, n), X, torch.tensor(2)),
        ],
        "tile": [
            case(lambda x: x.tile(1, 2), X),
            case(lambda x: x.tile(2), X),
            case(lambda x: torch.tile(x, (2, 1, 1)), X),
        ],
        "repeat_interleave": [
            case(lambda x: x.repeat_interleave(2, 1), X),
            case(lambda x: torch.repeat_interleave(x, 3, dim=0), X),
            case(lambda x: x.repeat_interleave(3), X),
            case(lambda x, n: x.repeat_interleave(n, dim=0), X, torch.tensor([1, 2, 1])),
        ],
        "split": [
            case(lambda x: x.split(2, 1), Z),
            case(lambda x: x.split([2, 3], dim=1), Z),
            case(lambda x: torch.split(x, 3), (6, 5)),
            case(lambda x: x.split((1, 2, 4), -1), Z),
        ],
        "split_with_sizes": [case(lambda x: x.split_with_sizes([2, 3], 1), Z)],
        "chunk": [case(lambda x: x.chunk(2, -1), (3, 6)), case(lambda x: torch.chunk(x, 2, dim=1), Z)],
        "tensor_split": [
            case(lambda x: x.tensor_split(2, 1), Z),
            case(lambda x: torch.tensor_split(x, (1, 3), dim=1), Z),
        ],
        "unsafe_chunk": [case(lambda x: torch.unsafe_chunk(x, 2, 1), Z)],
        "unsafe_split": [case(lambda x: torch.unsafe_split(x, 2, 1), Z)],
        "unbind": [
            case(lambda x: x.unbind(1), Z),
            case(lambda x: torch.unbind(x), Z),
            case(lambda x: x.unbind(-1), (3, 2)),
        ],
        "cat": [
            case(lambda x, y: torch.cat([x, y], 1), X, (3, 7)),
            case(lambda x, y: torch.cat((x, y), dim=-1), X, X),
            case(lambda x, y: torch.cat((x, y)), X, (7, 5)),
        ],
        "concat": [case(lambda x, y: torch.concat([x, y], 1), X, (3, 7))],
        "concatenate": [case(lambda x, y: torch.concatenate([x, y], 1), X, (3, 7))],
        "stack": [
            case(lambda x, y: torch.stack([x, y]), X, X),
            case(lambda x, y: torch.stack((x, y), dim=-1), X, X),
            case(lambda x, y: torch.stack((x, y), -2), X, X),
        ],
        "glu": [case(lambda x: F.glu(x), (3, 10)), case(lambda x: F.glu(x, 0), (6, 5))],
        "meshgrid": [
            case(lambda x, y: torch.meshgrid(x, y, indexing="ij"), (3,), (5,)),
            case(lambda x, y, z: torch.meshgrid(x, y, z, indexing="xy"), (3,), (5,), (7,)),
        ],
        "view_as_complex": [case(torch.view_as_complex, (3, 5, 2))],
        "view_as_real": [case(lambda x: torch.view_as_real(torch.view_as_complex(x)), (3, 5, 2))],
    }


def made() -> dict[str, list[Case]]:
    """Factories, whose result meets a parameter of its shape."""
    tables = {
        "arange": lambda: torch.arange(7),
        "zeros": lambda: torch.zeros(3, 5),
        "ones": lambda: torch.ones((3, 5)),
        "full": lambda: torch.full((3, 5), 0.3),
        "empty": lambda: torch.empty(size=(3, 5)).zero_(),
        "tensor": lambda: torch.tensor([0.1, 0.2, 0.3]),
        "as_tensor": lambda: torch.as_tensor([0.1, 0.2, 0.3]),
        "rand": lambda: 0 * torch.rand(3, 5),
        "randn": lambda: 0 * torch.randn(3, 5),
        "randint": lambda: 0 * torch.randint(3, (5,)),
        "randperm": lambda: 0 * torch.randperm(5),
        "linspace": lambda: torch.linspace(0, 1, 5),
        "logspace": lambda: torch.logspace(0, 1, 5),
        "eye": lambda: torch.eye(3, 5),
        "tril_indices": lambda: torch.tril_indices(3, 5),
        "triu_indices": lambda: torch.triu_indices(3, 5),
        "hann_window": lambda: torch.hann_window(5),
        "scalar_tensor": lambda: torch.scalar_tensor(0.3),
    }
    out = {name: [case(lambda x, f=f: x * f().sum(), X), case(lambda x, f=f: f(), X)] for name, f in tables.items()}
    news = {"new_zeros": ((3, 5),), "new_ones": ((3, 5),), "new_full": ((3, 5), 0.3), "new_tensor": ([0.1, 0.2, 0.3],)}
    out |= {name: [case(lambda x, n=name, a=args: getattr(x, n)(*a), X)] for name, args in news.items()}
    out["zeros"] += [case(lambda x: torch.zeros(3, 5, dtype=x.dtype) + x, X)]
    out["new_ones"] += [case(lambda x: x.new_ones(3, 5) * x, X)]
    out["new_empty"] = [case(lambda x: x.new_empty(3, 5).copy_(x), X)]
    out["zeros_like"] = ELEMENTWISE["zeros_like"] + [
        case(lambda x, y: torch.zeros_like(x).index_add_(0, torch.tensor([2, 0]), y), X, (2, 5))
    ]
    return out
