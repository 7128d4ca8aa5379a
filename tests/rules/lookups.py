"""Uses of the ops that look up, write by data, and slide over space."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rules.one import Case, bits, case, places

X, Y, Z = (3, 5), (5, 7), (3, 5, 7)


LOOKUPS: dict[str, list[Case]] = {
    "gather": [
        case(lambda x, i: x.gather(1, i), Z, places(3, 2, 7, below=5)),
        case(lambda x, i: torch.gather(x, -1, i), Z, places(3, 5, 2, below=7)),
        case(lambda x, i: torch.gather(x, -1, i), Z, places(2, 5, 11, below=7)),
    ],
    "take_along_dim": [
        case(lambda x, i: torch.take_along_dim(x, i, 1), Z, places(3, 2, 7, below=5)),
        case(lambda x, i: torch.take_along_dim(x, i, 1), Z, places(1, 2, 7, below=5)),
        case(lambda x, i: torch.take_along_dim(x, i, dim=-1), Z, places(3, 5, 2, below=7)),
    ],
    "index_select": [
        case(lambda x, i: x.index_select(1, i), Z, places(11, below=5)),
        case(lambda x, i: torch.index_select(x, -1, i), Z, places(2, below=7)),
    ],
    "index_add": [
        case(lambda x, i, s: x.index_add(1, i, s), Z, places(11, below=5), (3, 11, 7)),
        case(lambda x, i, s: x.clone().index_add_(0, i, s), Z, places(11, below=3), (11, 5, 7)),
        case(lambda x, i, s: x.index_add(1, i, s, alpha=2.0), Z, places(11, below=5), (3, 11, 7)),
    ],
    "index_copy": [case(lambda x, i, s: x.index_copy(1, i, s), Z, torch.tensor([3, 0]), (3, 2, 7))],
    "scatter": [
        case(lambda x, i: x.scatter(1, i, value=0.3), Z, places(3, 2, 7, below=5)),
        case(lambda x, i, s: x.scatter(1, i, s), Z, places(3, 1, 7, below=5), (3, 1, 7)),
        case(lambda x, i: x.scatter(1, i, 0.3), Z, places(3, 2, 7, below=5)),
        case(lambda x, i, s: x.scatter(2, i, s), Z, places(3, 2, 1, below=7), (3, 2, 1)),
    ],
    "scatter_add": [
        case(lambda x, i, s: x.scatter_add(1, i, s), Z, places(3, 11, 7, below=5), (3, 11, 7)),
        case(lambda x, i, s: x.scatter_add(dim=1, index=i, src=s), Z, places(3, 11, 7, below=5), (3, 11, 7)),
        case(lambda x, i, s: x.clone().scatter_add_(1, i, s), Z, places(2, 11, 7, below=5), (2, 11, 7)),
    ],
    "scatter_reduce": [
        case(lambda x, i, s: x.scatter_reduce(1, i, s, "mean"), Z, places(3, 11, 7, below=5), (3, 11, 7)),
        case(lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), Z, places(3, 11, 7, below=5), (3, 11, 7)),
    ],
    "one_hot": [case(lambda i: F.one_hot(i, 7), places(3, 5, below=7)), case(F.one_hot, places(3, 5, below=7))],
    "__getitem__": [
        case(lambda x: x[:, 1:], Z),
        case(lambda x: x[..., :3], Z),
        case(lambda x: x[:, -2:, None, 1:-2], Z),
        case(lambda x: x[1], Z),
        case(lambda x: x[:, -1], Z),
        case(lambda x: x[:, :, 2:5], Z),
        case(lambda x: x[..., 0], Z),
        case(lambda x: x[..., ::2], (3, 6)),
        case(lambda x: x[..., 1::2], (3, 6)),
        case(lambda x: x[..., ::3], (3, 7)),
        case(lambda x: x[:, [1]], Z),
        case(lambda x: x[:, [1, 0, 3]], Z),
        case(lambda x, i: x[i], Z, places(11, below=3)),
        case(lambda x, i: x[:, i], Z, places(2, 11, below=5)),
        case(lambda x, i, j: x[i, :, j], Z, places(11, below=3), places(11, below=7)),
        case(lambda x, i, j: x[:, i, j], Z, places(11, 1, below=5), places(13, below=7)),
        case(lambda x, i: x[i, 1:], Z, places(11, below=3)),
        case(lambda x, m: x[m], Z, bits(3)),
        case(lambda x, m: x[:, m], Z, bits(5)),
        case(lambda x, m: x[m], Z, bits(3, 5)),
        case(lambda x, i: x[0, i], Z, places(11, below=5)),
        case(lambda x, i: x[:, i:], Z, torch.tensor(2)),
        case(lambda x, i: x[None, :, 1:i, 0], Z, torch.tensor(4)),
        case(lambda x, i, j: x[:, i:, j], Z, torch.tensor(2), places(11, below=7)),
    ],
    "__setitem__": [
        case(lambda x, y: _set(x, (slice(None), slice(1, None)), y), Z, (3, 4, 7)),
        case(lambda x, y: _set(x, (slice(None), 1), y), Z, (3, 7)),
        case(lambda x, y: _set(x, (Ellipsis, 2), y), Z, (5,)),
        case(lambda x: _set(x, (slice(None), 1), 0.0), Z),
        case(lambda x: _set(x, (slice(None), 1), 2.0), Z),
        case(lambda x, i, y: _set(x, (slice(None), i), y), Z, torch.tensor([4, 1]), (3, 2, 7)),
        case(lambda x, i, y: _set(x, (i, slice(None, 2)), y), Z, torch.tensor([2, 1]), (2, 2, 7)),
        case(lambda x, m: _set(x, m, 0.0), Z, bits(3, 5)),
        case(lambda x, y, m: _set(x, m, y), Z, (int(bits(3, 5).sum()), 7), bits(3, 5)),
    ],
    "select": [case(lambda x: x.select(1, 2), Z), case(lambda x: x.select(-1, -1), Z)],
    "narrow": [case(lambda x: x.narrow(1, 1, 3), Z), case(lambda x: torch.narrow(x, -1, 0, 4), Z)],
    "diag_embed": [case(torch.diag_embed, X), case(lambda x: torch.diag_embed(x, 1), X)],
    "unfold": [
        case(lambda x: x.unfold(1, 2, 1), Z),
        case(lambda x: x.unfold(-1, 3, 2), Z),
        case(lambda x: x.unfold(dimension=1, size=2, step=1), Z),
    ],
}


def _set(x: Tensor, index: object, value: object) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


def space() -> dict[str, list[Case]]:
    return {
        "max_pool1d": [case(lambda x: F.max_pool1d(x, 2), Z)],
        "max_pool2d": [case(lambda x: F.max_pool2d(x, 2), (2, 3, 5, 7)), case(lambda x: F.max_pool2d(x, 2), Z)],
        "avg_pool1d": [case(lambda x: F.avg_pool1d(x, 2), Z), case(lambda x: F.avg_pool1d(x, 2), X)],
        "avg_pool2d": [case(lambda x: F.avg_pool2d(x, 2), (2, 3, 5, 7)), case(lambda x: F.avg_pool2d(x, 2), Z)],
        "adaptive_avg_pool1d": [
            case(lambda x: F.adaptive_avg_pool1d(x, 2), Z),
            case(lambda x: F.adaptive_avg_pool1d(x, 2), X),
        ],
        "adaptive_avg_pool2d": [
            case(lambda x: F.adaptive_avg_pool2d(x, (2, 3)), (2, 3, 5, 7)),
            case(lambda x: F.adaptive_avg_pool2d(x, 1), Z),
        ],
        "upsample_nearest1d": [case(lambda x: F.interpolate(x, scale_factor=2), Z)],
        "upsample_nearest2d": [case(lambda x: F.interpolate(x, size=(6, 8)), (2, 3, 5, 7))],
        "upsample_linear1d": [case(lambda x: F.interpolate(x, size=9, mode="linear"), Z)],
        "upsample_bilinear2d": [case(lambda x: F.interpolate(x, size=(6, 8), mode="bilinear"), (2, 3, 5, 7))],
        "upsample_bicubic2d": [case(lambda x: F.interpolate(x, size=(6, 8), mode="bicubic"), (2, 3, 5, 7))],
        "pad": [
            case(lambda x: F.pad(x, (1, 2)), Z),
            case(lambda x: F.pad(x, (0, 0, 2, 0), value=0.3), Z),
            case(lambda x: F.pad(x, (1, 1), mode="reflect"), Z),
            case(lambda x: F.pad(x, (-1, 2)), Z),
            case(lambda x: F.pad(x, (1, -2)), Z),
            case(lambda x, n: F.pad(x, (n, 0)), Z, torch.tensor(2)),
            case(lambda x, n: F.pad(x, (1, n), mode="reflect"), Z, torch.tensor(2)),
        ],
        "max_pool3d": [case(lambda x: F.max_pool3d(x, 2), (2, 3, 5, 7, 4))],
        "avg_pool3d": [case(lambda x: F.avg_pool3d(x, 2), (2, 3, 5, 7, 4))],
        "adaptive_avg_pool3d": [case(lambda x: F.adaptive_avg_pool3d(x, 2), (2, 3, 5, 7, 4))],
        "upsample_nearest3d": [case(lambda x: F.interpolate(x, size=(6, 8, 5)), (2, 3, 5, 7, 4))],
        "upsample_trilinear3d": [case(lambda x: F.interpolate(x, size=(6, 8, 5), mode="trilinear"), (2, 3, 5, 7, 4))],
        "_upsample_bilinear2d_aa": [
            case(lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", antialias=True), (2, 3, 5, 7))
        ],
        "_upsample_bicubic2d_aa": [
            case(lambda x: F.interpolate(x, size=(3, 4), mode="bicubic", antialias=True), (2, 3, 5, 7))
        ],
        "pixel_shuffle": [
            case(lambda x: F.pixel_shuffle(x, 2), (2, 12, 5, 7)),
            case(lambda x: F.pixel_shuffle(x, 3), (18, 5, 7)),
        ],
        "pixel_unshuffle": [case(lambda x: F.pixel_unshuffle(x, 2), (2, 3, 10, 6))],
        "im2col": [
            case(lambda x: F.unfold(x, (2, 3)), (2, 3, 5, 7)),
            case(lambda x: F.unfold(x, 2, stride=2), (3, 5, 7)),
        ],
        "col2im": [case(lambda x: F.fold(x, (5, 7), (2, 3)), (2, 18, 20))],
        "grid_sampler": [
            case(lambda x, g: F.grid_sample(x, g, align_corners=False), (2, 3, 5, 7), (2, 11, 13, 2)),
            case(lambda x, g: F.grid_sample(x, g, align_corners=True), (2, 3, 5, 7, 4), (2, 11, 13, 6, 3)),
        ],
        "diff": [
            case(torch.diff, Z),
            case(lambda x: x.diff(dim=1), Z),
            case(lambda x: x.diff(2, 0), Z),
            case(lambda x, y: x.diff(append=y), Z, (3, 5, 2)),
        ],
        "fft_fft": [case(lambda x: torch.fft.fft(x, dim=1), Z), case(torch.fft.fft, Z)],
        "fft_ifft": [case(lambda x: torch.fft.ifft(x, dim=0).real, Z)],
        "fft_rfft": [case(torch.fft.rfft, Z), case(lambda x: torch.fft.rfft(x, 4, 1), Z)],
        "fft_irfft": [case(lambda x: torch.fft.irfft(torch.view_as_complex(x)), (3, 5, 7, 2))],
        "fft_hfft": [case(lambda x: torch.fft.hfft(x, dim=1), Z)],
        "fft_ihfft": [case(lambda x: torch.fft.ihfft(x, dim=1).real, Z)],
        "fft_fft2": [case(torch.fft.fft2, (2, 3, 5, 7)), case(lambda x: torch.fft.fft2(x, dim=(0, 2)).real, Z)],
        "fft_ifft2": [case(lambda x: torch.fft.ifft2(x).real, Z)],
        "fft_rfft2": [case(lambda x: torch.fft.rfft2(x, (4, 6)).real, Z)],
        "fft_irfft2": [case(lambda x: torch.fft.irfft2(torch.view_as_complex(x), dim=(0, 1)), (3, 5, 7, 2))],
        "fft_fftn": [case(lambda x: torch.fft.fftn(x).real, Z), case(lambda x: torch.fft.fftn(x, (4,)).real, Z)],
        "fft_ifftn": [case(lambda x: torch.fft.ifftn(x, dim=1).real, Z)],
        "fft_rfftn": [case(lambda x: torch.fft.rfftn(x, dim=(1, 2)).real, Z)],
        "fft_irfftn": [case(lambda x: torch.fft.irfftn(x, s=(4, 6)), Z)],
        "max_pool1d_with_indices": [case(lambda x: F.max_pool1d(x, 2, return_indices=True)[0], Z)],
        "max_pool2d_with_indices": [case(lambda x: F.max_pool2d(x, 2, return_indices=True)[0], (2, 3, 5, 7))],
        "max_pool3d_with_indices": [case(lambda x: F.max_pool3d(x, 2, return_indices=True)[0], (2, 3, 5, 7, 4))],
        "max_unpool2d": [
            case(lambda x, y: F.max_unpool2d(x, F.max_pool2d(y, 2, return_indices=True)[1], 2), (2, 3, 4), (2, 6, 8))
        ],
        "max_unpool3d": [case(lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), (2, 3, 4, 6, 2))],
        "_sparse_mm": [case(lambda x: torch.sparse.mm(torch.eye(3, 5, dtype=x.dtype).to_sparse(), x), Y)],
        "constant_pad_nd": [case(lambda x: torch.constant_pad_nd(x, (1, 2), 0.0), Z)],
    }
