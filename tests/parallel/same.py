"""Train a whole model and its converted twin side by side and say where they part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import leaves, loss_of, perturb
from tpconvert.parallel import Mesh, clip_grad_norm_, parallelize
from tpconvert.parallel.comm.collectives import averaged_over_dp, joined, parts_of
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.plan import Plan, Verdict

TOLERANCE = 1e-9


def plan_of(
    module: nn.Module, tp: int, cut: dict[str, Layout], flags: dict[str, dict[str, bool]] | None = None, **rest: Any
) -> Plan:
    """A plan by hand: the tensors not in ``cut`` are whole; ``flags`` sets ``sum_grad`` and ``once``."""
    flags = flags or {}
    named = [(n, p, "parameter") for n, p in module.named_parameters(remove_duplicate=False)]
    named += [(n, b, "buffer") for n, b in module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    verdicts = []
    for name, tensor, kind in named:
        tied = first.setdefault(id(tensor), name)
        verdicts.append(
            Verdict(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                cut.get(tied, Layout()),
                "by hand",
                kind=kind,
                tied_to="" if tied == name else tied,
                **flags.get(name, {}),
            )
        )
    assert cut.keys() <= {n for n, _, _ in named}
    return Plan(tp, tuple(verdicts), **rest)


def rows(*blocks: int | tuple[int, int]) -> Layout:
    """``rows(6)``, ``rows((3, 4), (3, 4))``: a layout of dim 0."""
    return Layout(0, tuple(Block(b) if isinstance(b, int) else Block(*b) for b in blocks))


def columns(*blocks: int | tuple[int, int]) -> Layout:
    """A layout of dim 1."""
    return Layout(1, rows(*blocks).blocks)


def whole_of(name: str, tensor: Tensor, plan: Plan, mesh: Mesh) -> Tensor:
    """The whole tensor, put together from all ranks."""
    layout = plan[name].layout
    return joined(tensor, parts_of(layout.dim, layout.blocks, mesh), mesh) if layout.cut else tensor


def assert_equal(ours: Tensor, whole: Tensor, what: str) -> None:
    """Fail where the two differ by more than the tolerance, relative to the largest value.

    Some gradients are zero but for rounding (a key's bias under softmax); hence the floor.
    """
    assert ours.shape == whole.shape, f"{what}: shape {tuple(ours.shape)}, not {tuple(whole.shape)}"
    worst = ((ours - whole).abs().max() / whole.abs().max().clamp(min=1e-3)).item() if whole.numel() else 0.0
    assert worst < TOLERANCE, f"{what} differs by {worst:.2e}"


def train_alike(
    mesh: Mesh,
    build: Callable[[], nn.Module],
    make_plan: Callable[[nn.Module, int], Plan],
    make_inputs: Callable[[int], dict[str, Any]],
    *,
    convert: Callable[[nn.Module, Plan, Mesh], nn.Module] = parallelize,
    clip: float = 0.05,
) -> nn.Module:
    """Compare outputs, every gradient, the norm, and the parameters after each of two clipped SGD steps."""
    torch.manual_seed(0)
    whole = perturb(build().double())
    plan = make_plan(whole, mesh.degree)
    ours = convert(copy.deepcopy(whole), plan, mesh)
    for step in range(2):
        for dp_rank in range(mesh.dp_degree):  # the whole model sees every dp rank's data
            expected = whole(**make_inputs(step * 10 + dp_rank))
            (loss_of(expected) / mesh.dp_degree).backward()
            if dp_rank == mesh.dp_rank:
                output = ours(**make_inputs(step * 10 + dp_rank))
                assert type(output) is type(expected)
                for i, (x, y) in enumerate(zip(leaves(output), leaves(expected), strict=True)):
                    assert_equal(x, y, f"step {step}: output {i}")
                loss_of(output).backward()
        parameters = dict(ours.named_parameters())
        for p in parameters.values():
            if p.grad is not None and mesh.dp_degree > 1:
                p.grad = averaged_over_dp(p.grad, mesh)
        for name, p in whole.named_parameters():
            mine = parameters[name].grad
            assert (mine is None) == (p.grad is None), f"step {step}: gradient of {name} is {mine}"
            if mine is not None:
                assert_equal(whole_of(name, mine, plan, mesh), p.grad, f"step {step}: gradient of {name}")
        norm = clip_grad_norm_(ours, clip, mesh, plan)
        assert_equal(norm, nn.utils.clip_grad_norm_(whole.parameters(), clip), f"step {step}: gradient norm")
        for model in (ours, whole):
            torch.optim.SGD(model.parameters(), lr=1.0).step()
            model.zero_grad()
        for name, p in whole.named_parameters():
            assert_equal(whole_of(name, parameters[name].detach(), plan, mesh), p.detach(), f"step {step}: {name}")
    return ours
