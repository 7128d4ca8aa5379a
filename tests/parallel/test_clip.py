"""The clipped norm on ranks is the whole model's."""

import pytest
import torch
from torch import nn

from tests.parallel.same import plan_of, rows
from tpconvert.errors import PlanError
from tpconvert.parallel import clip_grad_norm_, dry_mesh, parallelize
from tpconvert.parallel.convert import part
from tpconvert.parallel.grads.clip import grad_norm
from tpconvert.spec.layout import Block, Layout


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = nn.Parameter(torch.arange(14.0).view(7, 2))
        self.shared = nn.Parameter(torch.ones(2, 3))
        self.whole = nn.Parameter(torch.tensor(2.0))
        self.idle = nn.Parameter(torch.ones(3))


def build(mesh):
    module = Three()
    layouts = {"cut": rows(7), "shared": Layout(1, (Block(1, 2), Block(1, 1)))}
    plan = plan_of(module, mesh.degree, layouts)
    for name, p in module.named_parameters():
        if name != "idle":
            p.grad = p.detach() - 3
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
    return parallelize(module, plan, mesh), plan, norm


def norms(mesh):
    module, plan, norm = build(mesh)
    torch.testing.assert_close(clip_grad_norm_(module, 1e9, mesh, plan), norm)
    expected = part(torch.arange(14.0).view(7, 2) - 3, plan["cut"].layout, mesh)
    torch.testing.assert_close(module.cut.grad, expected)  # parallelize kept this rank's part of the gradient
    torch.testing.assert_close(clip_grad_norm_(module, 0.5, mesh, plan), norm)
    torch.testing.assert_close(module.cut.grad, expected * (0.5 / norm))
    torch.testing.assert_close(grad_norm(module, mesh, plan), torch.tensor(0.5))
    if mesh.rank == mesh.degree - 1:
        module.cut.grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="gradient norm is inf"):
        clip_grad_norm_(module, 1.0, mesh, plan, error_if_nonfinite=True)
    norm = clip_grad_norm_(module, 1.0, mesh, plan)
    return norm.item(), module.whole.grad.item()


@pytest.mark.parametrize("degree", [2, 3])
def test_cut_is_summed_and_whole_and_shared_count_once_and_inf_reaches_every_rank(run_ranks, degree):
    for norm, grad in run_ranks(norms, degree):
        assert norm == float("inf") and grad == 0.0


def all_whole(mesh):
    module = nn.Linear(3, 3).double()
    for p in module.parameters():
        p.grad = p.detach() + 1
    expected = nn.utils.get_total_norm([p.grad for p in module.parameters()])
    torch.testing.assert_close(grad_norm(module, mesh, plan_of(module, mesh.degree, {})), expected)
    module.zero_grad()
    assert grad_norm(module, mesh, plan_of(module, mesh.degree, {})) == 0


def test_a_model_that_is_all_whole_counts_on_one_rank(run_ranks):
    run_ranks(all_whole, 2)


def in_half_precision(mesh):
    module = nn.Linear(64, 64, bias=False).bfloat16()
    module.weight.grad = torch.full((64, 64), 0.01, dtype=torch.bfloat16)
    plan = plan_of(module, mesh.degree, {"weight": rows(64)})
    expected = module.weight.grad.float().norm()
    norm = grad_norm(parallelize(module, plan, mesh), mesh, plan)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected)
    module.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(PlanError, match="extra: the plan has no verdict"):
        grad_norm(module, mesh, plan)


def test_half_precision_gradients_are_summed_in_float32(run_ranks):
    run_ranks(in_half_precision, 2)


def complex_ones(mesh):
    module = nn.ParameterList([nn.Parameter(torch.ones(4, 3, dtype=torch.complex64)), nn.Parameter(torch.ones(2))])
    module[0].grad = torch.complex(torch.arange(12.0), torch.ones(12)).view(4, 3)
    module[1].grad = torch.full((2,), -3.0)
    expected = nn.utils.get_total_norm([p.grad for p in module])
    plan = plan_of(module, mesh.degree, {"0": rows(4)})
    want = part(module[0].grad * (0.5 / expected), plan["0"].layout, mesh)
    torch.testing.assert_close(clip_grad_norm_(parallelize(module, plan, mesh), 0.5, mesh, plan), expected)
    torch.testing.assert_close(module[0].grad, want)


def test_complex_gradients_count_by_their_size(run_ranks):
    run_ranks(complex_ones, 2)


def other_norms(mesh, norm_type):
    module, plan, _ = build(mesh)
    grads = [p.detach() - 3 for n, p in Three().named_parameters() if n != "idle"]
    expected = nn.utils.get_total_norm(grads, norm_type)
    torch.testing.assert_close(clip_grad_norm_(module, 0.5, mesh, plan, norm_type=norm_type), expected)
    torch.testing.assert_close(grad_norm(module, mesh, plan, norm_type), torch.tensor(0.5))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, float("inf")])
def test_other_norms_than_the_second(run_ranks, norm_type):
    run_ranks(other_norms, 2, norm_type)


def test_a_norm_of_no_order_is_refused():
    module, mesh = nn.Linear(2, 2), dry_mesh(0, 1)
    with pytest.raises(PlanError, match="norm_type is 0"):
        clip_grad_norm_(module, 1.0, mesh, plan_of(module, 1, {}), norm_type=0)
