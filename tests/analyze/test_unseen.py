"""What torch functions do not show is recorded as one op over all it is computed from, and nothing there is cut."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equal import difference
from tpconvert.analyze.capture.run import capture
from tpconvert.analyze.watch.unseen import WHY
from tpconvert.parallel import Mesh
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank, emulate_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def shares(h: Tensor) -> Tensor:
        return torch.softmax(h, -1)

    @torch.jit.script
    def largest(h: Tensor) -> Tensor:
        return torch.argmax(h, -1, keepdim=True)

    @torch.jit.script
    def doubled_in_place(h: Tensor) -> None:
        h.mul_(h.mean())

    @torch.jit.script
    def total(h: Tensor) -> float:
        return float(h.sum())


def without_a_trace(h: Tensor) -> Tensor:
    """As compiled code runs that no mode sees: only the autograd history is there."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(keys):
        return torch.softmax(h, -1)


class Mlp(nn.Module):
    """Two layers with something between."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return BETWEEN[self.name](self, self.a(x))


def without_grad(self: Mlp, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = shares(h)
    return self.b(h * scale)


def changed(self: Mlp, h: Tensor) -> Tensor:
    h = h * 1.0
    view = h[..., :3]
    doubled_in_place(h)
    return self.b(h) * view.sum()


def mapped(self: Mlp, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: F.linear(row.softmax(-1), self.b.weight))(h)


def mapped_module(self: Mlp, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: self.b(row.softmax(-1)))(h)


def wrapped(self: Mlp, h: Tensor) -> Tensor:
    return self.b(h) + nn.Parameter(h).softmax(-1).amax()


def differentiated(self: Mlp, h: Tensor) -> Tensor:
    return self.b(torch.func.grad(lambda t: t.softmax(-1).square().sum())(h))


def given_data(self: Mlp, h: Tensor) -> Tensor:
    own = torch.empty(0)
    own.data = h.detach()
    return self.b(h) * own.softmax(-1).amax()


def conditional(self: Mlp, h: Tensor) -> Tensor:
    return torch.cond(
        torch.tensor(True), lambda t: self.b(h.softmax(-1)) * t, lambda t: self.b(h) * t, (h.new_ones(1),)
    )


BETWEEN: dict[str, Callable[[Mlp, Tensor], Tensor]] = {
    "script": lambda self, h: self.b(shares(h)),
    "script beside": lambda self, h: self.b(h) * shares(h).amax(),
    "script without grad": without_grad,
    "script of integers": lambda self, h: self.b(h) * largest(h),
    "script in place": changed,
    "script of a number": lambda self, h: self.b(h) * total(h),
    "vmap": mapped,
    "vmap of a module": mapped_module,
    "func.grad": differentiated,
    "a parameter made on the way": wrapped,
    "memory under another name": lambda self, h: self.b(h) * copy.copy(h.detach()).softmax(-1).amax(),
    "memory given away": lambda self, h: self.b(h) * torch.from_dlpack(h.detach()).softmax(-1).amax(),
    "data of another": given_data,
    "functions given to an op": conditional,
    "no mode sees it": lambda self, h: self.b(without_a_trace(h)),
}

READ = ("script of a number", "memory under another name", "memory given away", "data of another")
WHYS = dict.fromkeys(READ, "Python reads its values")

ROWS = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))


def built(name: str) -> tuple[Mlp, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Mlp(name), {"x": ROWS}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_computed_unseen_is_whole_and_the_model_equal(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(name), tp=2)
    assert not plan["a.weight"].layout.cut
    assert WHYS.get(name, WHY) in plan["a.bias"].reason
    assert run_ranks(difference, 2, __name__, plan.dumps(), name)[0] is None


@pytest.mark.parametrize("name", ["script", "script without grad", "script of integers", "vmap", "no mode sees it"])
def test_the_lockstep_run_gives_what_was_computed_unseen(name: str) -> None:
    plan = make_plan(*built(name), tp=2)
    result = emulate_module(*built(name), plan)
    assert result.equal, result.verdict()


def unseen(name: str) -> list[Any]:
    trace = capture(*built(name))
    return [n for n in trace.nodes if n.meta["op"] == "unseen"]


def test_the_op_is_over_the_recorded_values_it_is_computed_from() -> None:
    (op,) = unseen("vmap")
    assert [n.meta["op"] for n in op.all_input_nodes] == ["linear", "parameter"]
    assert op.meta["grad"]
    (op,) = unseen("script of integers")
    assert [n.meta["op"] for n in op.all_input_nodes] == ["linear"]
    assert not op.meta["grad"]


def test_what_comes_of_no_recorded_value_stays_a_constant() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + shares(torch.zeros(4))

    trace = capture(Counts(), {"x": torch.ones(2, 4)})
    (op,) = [n for n in trace.nodes if n.meta["op"] == "unseen"]
    assert [n.meta["op"] for n in op.all_input_nodes] == ["zeros"]


class Masked(nn.Module):
    """Attention whose mask is mapped over places, as masks are; its heads and its ffn are cut all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.o = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        rows = torch.vmap(lambda q: torch.vmap(lambda k: (k <= q) & seen[0, k])(at))(at)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=rows)
        return self.o(y.transpose(1, 2).flatten(2))


def masked(mesh: Mesh, planned: str) -> str | None:
    torch.manual_seed(0)
    result = compare_on_rank(Masked(), {"x": ROWS, "seen": torch.ones(2, 5).bool()}, Plan.loads(planned), mesh)
    return None if result is None or result.equal else result.verdict()


def test_a_mapped_mask_costs_no_cut(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Masked(), {"x": ROWS, "seen": torch.ones(2, 5).bool()}, tp=2)
    assert plan["qkv.weight"].layout.cut and plan["o.weight"].layout.cut
    assert run_ranks(masked, 2, plan.dumps())[0] is None


class Compiled(nn.Module):
    """Two layers with a compiled function between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.compile(lambda h: F.gelu(h) * 2, backend="eager")(self.a(x)))


def test_the_inside_of_compiled_code_is_recorded() -> None:
    trace = capture(Compiled(), {"x": ROWS})
    assert [n.meta["op"] for n in trace.nodes if n.op == "call_function"] == ["linear", "gelu", "mul", "linear"]
    assert make_plan(Compiled(), {"x": ROWS}, tp=2)["a.weight"].layout.cut
