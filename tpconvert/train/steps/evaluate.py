"""The loss on what was held out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpconvert.train.data.run import Data
from tpconvert.train.model.open import Model
from tpconvert.train.together.ranks import summed_over_dp, totals


def evaluate(model: Model, data: Data, stopped: Callable[[], bool]) -> dict[str, float] | None:
    """The mean loss on the held-out set, and for classes how many are right, in evaluation mode; same on all ranks.

    ``stopped`` is asked before each batch; where it is true on any rank, all give up and return None.
    """
    assert data.held is not None
    device = model.mesh.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    model.module.eval()
    try:
        with torch.no_grad():
            for number, (batch, counts) in enumerate(data.held.batches(data.most)):
                if any(totals(model.mesh, [int(stopped())])):
                    return None
                torch.manual_seed(number)  # for a loss that draws; a step of training seeds anew
                here = batch.to(device)
                loss, right = model.judged(here) if data.classes else (model.loss(here), sums.new_zeros(()))
                if counts:
                    sums += torch.stack([loss.double(), right.double(), sums.new_tensor(model.count([batch]))])
    finally:
        model.module.train()
        for unit in model.shards.units:  # which a forward without a backward leaves whole
            unit.reshard()
    total, right, count = summed_over_dp(sums, model.mesh).tolist()
    found = {"eval_loss": total / max(count, 1.0)}
    return found | ({"eval_accuracy": right / max(count, 1.0)} if data.classes else {})
