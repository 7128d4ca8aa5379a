"""The same inputs at another size: a plan made at one batch size and length must hold at others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpconvert.analyze.trees import map_tensors, tensors_in

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

    def cropped(t: Tensor) -> Tensor:
        if not t.dim() or t.shape[0] != batch:
            return t
        t = t[:1]
        for dim in range(1, t.dim()):
            if t.shape[dim] in shorter and not t.is_floating_point():
                t = t.narrow(dim, 0, shorter[t.shape[dim]])
        return t.clone()

    if batch < 2 and not shorter:
        return None
    return map_tensors(cropped, inputs)
