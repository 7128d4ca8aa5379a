"""The same inputs at another size: a plan made at one batch size and length must hold at others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpconvert.analyze.trace.trees import tensors_in
from tpconvert.planning.calls.sizes import resized

SHORTER = 3
"""How many tokens are left off."""


def other_size(inputs: Any) -> Any:
    """``inputs`` with one row of the batch and a shorter sequence; None where they have neither.

    The batch is the first dim that the tensors share; a sequence is what integer tensors have next to it.
    """
    tensors = list(tensors_in(inputs))
    batch = tensors[0].shape[0] if tensors and tensors[0].dim() else 0
    lengths = {t.shape[1] for t in tensors if t.dim() == 2 and t.dtype == torch.int64 and t.shape[0] == batch}
    shorter = {n: n - SHORTER for n in lengths if n > 2 * SHORTER}
    if batch < 2 and not shorter:
        return None

    def smaller(t: Tensor) -> tuple[int, ...]:
        if not t.dim() or t.shape[0] != batch:
            return tuple(t.shape)
        return (1, *(n if t.is_floating_point() else shorter.get(n, n) for n in t.shape[1:]))

    return resized(inputs, map(smaller, tensors))
