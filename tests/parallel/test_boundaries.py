"""Boundaries find their tensor however the module is called, and keep the types of what they pass on."""

import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from tests.models import leaves
from tests.parallel.same import plan_of
from tpconvert.errors import PlanError
from tpconvert.parallel import dry_mesh, parallelize
from tpconvert.spec.layout import Block
from tpconvert.spec.plan import Boundary

MESH = dry_mesh(0, 2, device="cpu")
HALF = {"dim": 0, "blocks": (Block(4),)}  # a scatter takes the first two of four: visible without ranks
Pair = namedtuple("Pair", "left right")


@dataclass
class Parts:
    left: Tensor
    right: Tensor


@dataclass
class Logits(ModelOutput):
    logits: Tensor | None = None
    past: tuple | None = None


class Echo(nn.Module):
    """Returns what it was given, through ``wrap``."""

    def __init__(self, wrap=lambda x, y: (x, y)):
        super().__init__()
        self.wrap = wrap

    def forward(self, x, y=None, z=3, **rest):
        return self.wrap(x, y, **rest)


def planned(module, *boundaries):
    return parallelize(module, plan_of(module, 2, {}, boundaries=boundaries), MESH)


def scatter(side, *slots, module="", call=-1):
    return Boundary("scatter", module, side, slots, call=call, **HALF)


X, Y = torch.arange(4.0), torch.arange(4.0) + 10


@pytest.mark.parametrize("slot", ["args.1", "kwargs.y"])
def test_an_argument_is_found_by_position_and_by_name(slot):
    echo = planned(Echo(), scatter("input", slot))
    for x, y in (echo(X, Y), echo(X, y=Y), echo(x=X, y=Y), echo(y=Y, x=X)):
        assert x is X and torch.equal(y, Y[:2])


def test_an_argument_that_is_none_or_left_out_with_default_none_is_passed_by():
    echo = planned(Echo(), scatter("input", "kwargs.y"))
    assert echo(X, None) == (X, None) and echo(X) == (X, None)


@pytest.mark.parametrize(
    ("slot", "call", "message"),
    [
        ("args.0", {}, "argument 'args.0' is not given"),
        ("kwargs.z", {"x": X}, "argument 'kwargs.z' is not given"),
        ("kwargs.mask", {"x": X}, "argument 'kwargs.mask' is not given"),
        ("kwargs.y.1", {"x": X, "y": (Y,)}, "argument 'kwargs.y.1' is not in the tuple that was given"),
        ("kwargs.y.b", {"x": X, "y": {"a": Y}}, "argument 'kwargs.y.b' is not in the dict that was given"),
        ("kwargs.z", {"x": X, "z": 5}, "argument 'kwargs.z' is a int, not a tensor"),
    ],
)
def test_a_missing_argument_is_named(slot, call, message):
    with pytest.raises(PlanError, match=re.escape(f"the root module: {message}")) as error:
        planned(Echo(), scatter("input", slot))(**call)
    assert "plan again" in str(error.value)


def test_slots_of_one_tensor_share_one_collective_and_stay_one_object():
    echo = planned(Echo(), scatter("input", "args.0", "kwargs.y"))
    x, y = echo(X, X)
    assert x is y and torch.equal(x, X[:2])
    x, y = echo(X, Y)
    assert torch.equal(x, X[:2]) and torch.equal(y, Y[:2])


@pytest.mark.parametrize(
    ("wrap", "slots"),
    [
        (lambda x, y: (x, y), ("0",)),
        (lambda x, y: [x, y], ("0",)),
        (lambda x, y: {"a": x, "b": y}, ("a",)),
        (lambda x, y: {0: x, 1: y}, ("0",)),
        (lambda x, y: OrderedDict(a=x, b=y), ("a",)),
        (Pair, ("left",)),
        (Parts, ("left",)),
        (lambda x, y: Logits(logits=x, past=(y,)), ("logits",)),
        (lambda x, y: ([{"deep": x}], y), ("0.0.deep",)),
    ],
)
def test_outputs_keep_their_type(wrap, slots):
    given = wrap(X, Y)
    out = planned(Echo(lambda x, y: given), scatter("output", *slots))(X, Y)
    assert type(out) is type(given) and out is not given
    first, second = leaves(out)
    assert torch.equal(first, X[:2]) and second is Y
    assert next(leaves(given)) is X


def test_a_missing_output_is_named():
    with pytest.raises(PlanError, match=re.escape("the root module: output '2' is not in the tuple")):
        planned(Echo(), scatter("output", "2"))(X, Y)


def test_user_hooks_see_what_enters_the_module_and_what_leaves_it():
    seen = {}
    echo = Echo()
    echo.register_forward_pre_hook(lambda m, args: seen.update(before=args[0]))
    echo.register_forward_hook(lambda m, args, out: seen.update(after=out[0]))
    planned(echo, scatter("output", "0"))
    echo(X, Y)
    assert seen["before"] is X and torch.equal(seen["after"], X[:2])


class Twice(nn.Module):
    """One layer called twice, and the second time differently."""

    def __init__(self):
        super().__init__()
        self.echo = Echo(lambda x, y: x * x)

    def forward(self, x, recompute=False):
        run = (lambda x: checkpoint(self.echo, x, use_reentrant=False)) if recompute else self.echo
        return run(x), run(x)


def test_call_selects_the_nth_call_of_one_forward():
    twice = planned(Twice(), scatter("output", "", module="echo", call=1))
    for _ in range(2):
        first, second = twice(X)
        assert len(first) == 4 and len(second) == 2
    every = planned(Twice(), scatter("output", "", module="echo"))
    assert [len(x) for x in every(X)] == [2, 2]


def test_a_recomputed_call_is_placed_where_calls_are_alike_and_refused_where_not():
    x = X.clone().requires_grad_()
    alike = planned(Twice(), *(scatter("output", "", module="echo", call=i) for i in (0, 1)))
    sum(y.sum() for y in alike(x, recompute=True)).backward()
    assert x.grad is not None
    other = planned(Twice(), scatter("output", "", module="echo", call=1))
    with pytest.raises(PlanError, match="echo is called 2 times in one forward, with different collectives"):
        sum(y.sum() for y in other(x, recompute=True)).backward()


def test_a_failed_forward_does_not_spoil_the_count():
    twice = planned(Twice(), scatter("output", "", module="echo", call=1))
    with pytest.raises(TypeError):
        twice(None)
    assert len(twice.echo(X)) == 4  # not the second call of the forward that failed
    assert [len(x) for x in twice(X)] == [4, 2]


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning")  # dynamo instantiates them
def test_hooked_calls_compile_into_one_graph():
    twice = planned(Twice(), scatter("output", "", module="echo", call=1))
    twice = torch.compile(twice, backend="aot_eager", fullgraph=True)
    assert [len(x) for x in twice(X.repeat(2)[:4])] == [4, 2]
