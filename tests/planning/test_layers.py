"""Layers cut by themselves where asked for, and what a plan gives up and compares where a layer is between others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.equal import difference
from tpconvert.parallel import parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank, emulate_module

WIDTH = 24


class Between(nn.Module):
    """A square layer between two norms, called twice, and a matrix stored the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.turned = Turned()
        self.few = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.dense(self.norm(x)))
        x = self.norm(self.dense(x).sin())
        return self.norm(self.turned(x)) * self.few(x).softmax(-1)[..., :1]


class Turned(nn.Module):
    """(in, out), with the result of its product reshaped."""

    def __init__(self) -> None:
        super().__init__()
        self.out = WIDTH
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.out)


def built() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Between(), {"x": torch.randn(2, 5, WIDTH)}


def gathered(plan: Plan) -> list[tuple[str, str]]:
    return [(b.module, b.side) for b in plan.boundaries if b.kind == "gather"]


@pytest.mark.parametrize("tp", [2, 3])
def test_a_layer_between_norms_is_cut_and_put_together(tp: int, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(), tp=tp, overrides=["*=gathered"])
    assert {n: plan[f"{n}.weight"].layout.dim for n in ("dense", "turned", "few")} == {
        "dense": 0, "turned": 1, "few": None,
    }  # fmt: skip
    assert gathered(plan) == [("dense", "output"), ("turned", "output")]
    result = emulate_module(*built(), plan)
    assert result.equal, result.verdict()
    assert run_ranks(difference, tp, __name__, plan.dumps())[0] is None


def test_a_layer_that_the_user_keeps_whole_stays_whole() -> None:
    plan = make_plan(*built(), tp=2, overrides=["*=gathered", "dense.*=whole"])
    assert gathered(plan) == [("turned", "output")]
    assert plan["dense.weight"].reason.startswith("whole: ")


class Router(nn.Module):
    """Few columns from many: a sum of the wide gradient would cost more than they save."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(96, 4), nn.Linear(96, 192), nn.Linear(192, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sin()) * self.gate(x).softmax(-1).amax(-1, keepdim=True)


def test_a_layer_that_is_not_worth_it_stays_whole() -> None:
    plan = make_plan(Router(), {"x": torch.randn(2, 5, 96)}, tp=2, overrides=["*=gathered"])
    assert not plan["gate.weight"].layout.cut
    assert plan["up.weight"].layout.cut and gathered(plan) == []


class Deep(nn.Module):
    """A sum that no module returns reaches a norm that cannot be written anew; a matrix elsewhere is no part of it."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                return x / x.square().mean(-1, keepdim=True).sqrt() * self.weight
            return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = self.Norm(), nn.Linear(WIDTH, 96), nn.Parameter(torch.randn(96, WIDTH) * 0.1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 1e9).any()):  # so that this forward is not written anew
            x = x / 2
        return self.mlp(self.norm(self.up(x).tanh() @ self.down))


def test_what_is_given_up_for_a_sum_is_the_axis_it_is_over() -> None:
    plan = make_plan(Deep(), {"x": torch.randn(2, 5, WIDTH)}, tp=2)
    assert gathered(plan) == []
    assert plan["mlp.0.weight"].layout.cut and plan["mlp.2.weight"].layout.cut
    assert not plan["down"].layout.cut


class Compares(nn.Module):
    """Heads in one dim with the batch, whose size is compared; the scale of each row is returned beside the result."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 6).transpose(1, 2).reshape(b * 4, t, 6)
        a = torch.bmm(q, q.transpose(1, 2)).softmax(-1)
        if a.size(0) != b * 4:
            raise ValueError("heads are missing")
        return self.o(torch.bmm(a, q).view(b, 4, t, 6).transpose(1, 2).reshape(b, t, WIDTH))


def compared(mesh: Any, plan: str) -> str | None:
    torch.manual_seed(0)
    result = compare_on_rank(Compares(), {"x": torch.randn(4, 5, WIDTH)}, Plan.loads(plan), mesh)
    return None if result is None or (result.equal and not result.notes) else f"{result.verdict()} {result.notes}"


def test_a_whole_size_with_the_batch_inside_is_compared_at_any_batch(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(Compares(), {"x": torch.randn(2, 5, WIDTH)}, tp=2)
    assert plan["q.weight"].layout.cut and plan.rewrites
    assert run_ranks(compared, 2, plan.dumps())[0] is None


class Voices(nn.Module):
    """What several heads return is put together where the module around them returns it."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.heads = nn.LayerNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return torch.stack([head(x) for head in self.heads], dim=1)

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Heads()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x).flatten(0, 1)


class Wrapped(Voices):
    """The same, returned as it is by a module around that one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)


@pytest.mark.parametrize(("kind", "where"), [(Voices, "decoder"), (Wrapped, "")])
def test_what_a_module_of_several_layers_puts_together_is_found_again(kind: type[Voices], where: str) -> None:
    module, inputs = kind(), {"x": torch.randn(2, 5, WIDTH)}
    plan = make_plan(module, inputs, tp=2)
    assert gathered(plan) == [(where, "output")]
    assert all(plan[f"decoder.heads.{i}.weight"].layout.cut for i in range(3))
    assert emulate_module(module, inputs, plan).equal


class Tied(nn.Module):
    """A layer between norms whose parameters are those of another one, which is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.used, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.used.weight, self.used.bias = self.kept.weight, self.kept.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.used(self.norm(x)))


class Projector(nn.Module):
    """A layer between norms, in a module that returns what it does."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    def __init__(self) -> None:
        super().__init__()
        self.projector, self.norm = self.Around(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.projector(self.norm(x))
        return self.norm(x) + x[..., :1]


class Reader(Projector):
    """The parameters of a layer that is not called, read by the module around it."""

    class Around(Projector.Around):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, self.linear.weight, self.linear.bias)


@pytest.mark.parametrize(("kind", "where"), [(Tied, "used"), (Projector, "projector"), (Reader, "projector")])
def test_a_layer_cut_by_itself_is_found_again_wherever_its_parameters_and_result_are(
    kind: type[nn.Module], where: str
) -> None:
    torch.manual_seed(0)
    module, inputs = kind(), {"x": torch.randn(2, 5, WIDTH)}
    plan = make_plan(module, inputs, tp=2, overrides=["*=gathered"])
    assert gathered(plan) == [(where, "output")]
    result = emulate_module(module, inputs, plan)
    assert result.equal, result.verdict()


class Narrow(nn.Module):
    """Layers of few columns before a norm, all given one value: its gradient is summed once for all of them."""

    def __init__(self, layers: int, wide: bool = False, learned: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(96, 96) if learned else nn.Identity()
        self.narrow = nn.ModuleList(nn.Linear(96, 32) for _ in range(layers))
        self.norm, self.enter = nn.LayerNorm(32), nn.Softmax(-1)
        self.up, self.down = nn.Linear(96, 24), nn.Linear(24, 32)
        self.wide = wide

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(self.first(x)) if isinstance(self.first, nn.Linear) else x
        out = [self.norm(layer(x)) for layer in self.narrow]
        if self.wide:
            out.append(self.norm(self.down(self.up(x).sin())))
        return torch.stack(out).sum(0)


@pytest.mark.parametrize(
    ("module", "cut"),
    [
        (Narrow(1), False),
        (Narrow(2), True),  # two share the sum
        (Narrow(1, wide=True), True),  # that is summed already
        (Narrow(1, learned=False), True),  # that nobody asks for
    ],
)
def test_the_gradient_of_what_a_layer_is_given_is_paid_for_once(module: Narrow, cut: bool) -> None:
    inputs = {"x": torch.randn(2, 5, 96)}
    plan = make_plan(module, inputs, tp=2, overrides=["narrow.*=gathered"])
    assert {plan[f"narrow.{i}.weight"].layout.cut for i in range(len(module.narrow))} == {cut}
    result = emulate_module(module, inputs, plan)
    assert result.equal, result.verdict()


class Learned(nn.Module):
    """A layer is given a table of the model, spread over the batch: that table is not its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))
        self.up, self.down, self.norm = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.table.unsqueeze(0).repeat(x.shape[0], 1, 1)
        x = self.norm(self.dense(self.norm(x)))
        return self.norm(x + self.down(self.up(queries).sin()).mean(1, keepdim=True))


def test_a_layer_that_is_cut_already_is_not_cut_by_itself() -> None:
    inputs = {"x": torch.randn(2, 5, WIDTH)}
    plan = make_plan(Learned(), inputs, tp=2, overrides=["*=gathered"])
    assert plan["up.weight"].layout.dim == 0 and plan["down.weight"].layout.dim == 1
    assert gathered(plan) == [("dense", "output")]


class Again(nn.Module):
    """Two layers that run over each of six pictures: what they send counts six times, and what they compute too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.norm(self.down(self.up(part).sin())) for part in x.unbind(1)], 1)


def test_a_layer_saves_as_often_as_it_is_applied() -> None:
    module, inputs = Again(), {"x": torch.randn(2, 6, 5, WIDTH)}
    plan = make_plan(module, inputs, tp=2)
    assert plan["up.weight"].layout.cut and plan["down.weight"].layout.cut
    assert emulate_module(module, inputs, plan).equal


class Streams(nn.Module):
    """Halves of what a layer takes in enter a region that is cut, in the forward that splits them; so do others."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(WIDTH, 48)), nn.Parameter(torch.randn(48, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=1)
            return torch.cat([(first @ self.up).sin() @ self.down, second.cos()], 1)

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, WIDTH), nn.LayerNorm(WIDTH))
        self.streams, self.norm = self.Attention(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.norm(self.streams(x + x.sin()))


def test_only_the_axes_of_a_segment_are_given_up_for_it() -> None:
    module, inputs = Streams(), {"x": torch.randn(2, 6, WIDTH)}
    plan = make_plan(module, inputs, tp=2)
    assert plan["before.0.weight"].layout.cut and plan["before.2.weight"].layout.cut
    assert not plan["streams.up"].layout.cut
    assert "only a segment of it enters the cut region" in plan["streams.up"].reason


class Box:
    """An object that a forward is given, so that it cannot be written anew."""


class Sized(nn.Module):
    """Takes another path where a rank has few columns; the layers after it do not."""

    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

        def forward(self, x: Tensor, box: Box) -> Tensor:
            x = self.up(x)
            return self.down(x.sin() if x.shape[-1] > 40 else x)

    def __init__(self) -> None:
        super().__init__()
        self.few = self.Few()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.few(x, Box()))


def test_a_forward_that_was_to_be_written_anew_is_let_be_once_nothing_in_it_is_cut() -> None:
    plan = make_plan(Sized(), {"x": torch.randn(2, 5, WIDTH)}, tp=2)
    assert not plan["few.up.weight"].layout.cut
    assert plan["mlp.1.weight"].layout.cut and plan["mlp.3.weight"].layout.cut
    assert not plan.rewrites


def test_a_hook_sees_what_its_layer_returns_put_together(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*hooked(), tp=2, overrides=["*=gathered"])
    assert gathered(plan) == [("dense", "output"), ("turned", "output")]
    assert run_ranks(seen_by_hook, 2, plan.dumps()) == [None, None]


def hooked() -> tuple[nn.Module, dict[str, Any]]:
    """With a hook of the user's that keeps what a layer returns."""
    module, inputs = built()
    module.seen = []  # type: ignore[assignment]
    module.dense.register_forward_hook(lambda layer, args, out: module.seen.append(out.detach()))  # type: ignore[operator]
    return module, inputs


def seen_by_hook(mesh: Any, plan: str) -> None:
    module, inputs = hooked()
    module(**inputs)
    whole = list(module.seen)  # type: ignore[arg-type]
    module.seen.clear()  # type: ignore[operator]
    parallelize(module, Plan.loads(plan), mesh)(**inputs)
    torch.testing.assert_close(module.seen, whole)
