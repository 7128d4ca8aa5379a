"""A dim that repeats what is dealt (heads, for each row of a batch) is joined and parted row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tpconvert.errors import PlanError
from tpconvert.parallel import Mesh
from tpconvert.parallel.comm.collectives import gather, parts_of, scatter
from tpconvert.spec.layout import Block

HEADS = 5


def parted_and_joined(mesh: Mesh, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's part of a (batch x heads, 3) value, the value joined again, and its gradient."""
    parts = parts_of(0, (Block(HEADS),), mesh)
    value = torch.arange(batch * HEADS * 3, dtype=torch.float64).reshape(batch * HEADS, 3).requires_grad_()
    part = scatter(value, parts, mesh)
    joined = gather(part, parts, mesh)
    (joined * (1 + value.detach())).sum().backward()
    return part.detach(), joined.detach(), value.grad


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("degree", [2, 3])
def test_each_row_of_the_batch_is_dealt_by_itself(run_ranks: Callable[..., list[Any]], degree: int, batch: int) -> None:
    whole = torch.arange(batch * HEADS * 3, dtype=torch.float64).reshape(batch, HEADS, 3)
    held = 0
    for part, joined, gradient in run_ranks(parted_and_joined, degree, batch):
        here = part.shape[0] // batch
        assert torch.equal(part.reshape(batch, here, 3), whole[:, held : held + here])
        assert torch.equal(joined, whole.flatten(0, 1))
        assert torch.equal(gradient, 1 + whole.flatten(0, 1))
        held += here
    assert held == HEADS


def refused(mesh: Mesh) -> str:
    """What a dim that is no multiple is told."""
    try:
        scatter(torch.zeros(HEADS + 1), parts_of(0, (Block(HEADS),), mesh), mesh)
    except PlanError as error:
        return str(error)
    return ""


def test_a_dim_that_is_no_multiple_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(refused, 2)[0].startswith("A dim of 6 is no multiple of the 5 that the plan deals.")
