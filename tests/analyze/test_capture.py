"""The recorder: edges, versions, calls, and leaving everything as it was."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx, nn

from tpconvert.analyze.capture.run import capture
from tpconvert.analyze.trace.call import Trace
from tpconvert.analyze.trace.provenance import Int
from tpconvert.errors import SourceError


class Runs(nn.Module):
    """A module whose forward is a function of it and its input."""

    def __init__(self, function, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 12).reshape(3, 4))
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor):
        return self.function(self, x)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def traced(function, x: Tensor = X, **parts: nn.Module) -> Trace:
    return capture(Runs(function, **parts), {"x": x}, values=True)


def replay(trace: Trace, **inputs: Tensor) -> list[Tensor]:
    """The outputs when the graph alone is run."""
    env: dict[fx.Node, object] = {}
    for node in trace.nodes:
        if node.meta["op"] == "parameter":
            env[node] = node.meta["value"].clone()
        elif node.meta["op"] == "input":
            env[node] = inputs[node.meta["slot"].removeprefix("kwargs.")].clone()
        elif node.meta["op"] == "constant":
            env[node] = node.meta["value"].clone()
        elif node.meta["op"] == "alias":
            env[node] = env[node.args[0]]  # type: ignore[index]
        else:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
            out = node.target(*args, **kwargs)  # type: ignore[operator]
            env[node] = args[0] if node.meta["op"] == "__setitem__" else out
    return [env[node] for node in trace.outputs.values()]  # type: ignore[misc]


def in_place_then_view(self, x):
    y = x * self.weight
    half = y[:, 2:]
    y.mul_(2.0)
    return half + 1


def sibling_views(self, x):
    y = x * self.weight
    a, b = y[:, :3], y.T
    a.add_(1.0)
    return b * 2


def written(self, x):
    y = torch.zeros(3, 4)
    y[:, 1:3] = x[:, 1:3] * 2
    y[0] = self.weight[1]
    return y * 3


def through_out(self, x):
    y = torch.empty(3, 4)
    torch.mul(x, 2.0, out=y)
    return y + self.weight


def flattened(self, x):
    y = (x * self.weight).view(-1)
    y[3:6].zero_()
    return y.view(4, 3).T


def same_to(self, x):
    y = x.to(x.dtype)
    return y.contiguous() * self.weight + x.to(torch.float32)


@pytest.mark.parametrize(
    "function", [in_place_then_view, sibling_views, written, through_out, flattened, same_to], ids=lambda f: f.__name__
)
def test_the_graph_alone_gives_what_the_forward_gave(function) -> None:
    other = X.flip(0) * 3
    module = Runs(function)
    (found,) = replay(capture(module, {"x": X}, values=True), x=other)
    assert torch.equal(found, module(other))


@pytest.mark.parametrize(
    "function", [in_place_then_view, sibling_views, written, through_out, flattened], ids=lambda f: f.__name__
)
def test_what_is_read_after_a_write_depends_on_the_write(function) -> None:
    trace = traced(function)
    writes = [n for n in trace.nodes if n.meta["op"].endswith("_") or "out" in n.kwargs]
    writes = [n for n in writes if not n.meta["op"].startswith("__") or n.meta["op"] == "__setitem__"]
    (output,) = trace.outputs.values()
    above, pending = set(), [output]
    while pending:
        node = pending.pop()
        if node not in above:
            above.add(node)
            pending += node.all_input_nodes
    assert writes
    assert set(writes) <= above


def test_an_op_that_returns_its_argument_is_no_copy_of_it() -> None:
    trace = traced(same_to)
    (first, *_) = [n for n in trace.nodes if n.meta["op"] == "to"]
    assert first.meta["val"] is not first.args[0].meta["val"]
    (product,) = [n for n in trace.nodes if n.meta["op"] == "mul"]
    (contiguous,) = [n for n in trace.nodes if n.meta["op"] == "contiguous"]
    assert contiguous.args == (first,)
    assert product.args[0] is contiguous


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 + 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_custom_autograd_function_is_one_op_over_its_arguments_and_all_it_computes() -> None:
    trace = traced(lambda self, x: Doubled.apply(x * self.weight).sum(0))
    outer, *inside = [n for n in trace.nodes if n.meta["op"] in ("mul", "add")]
    (applied,) = [n for n in trace.nodes if n.meta["op"] == "Doubled.apply"]
    assert [n.meta["op"] for n in inside] == ["mul", "add"]
    assert not any(n.meta["grad"] for n in inside)
    assert applied.meta["grad"]
    assert set(applied.all_input_nodes) == {outer, *inside}
    assert [n.meta["op"] for n in applied.users] == ["sum"]


def test_values_made_without_grad_do_not_count_as_differentiable() -> None:
    def detached(self, x):
        with torch.no_grad():
            scale = self.weight.abs().max()
        return x * self.weight / scale

    trace = traced(detached)
    grads = {n.meta["op"]: n.meta["grad"] for n in trace.nodes if n.op == "call_function"}
    assert grads == {"abs": False, "max": False, "mul": True, "div": True}


# -- structures ----------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


@pytest.mark.parametrize(
    ("make", "slots", "plain"),
    [
        (lambda a, b: a, [""], True),
        (lambda a, b: (a, b), ["0", "1"], True),
        (lambda a, b: [a, (b,)], ["0", "1.0"], True),
        (lambda a, b: {"a": a, "b": [b]}, ["a", "b.0"], True),
        (lambda a, b: Pair(a, b), ["left", "right"], False),
        (lambda a, b: Result(a, (b,)), ["logits", "hidden.0"], False),
        (lambda a, b: (a, None, 3), ["0"], True),
    ],
)
def test_outputs_are_found_in_any_structure(make, slots, plain) -> None:
    trace = traced(lambda self, x: make(x * self.weight, x + 1))
    assert list(trace.outputs) == slots
    assert trace.calls[0].plain is plain
    assert [n.meta["op"] for n in trace.outputs.values()] == ["mul", "add"][: len(slots)]


def test_inputs_are_named_by_where_they_stand() -> None:
    class Takes(nn.Module):
        def forward(self, a, pair, *, options):
            return a + pair[0] * pair[1][0] + options["scale"]

    trace = capture(
        Takes(), (X, (X, [X * 1])) if False else {"a": X, "pair": (X * 1, [X * 2]), "options": {"scale": X * 3}}
    )
    assert list(trace.calls[0].inputs) == ["kwargs.a", "kwargs.pair.0", "kwargs.pair.1.0", "kwargs.options.scale"]


def test_positional_inputs_and_constants_are_kept() -> None:
    class Takes(nn.Module):
        def forward(self, a, times=2, flag=None):
            return a * times

    call = capture(Takes(), (X, 3)).calls[0]
    assert list(call.inputs) == ["args.0"]
    assert call.constants == {"args.1": 3}


# -- calls ---------------------------------------------------------------------------------------------------------


def test_a_module_called_twice_has_two_calls() -> None:
    trace = traced(lambda self, x: self.layer(self.layer(x)), layer=nn.Linear(4, 4))
    calls = [c for c in trace.calls if c.module == "layer"]
    assert [c.index for c in calls] == [0, 1]
    assert calls[0].outputs[""] is calls[1].inputs["args.0"]
    assert all(c.parent is trace.calls[0] for c in calls)


def test_a_module_under_two_names_goes_by_the_first() -> None:
    layer = nn.Linear(4, 4)
    trace = traced(lambda self, x: self.b(self.a(x)), a=layer, b=layer)
    assert [(c.module, c.index) for c in trace.calls] == [("", 0), ("a", 0), ("a", 1)]
    assert set(trace.parameters) == {"a.weight", "a.bias"}


def test_an_op_belongs_to_the_innermost_call_whose_forward_ran_it() -> None:
    trace = traced(lambda self, x: self.block(x) * 2, block=nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    owner = {n.meta["op"]: n.meta["call"].module for n in trace.nodes if n.op == "call_function"}
    assert owner == {"linear": "block.0", "relu": "block.1", "mul": ""}
    inner, outer = (next(c for c in trace.calls if c.module == m) for m in ("block.0", ""))
    assert inner.inside(outer)
    assert not outer.inside(inner)


def test_functionals_written_in_python_are_recorded_inside() -> None:
    mha = nn.MultiheadAttention(4, 2)
    trace = traced(lambda self, x: self.mha(x, x, x, need_weights=False)[0], mha=mha)
    ops = {n.meta["op"] for n in trace.nodes}
    assert "multi_head_attention_forward" not in ops
    assert "scaled_dot_product_attention" in ops


# -- questions -----------------------------------------------------------------------------------------------------


def test_a_branch_on_values_is_marked_with_the_question() -> None:
    trace = traced(lambda self, x: x * self.weight if bool((x > 0).all()) else x + self.weight)
    assert trace.calls[0].asked == "__bool__"


@pytest.mark.parametrize("question", ["item", "tolist"])
def test_a_number_read_from_a_tensor_is_marked(question: str) -> None:
    trace = traced(lambda self, x: x * self.weight * (getattr(x.sum(), question)()))
    assert trace.calls[0].asked == question


def test_a_forward_that_asks_nothing_is_not_marked() -> None:
    trace = traced(lambda self, x: self.layer(x) if x.shape[0] == 3 else x, layer=nn.Linear(4, 4))
    assert not any(c.asked for c in trace.calls)


def test_a_loop_over_found_places_is_marked_as_shaped_by_data() -> None:
    def loop(self, x):
        total = x * 0
        for place in (x[:, 0] > 0).nonzero():
            total = total + self.weight[place]
        return total

    trace = traced(loop)
    assert {"nonzero", "unbind", "__getitem__"} <= {n.meta["op"] for n in trace.by_data}
    assert not any(n.meta["op"] == "gt" for n in trace.by_data)


def test_what_is_shaped_by_data_is_followed_downstream() -> None:
    trace = traced(lambda self, x: x[(x[:, 0] > 0).nonzero()[:, 0]] * 2)
    (product,) = [n for n in trace.nodes if n.meta["op"] == "mul"]
    assert product in trace.by_data


# -- leaving things as they were -----------------------------------------------------------------------------------


class Sized(nn.Module):
    def __init__(self, fail: bool) -> None:
        super().__init__()
        self.heads, self.sizes, self.fail = 3, (2, 2), fail
        self.layer = nn.Linear(4, 4)
        self.layer.weight.requires_grad_(False)

    def forward(self, x):
        assert type(self.heads) is Int
        assert type(self.layer.in_features) is Int
        y = self.layer(x).view(self.heads, *self.sizes)
        if self.fail:
            raise ValueError("no good")
        return y


@pytest.mark.parametrize("fail", [False, True])
def test_hooks_attributes_and_gradients_are_as_before_even_when_the_forward_fails(fail: bool) -> None:
    module = Sized(fail)
    if fail:
        with pytest.raises(SourceError):
            capture(module, {"x": X})
    else:
        capture(module, {"x": X})
    assert type(module.heads) is int
    assert type(module.layer.in_features) is int
    assert [type(n) for n in module.sizes] == [int, int]
    assert not module.layer.weight.requires_grad
    assert module.layer.bias.requires_grad
    for m in module.modules():
        assert not m._forward_hooks
        assert not m._forward_pre_hooks
    assert torch.nn.functional.has_torch_function((X,)) is False
    assert type(X * 2) is Tensor


def test_a_frozen_parameter_is_differentiated_while_captured() -> None:
    trace = capture(Sized(False), {"x": X})
    assert trace.parameters["layer.weight"].meta["grad"]


def test_a_forward_that_fails_names_the_line_of_the_users_code() -> None:
    with pytest.raises(SourceError, match=r"test_capture\.py:\d+ in forward: ValueError: no good") as caught:
        capture(Sized(True), {"x": X})
    line = int(str(caught.value).split("test_capture.py:")[1].split()[0])
    with open(__file__) as source:  # noqa: PTH123
        assert 'raise ValueError("no good")' in source.read().splitlines()[line - 1]


def test_a_failure_inside_torch_names_the_users_line_that_led_there() -> None:
    with pytest.raises(SourceError, match=r"test_capture\.py:\d+ in <lambda>: RuntimeError: mat1 and mat2 shapes"):
        traced(lambda self, x: self.layer(x), layer=nn.Linear(5, 4))


@pytest.mark.parametrize("initialized", [torch.distributed.is_initialized, lambda: torch.distributed.is_initialized()])
def test_a_forward_that_asks_for_ranks_is_told_once(initialized: Callable[[], bool]) -> None:
    def contrast(self: Runs, x: Tensor) -> Tensor:
        for _ in range(2):
            if initialized():
                x = x / torch.distributed.get_world_size()
        return self.norm(x)

    assert traced(contrast, norm=nn.BatchNorm1d(4)).ranks == ("",)
    assert not traced(lambda self, x: self.norm(x), norm=nn.SyncBatchNorm(4)).ranks


@pytest.mark.parametrize("seed", [
    lambda: torch.seed(), lambda: torch.random.seed(), lambda: torch.cuda.default_generators[0].seed()
])  # fmt: skip
def test_a_forward_that_takes_a_seed_from_the_machine_is_told(
    seed: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generators = (torch.Generator(),)  # as there are where a GPU is in use
    monkeypatch.setattr("torch.cuda.default_generators", generators)
    trace = traced(lambda self, x: x + 0 * seed() % 2)
    assert trace.seeds == ("",) and not trace.ranks
    assert torch.cuda.default_generators is generators


def test_a_trace_holds_no_activations() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x).relu()
            self.seen[2:].copy_(h[0, 2:].detach())
            return self.down(h)

    module = Net()
    trace = capture(module, {"x": torch.ones(2, 4)})
    made = {n.meta["op"]: n.meta["val"] for n in trace.nodes if n.op == "call_function"}
    assert made["relu"].is_meta and made["relu"].shape == (2, 8) and made["relu"].dtype == torch.float32
    assert made["copy_"].untyped_storage().data_ptr() == module.seen.untyped_storage().data_ptr()  # it outlives them
    assert trace.parameters["up.weight"].meta["val"] is module.up.weight
    valued = capture(module, {"x": torch.ones(2, 4)}, values=True)
    assert not any(n.meta["val"].is_meta for n in valued.nodes)
