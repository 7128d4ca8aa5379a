"""Cross entropy over cut logits equals F.cross_entropy of the whole ones, forward and backward, to 1e-12."""

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tpconvert.errors import PlanError
from tpconvert.parallel import Mesh, cross_entropy, dry_mesh
from tpconvert.parallel.comm.collectives import parts_of, take
from tpconvert.parallel.layers import loss
from tpconvert.spec.layout import Block, Layout

WORDS = 11


def whole_loss(logits, targets, reduction, smoothing, z_loss, softcap=0.0):
    logits = softcap * (logits / softcap).tanh() if softcap else logits
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
    options = itertools.product(("mean", "sum", "none"), (0.0, 0.1), (0.0, 1e-2), (0.0, 20.0))
    for reduction, smoothing, z_loss, softcap in options:
        whole = whole_loss(logits, targets, reduction, smoothing, z_loss, softcap)
        weight = torch.linspace(1, 2, whole.numel(), dtype=torch.float64).view(whole.shape)
        (grad,) = torch.autograd.grad((whole * weight).sum(), logits)
        mine = take(logits.detach(), -1, parts.pieces).requires_grad_()
        terms = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap}
        loss = cross_entropy(mine, targets, mesh, blocks, reduction=reduction, **terms)
        (loss * weight).sum().backward()
        torch.testing.assert_close(loss, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine.grad, take(grad, -1, parts.pieces), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("blocks", [(Block(WORDS),), (Block(4), Block(7))], ids=str)
def test_loss_and_gradient_are_those_of_the_whole_logits(run_ranks, degree, blocks):
    run_ranks(compare, degree, blocks)


class Largest(TorchDispatchMode):
    """The most elements that a tensor of a dtype had which an op made."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.sizes[t.dtype] = max(self.sizes.get(t.dtype, 0), t.numel())
        return out


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}], ids=["plain", "all"])
def test_wide_logits_never_exist_whole(monkeypatch, shifted, terms):
    words = 200
    monkeypatch.setattr(loss, "PIECE", 4 * words)
    mesh = Mesh(0, 1, None, torch.device("cpu"))
    logits = torch.randn(3, 14 + shifted, words, generator=torch.Generator().manual_seed(1))
    logits = logits.bfloat16().requires_grad_()
    targets = torch.randint(0, words, (3, 14), generator=torch.Generator().manual_seed(2))
    given = logits[:, :-1] if shifted else logits
    order = [terms.get(name, 0.0) for name in ("label_smoothing", "z_loss", "softcap")]
    whole = whole_loss(given.double(), targets, "mean", *order)
    (grad,) = torch.autograd.grad(whole, logits)
    with Largest() as largest:
        mine = cross_entropy(given, targets, mesh, (Block(words),), **terms)
        mine.backward()
    assert largest.sizes[torch.float32] == 4 * words
    torch.testing.assert_close(mine.double(), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.grad, grad, rtol=2**-8, atol=1e-7)


class Count(TorchDispatchMode):
    """How often each op is called."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_what_is_small_is_done_once_for_all_pieces(monkeypatch, softcap):
    monkeypatch.setattr(loss, "PIECE", 2 * WORDS)
    logits = torch.randn(8, WORDS, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    with Count() as count:
        cross_entropy(logits, torch.arange(8), Mesh(0, 1, None, torch.device("cpu")), (Block(WORDS),), softcap=softcap)
    assert count.calls["aten::exp_"] == 4
    assert count.calls["aten::gather"] == count.calls["aten::amax"] == 1


def masked_words(mesh):
    logits = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits[:, 2:] = -torch.inf  # all that the second rank holds
    targets = torch.tensor([0, 1, 0])
    mine = take(logits, -1, [(2 * mesh.rank, 2 * mesh.rank + 2)]).requires_grad_()
    loss = cross_entropy(mine, targets, mesh, (Block(4),))
    loss.backward()
    whole = logits.requires_grad_()
    F.cross_entropy(whole, targets).backward()
    torch.testing.assert_close(loss, F.cross_entropy(whole, targets))
    torch.testing.assert_close(mine.grad, whole.grad[:, 2 * mesh.rank : 2 * mesh.rank + 2])


def test_words_masked_on_one_rank_have_no_part_in_the_loss(run_ranks):
    run_ranks(masked_words, 2)


def test_the_gradient_cannot_be_differentiated_again():
    logits = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, 1, 4]), Mesh(0, 1, None, torch.device("cpu")), (Block(5),))
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        grad.sum().backward()


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
