"""Nested arguments and results of every kind that forwards take and give."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from tpconvert.analyze.trace.trees import floats_as, map_tensors, tensor_slots

Pair = namedtuple("Pair", "x y")
X, Y = torch.ones(2), torch.arange(2)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: object = None
    made: str = field(default="", init=False)


@dataclass
class Open:
    x: torch.Tensor
    y: object = None


TREES = {  # name -> (tree, its slots)
    "tensor": (X, [""]),
    "none": (None, []),
    "text": ("text", []),
    "type": (Open, []),
    "tuple": ((X, (Y, None)), ["0", "1.0"]),
    "list": ([X, [3, Y]], ["0", "1.1"]),
    "empty": (((), [], {}), []),
    "named tuple": (Pair(X, [Y]), ["x", "y.0"]),
    "dict": ({"a": X, 1: {"b": Y}}, ["a", "1.b"]),
    "ordered": (OrderedDict(a=X, b=Y), ["a", "b"]),
    "default": (defaultdict(list, a=[X]), ["a.0"]),
    "user dict": (UserDict(a=X, b=(Y,)), ["a", "b.0"]),
    "model output": (BaseModelOutput(last_hidden_state=X, attentions=(Y,)), ["last_hidden_state", "attentions.0"]),
    "dataclass": (Open(X, {"a": Y}), ["x", "y.a"]),
    "frozen": (Frozen(X, (Y, None)), ["x", "y.0"]),
    "size": (torch.Size([2, 3]), []),
}


@pytest.mark.parametrize("name", TREES)
def test_every_tensor_has_a_slot(name):
    tree, slots = TREES[name]
    assert [slot for slot, _ in tensor_slots(tree)] == slots


@pytest.mark.parametrize("name", TREES)
def test_tensors_are_replaced_and_the_types_kept(name):
    tree, slots = TREES[name]
    before = dict(tensor_slots(tree))
    made = map_tensors(lambda t: t + 1, tree)
    assert type(made) is type(tree)
    after = dict(tensor_slots(made))
    assert list(after) == slots and all(torch.equal(after[s], before[s] + 1) for s in slots)
    assert all(t is before[s] for s, t in tensor_slots(tree)), "the given tree was changed"


def test_what_else_a_tree_holds_is_kept():
    assert map_tensors(torch.clone, TREES["default"][0])["new"] == []
    made = map_tensors(torch.neg, TREES["model output"][0])
    assert made.last_hidden_state is made["last_hidden_state"] is made[0]
    assert map_tensors(torch.neg, MappingProxyType({"a": X}))["a"][0] == -1
    assert map_tensors(torch.neg, (X, "text", None, 3))[1:] == ("text", None, 3)


@dataclass
class Guarded:
    """As a configuration whose layers differ: the field of all of them may not be read."""

    x: torch.Tensor
    heads: int = 4

    def __getattribute__(self, name: str) -> object:
        if name == "heads":
            raise RuntimeError("ask each layer")
        return super().__getattribute__(name)


def test_a_field_that_may_not_be_read_is_left_alone():
    assert [slot for slot, _ in tensor_slots(Guarded(X))] == ["x"]
    assert torch.equal(map_tensors(torch.neg, Guarded(X)).x, -X)


def test_only_floating_tensors_change_their_dtype():
    made = floats_as({"x": X, "more": Pair(Y, [torch.ones(1, dtype=torch.bool), X])}, torch.float64)
    assert made["x"].dtype == made["more"].y[1].dtype == torch.float64
    assert made["more"].x.dtype == torch.int64 and made["more"].y[0].dtype == torch.bool
    assert X.dtype == torch.float32
