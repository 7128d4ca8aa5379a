"""The loss on what was held out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpconvert.train.data import Data
from tpconvert.train.model import Model
from tpconvert.train.ranks import summed_over_dp, totals


def evaluate(model: Model, data: Data, stopped: Callable[[], bool]) -> float | None:
    """The mean loss on the held-out set, in evaluation mode; the same on all ranks.

    ``stopped`` is asked before each batch; where it is true on any rank, all give up and return None.
    """
    assert data.held is not None
    device = model.mesh.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    model.module.eval()
    try:
        with torch.no_grad():
            for number, (batch, counts) in enumerate(data.held.batches(data.most)):
                if any(totals(model.mesh, [int(stopped())])):
                    return None
                torch.manual_seed(number)  # for a loss that draws; a step of training seeds anew
                loss = model.loss(batch.to(device))
                if counts:
                    sums += torch.stack([loss.double(), torch.tensor(float(model.count([batch])), device=device)])
    finally:
        model.module.train()
        for unit in model.shards.units:  # which a forward without a backward leaves whole
            unit.reshard()
    total, count = summed_over_dp(sums, model.mesh).tolist()
    return total / max(count, 1.0)
