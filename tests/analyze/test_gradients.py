"""Who sees a gradient (a custom function, a hook) sees all of it, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.equal import difference
from tpconvert.analyze.capture.run import capture
from tpconvert.analyze.watch.gradients import DIFFERENTIATED, FUNCTION, HOOK
from tpconvert.parallel import Mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank, emulate_module

ROWS = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))


class Normed(torch.autograd.Function):
    """The identity, with a gradient of norm one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-6)


class Same(torch.autograd.Function):
    """As :class:`Normed`, of the very tensor it is given; ``same`` below is its ``apply`` asked for long before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-6)


same = Same.apply


class Linear(torch.autograd.Function):
    """x w with a clamped gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.clamp(-0.1, 0.1)
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Pair(torch.autograd.Function):
    """Two results, the first written into the argument: the lockstep run has only the derivative of its body."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(x)
        return x.mul_(2), x.sin()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return (first + second).tanh()


class Tripled(torch.autograd.Function):
    """Three times a value and its gradient: fit to be cut, and a rule may say so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(-1).flip(-1) * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


library = torch.library.Library("own_gradients", "DEF")
library.define("squashed(Tensor x) -> Tensor")
library.impl("squashed", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_autograd("own_gradients::squashed", lambda ctx, grad: (grad * 2).tanh(), lib=library)


class Block(nn.Module):
    """A layer, two more, and what a test does around them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.p, self.m = nn.Linear(24, 24), nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        SETUPS.get(name, lambda self: None)(self)

    def forward(self, x: Tensor) -> Tensor:
        return FORWARDS.get(self.name, lambda self, h: self.m(h))(self, self.p(x))


def clamped(grad: Tensor) -> Tensor:
    return grad.clamp(-0.05, 0.05)


def hooked(self: Block, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(clamped)
    return self.m(h)


def hooked_inside(self: Block, h: Tensor) -> Tensor:
    y = self.m[0](h)
    if y.requires_grad:
        y.register_hook(clamped)
    return self.m[2](F.gelu(y))


def residual(self: Block, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(clamped)
    return h + self.m(h)


def force(self: Block, h: Tensor) -> Tensor:
    with torch.enable_grad():
        at = h if h.requires_grad else h.detach().requires_grad_()
        return torch.autograd.grad(self.m(at).square().sum(), at, create_graph=True)[0]


def doubled_pair(self: Block, h: Tensor) -> Tensor:
    first, second = Pair.apply(h * 1.0)
    return self.m(first) + second


def clamp_inputs(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(g if g is None else clamped(g) for g in into)


def clamp_outputs(module: nn.Module, out: Any) -> Any:
    return tuple(clamped(g) for g in out)


SETUPS: dict[str, Callable[[Block], Any]] = {
    "a hook on a module": lambda self: self.m.register_full_backward_hook(clamp_inputs),
    "a hook on a module's outputs": lambda self: self.m.register_full_backward_pre_hook(clamp_outputs),
    "a hook on a layer of the region": lambda self: self.m[0].register_full_backward_hook(clamp_inputs),
    "a hook of the old kind": lambda self: self.m[1].register_backward_hook(clamp_inputs),
}

FORWARDS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "a function before the region": lambda self, h: self.m(Normed.apply(h)),
    "a function behind the region": lambda self, h: Normed.apply(self.m(h)),
    "a function in the region": lambda self, h: self.m[2](Normed.apply(self.m[1](self.m[0](h)))),
    "a function that gives what it is given": lambda self, h: self.m(same(h)),
    "a function of weights": lambda self, h: Linear.apply(F.gelu(Linear.apply(h, self.m[0].weight)), self.m[2].weight),
    "a function with two results": doubled_pair,
    "an op of another library": lambda self, h: self.m(torch.ops.own_gradients.squashed(h)),
    "a hook on a value": hooked,
    "a hook in the region": hooked_inside,
    "a hook on a value that is also used whole": residual,
    "a derivative in the forward": force,
}

CUT = {
    "a function before the region": True,
    "a function behind the region": True,
    "a function in the region": False,
    "a function that gives what it is given": True,
    "a function of weights": False,
    "a function with two results": True,
    "an op of another library": True,
    "a hook on a value": True,
    "a hook in the region": False,
    "a hook on a value that is also used whole": True,
    "a derivative in the forward": False,
    "a hook on a module": True,
    "a hook on a module's outputs": True,
    "a hook on a layer of the region": False,
    "a hook of the old kind": False,
}
"""Whether the two layers are cut all the same."""


def built(name: str) -> tuple[Block, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Block(name), {"x": ROWS}


@pytest.mark.parametrize("name", CUT)
def test_a_gradient_is_whole_where_it_is_seen(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(name), tp=2)
    assert (plan["m.2.weight"].layout.dim == 1) is CUT[name]
    assert run_ranks(difference, 2, __name__, plan.dumps(), name)[0] is None


@pytest.mark.parametrize("name", [n for n in FORWARDS if n != "a function with two results"])
def test_the_lockstep_run_has_the_same_gradients(name: str) -> None:
    result = emulate_module(*built(name), make_plan(*built(name), tp=2))
    assert result.equal, result.verdict()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a function in the region", FUNCTION),
        ("a hook in the region", HOOK),
        ("a derivative in the forward", DIFFERENTIATED),
    ],
)
def test_the_plan_says_who_sees_the_gradient(name: str, why: str) -> None:
    assert why in make_plan(*built(name), tp=2)["m.0.bias"].reason


# -- hooks on parameters ---------------------------------------------------------------------------------------


def masked_rows(kind: str) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
    if kind == "hook":
        module[0].weight.register_hook(lambda grad: grad / grad.norm())
    else:
        module[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad / p.grad.norm()))
    return module


def gradients(mesh: Mesh, kind: str, planned: str) -> float:
    """The largest difference of the gradient of the parameter with the hook."""
    whole, local = masked_rows(kind), parallelize(masked_rows(kind), Plan.loads(planned), mesh)
    for module in (whole, local):
        module(ROWS).square().sum().backward()
    return float((whole[0].weight.grad - local[0].weight.grad).abs().max())


@pytest.mark.parametrize("kind", ["hook", "hook after accumulation"])
def test_a_parameter_with_a_hook_on_its_gradient_stays_whole(kind: str, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(masked_rows(kind), (ROWS,), tp=2)
    assert HOOK in plan["0.weight"].reason
    assert max(run_ranks(gradients, 2, kind, plan.dumps())) < 1e-6


# -- functions that may be cut -----------------------------------------------------------------------------------


class Kernel(nn.Module):
    """A custom function in the middle of a region."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Tripled.apply(self.a(x)))


def kernel(mesh: Mesh, planned: str) -> str | None:
    torch.manual_seed(0)
    result = compare_on_rank(Kernel(), {"x": ROWS}, Plan.loads(planned), mesh)
    return None if result is None or result.equal else result.verdict()


@pytest.mark.parametrize("name", ["Tripled.apply", f"{__name__}.Tripled.apply"])
def test_a_rule_says_what_a_custom_function_does(
    name: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(f'[[op]]\nnames = "{name}"\ndims = "x: ... -> ..."\nlinear = "x"\n')
    assert not make_plan(Kernel(), {"x": ROWS}, tp=2)["a.weight"].layout.cut
    plan = make_plan(Kernel(), {"x": ROWS}, tp=2, rules=[rules])
    assert plan["a.weight"].layout.cut
    assert emulate_module(Kernel(), {"x": ROWS}, plan, rules=[rules]).equal
    assert run_ranks(kernel, 2, plan.dumps())[0] is None


def test_a_function_that_is_seen_through_has_only_its_body(tmp_path: Path) -> None:
    from tpconvert.analyze.ops.rules import load_rules

    path = tmp_path / "rules.toml"
    path.write_text('[[function]]\nnames = "Tripled.apply"\n')
    trace = capture(Kernel(), {"x": ROWS}, rules=load_rules([path]))
    ops = [n for n in trace.nodes if n.op == "call_function"]
    assert [n.meta["op"] for n in ops] == ["linear", "flip", "flip", "mul", "linear"]
    assert all(n.meta["grad"] for n in ops)


def test_the_functions_that_are_shipped_as_seen_through_exist() -> None:
    from tpconvert.analyze.ops.rules import load_rules

    names = [name.removesuffix(".apply") for name, rule in load_rules().items() if rule.through]
    assert names
    for name in names:
        module, _, cls = name.rpartition(".")
        assert issubclass(getattr(import_module(module), cls), torch.autograd.Function)


class Checkpointed(nn.Module):
    """Two layers, recomputed in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.p, self.m, self.reentrant = (
            nn.Linear(24, 24),
            nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24)),
            reentrant,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.p(x)
        return checkpoint(self.m, h, use_reentrant=self.reentrant) if torch.is_grad_enabled() else self.m(h)


def checkpointed(mesh: Mesh, reentrant: bool, planned: str) -> str | None:
    torch.manual_seed(0)
    result = compare_on_rank(Checkpointed(reentrant), {"x": ROWS}, Plan.loads(planned), mesh)
    return None if result is None or result.equal else result.verdict()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_costs_no_cut(reentrant: bool, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Checkpointed(reentrant), {"x": ROWS}, tp=2)
    assert plan["m.0.weight"].layout.cut
    assert run_ranks(checkpointed, 2, reentrant, plan.dumps())[0] is None


class Recomputed(torch.autograd.Function):
    """A checkpointing of one's own: modules run in a custom function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(x), grad)
        return x.grad, None


class Recomputing(nn.Module):
    """Modules called within a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.m = nn.Linear(24, 24), nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(self.p(x), self.m)


def recomputing(mesh: Mesh, planned: str) -> str | None:
    torch.manual_seed(0)
    result = compare_on_rank(Recomputing(), {"x": ROWS}, Plan.loads(planned), mesh)
    return None if result is None or result.equal else result.verdict()


def test_modules_that_a_custom_function_calls_are_cut(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Recomputing(), {"x": ROWS}, tp=2)
    assert plan["m.0.weight"].layout.cut
    assert run_ranks(recomputing, 2, plan.dumps())[0] is None


def test_capturing_leaves_custom_functions_as_they_were() -> None:
    before = dict(vars(torch.autograd.function._SingleLevelFunction))
    capture(Kernel(), {"x": ROWS})
    assert dict(vars(torch.autograd.function._SingleLevelFunction)) == before
