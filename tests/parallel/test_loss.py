"""Cross entropy over cut logits equals F.cross_entropy of the whole ones, forward and backward, to 1e-12."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tpconvert.errors import PlanError
from tpconvert.parallel import cross_entropy, dry_mesh
from tpconvert.parallel.collectives import parts_of, take
from tpconvert.spec.layout import Block, Layout

WORDS = 11


def whole_loss(logits, targets, reduction, smoothing, z_loss):
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing)
    losses = losses.view(targets.shape) + z_loss * logits.logsumexp(-1).square() * (targets != -100)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != -100).sum()


def compare(mesh, blocks):
    noise = torch.Generator().manual_seed(1)
    logits = (30 * torch.randn(2, 5, WORDS, generator=noise, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, WORDS, (2, 5), generator=noise)
    targets[0, 2] = -100
    parts = parts_of(-1, blocks, mesh)
    for reduction, smoothing, z_loss in itertools.product(("mean", "sum", "none"), (0.0, 0.1), (0.0, 1e-2)):
        whole = whole_loss(logits, targets, reduction, smoothing, z_loss)
        weight = torch.linspace(1, 2, whole.numel(), dtype=torch.float64).view(whole.shape)
        (grad,) = torch.autograd.grad((whole * weight).sum(), logits)
        mine = take(logits.detach(), -1, parts.pieces).requires_grad_()
        loss = cross_entropy(mine, targets, mesh, blocks, reduction=reduction, label_smoothing=smoothing, z_loss=z_loss)
        (loss * weight).sum().backward()
        torch.testing.assert_close(loss, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine.grad, take(grad, -1, parts.pieces), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("blocks", [(Block(WORDS),), (Block(4), Block(7))], ids=str)
def test_loss_and_gradient_are_those_of_the_whole_logits(run_ranks, degree, blocks):
    run_ranks(compare, degree, blocks)


def without_targets(mesh):
    logits = torch.randn(3, 2, dtype=torch.bfloat16, requires_grad=True)
    loss = cross_entropy(logits, torch.full((3,), -100), mesh, Layout(0, (Block(4),)))
    assert loss.isnan() and loss.dtype == torch.float32  # as F.cross_entropy
    targets = torch.tensor([0, 1, 4])
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy(logits, targets, mesh, (Block(4),))


def test_no_target_gives_nan_and_a_target_outside_the_vocabulary_an_error(run_ranks):
    run_ranks(without_targets, 2)


def compiled(mesh):
    parts = parts_of(-1, (Block(WORDS),), mesh)
    logits = take(torch.randn(4, WORDS, generator=torch.Generator().manual_seed(0)), -1, parts.pieces).requires_grad_()
    targets = torch.tensor([0, 5, -100, 10])

    def loss(logits):
        return cross_entropy(logits, targets, mesh, (Block(WORDS),), label_smoothing=0.1, z_loss=0.1)

    eager = loss(logits)
    (grad,) = torch.autograd.grad(eager, logits)
    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)(logits)
    torch.testing.assert_close(traced, eager)
    torch.testing.assert_close(torch.autograd.grad(traced, logits)[0], grad)


def test_the_loss_compiles_into_one_graph(run_ranks):
    run_ranks(compiled, 2, timeout=120)


def test_logits_that_do_not_fit_are_refused():
    mesh = dry_mesh(1, 2)
    with pytest.raises(PlanError, match=r"Logits of shape \[3, 6\] do not fit .* and 5 of 11 words on rank 1"):
        cross_entropy(torch.zeros(3, 6), torch.zeros(3, dtype=torch.long), mesh, (Block(11),))
    with pytest.raises(PlanError, match="1 words cannot be dealt to 2 ranks"):
        cross_entropy(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), mesh, (Block(1),))
    with pytest.raises(ValueError, match="reduction is 'max'"):
        cross_entropy(torch.zeros(3, 5), torch.zeros(3, dtype=torch.long), mesh, (Block(11),), reduction="max")
