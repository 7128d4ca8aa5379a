"""Parameters and buffers that a conversion reads another way than it stores them, however the forward reaches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tpconvert.parallel import Mesh
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank


class Gain(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


class Net(nn.Module):
    """Two layers and a gain between them, whose gradient has a term on each rank; ``reach`` says how it is read."""

    def __init__(self, reach: str = "attribute") -> None:
        super().__init__()
        self.up, self.down, self.part = nn.Linear(24, 44), nn.Linear(44, 24), Gain()
        self.list, self.dict = nn.ParameterList([torch.ones(1)]), nn.ParameterDict({"gain": torch.ones(1)})
        self.kept = [self.part.gain]
        gain = self.part.gain
        self.closure = lambda: gain
        self.reach = reach

    def forward(self, x: Tensor) -> Tensor:
        gain = {
            "attribute": lambda: self.part.gain,
            "list of parameters": lambda: self.list[0],
            "dict of parameters": lambda: self.dict["gain"],
            "own list": lambda: self.kept[0],
            "closure": self.closure,
            "named": lambda: dict(self.named_parameters())["part.gain"],
            "table": lambda: self.part._parameters["gain"],
            "by path": lambda: self.get_parameter("part.gain"),
        }[self.reach]()
        return self.down(F.gelu(self.up(x)) * gain)


class Weights(Net):
    """The layers' own tensors, from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.up.weight, self.down.weight, self.down.bias]

    def forward(self, x: Tensor) -> Tensor:
        up, down, bias = self.kept
        return F.linear(F.gelu(F.linear(x, up)), down, bias)


class Shared(Net):
    """A bias that its own layer adds after a sum, and the forward before another one."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return torch.tanh(self.down(h)) + torch.sin(F.linear(h * 2, self.down.weight, self.down.bias))


class BufferBias(Net):
    """A bias that is a buffer, added to a term of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 44) / 8)
        self.register_buffer("bias", torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(self.up(x)), self.weight, self.bias)


class Slices(Net):
    """A cut buffer from a list, as far as it is needed: it stays in its dtype when the module moves to another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, 44))
        self.kept = [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h * self.kept[0][: h.shape[-1]])


class Loose(Net):
    """A parameter that is registered nowhere."""

    def __init__(self) -> None:
        super().__init__("own list")
        self.kept = [nn.Parameter(torch.ones(1))]


class Swapped(Net):
    """A layer that is called with other values in the places of its parameters; ``reach`` says which."""

    def forward(self, x: Tensor) -> Tensor:
        down, gain = self.down, self.part.gain
        given = {
            "own": lambda: {"weight": down.weight, "bias": down.bias},
            "scaled": lambda: {"weight": down.weight * gain, "bias": down.bias},
            "bias": lambda: {"bias": down.bias * 2},
            "other": lambda: {"bias": self.list[0].expand(24)},
        }[self.reach]()
        return functional_call(down, given, (F.gelu(self.up(x)),))


class Around(Swapped):
    """One whose forward is written anew, for what it does after that layer."""

    def __init__(self, reach: str) -> None:
        super().__init__(reach)
        self.heads, self.out = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = functional_call(self.down, {"weight": self.down.weight * 2}, (self.up(x),))
        return self.out(self.heads(y).view(*y.shape[:-1], 6, 8).tanh().flatten(-2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        reach: lambda reach=reach: Net(reach)  # type: ignore[misc]
        for reach in ("attribute", "list of parameters", "dict of parameters", "own list", "named", "table")
    },
    "by path": lambda: Net("by path"),
    **{kind.__name__: kind for kind in (Weights, Shared, BufferBias)},
    "own parameters in their places": lambda: Swapped("own"),
}
SWAPPED: dict[str, Callable[[], nn.Module]] = {
    "scaled": lambda: Swapped("scaled"),
    "bias": lambda: Swapped("bias"),
    "other": lambda: Swapped("other"),
    "Around": lambda: Around("own"),
}


def built(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    made = {**MODELS, **SWAPPED}[name]()
    return made, (torch.randn(3, 7, 24),)


def equal(mesh: Mesh, name: str, planned: str) -> Any:
    result = compare_on_rank(*built(name), Plan.loads(planned), mesh)
    return result and (result.equal, result.verdict())


@pytest.mark.parametrize("name", MODELS)
def test_what_a_read_changes_is_changed_however_it_is_reached(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(name), tp=2)
    assert plan["up.weight"].layout.cut
    assert any(v.sum_grad or v.once for v in plan.verdicts)
    same, verdict = run_ranks(equal, 2, name, plan.dumps())[0]
    assert same, verdict


def test_a_forward_that_calls_such_a_layer_is_not_written_anew(run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built("Around"), tp=2)
    assert "it runs down on other values than its parameters" in plan["heads.weight"].reason
    same, verdict = run_ranks(equal, 2, "Around", plan.dumps())[0]
    assert same, verdict


@pytest.mark.parametrize("name", ["scaled", "bias", "other"])
def test_a_layer_called_with_other_values_in_place_of_its_parameters_stays_whole(
    name: str, run_ranks: Callable[..., list[Any]]
) -> None:
    plan = make_plan(*built(name), tp=2)
    assert "in the place of a module's parameter" in plan["down.weight"].reason
    same, verdict = run_ranks(equal, 2, name, plan.dumps())[0]
    assert same, verdict


@pytest.mark.parametrize("name", ["own list", "named", "table", "Weights"])
def test_a_forward_that_reads_past_the_attribute_is_rewritten_and_says_why(name: str) -> None:
    (rewrite,) = make_plan(*built(name), tp=2).rewrites
    assert "not as its module's attribute" in rewrite.reason


def test_a_buffer_in_a_list_does_not_follow_the_dtype_and_stays_whole() -> None:
    torch.manual_seed(0)
    plan = make_plan(Slices(), (torch.randn(3, 7, 24),), tp=2)
    assert not plan["up.weight"].layout.cut
    assert "it reads scale not as its module's attribute" in plan["up.weight"].reason
    assert "it takes another path in another dtype" in plan["up.weight"].reason


def test_what_cannot_be_rewritten_stays_whole_with_the_reason() -> None:
    module = Net("own list")
    module.kept = [Gain().gain]
    pair = nn.Sequential(module)
    pair.register_parameter("gain", module.kept[0])  # its holder is not below the module that reads it
    plan = make_plan(pair, (torch.randn(3, 7, 24),), tp=2)
    assert not plan["0.up.weight"].layout.cut
    assert "it reads gain not as its module's attribute" in plan["0.up.weight"].reason


@pytest.mark.parametrize("kind", [Loose, lambda: Net("closure")], ids=["a list", "a closure"])
def test_a_tensor_without_a_name_that_needs_a_gradient_keeps_its_surroundings_whole(
    kind: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    plan = make_plan(kind(), (torch.randn(3, 7, 24),), tp=2)  # of a copy, while the closure holds the module's own
    assert not plan["up.weight"].layout.cut
    assert "no parameter of the model" in plan["up.weight"].reason
