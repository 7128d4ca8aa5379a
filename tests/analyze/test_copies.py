"""A module is copied whatever it holds."""

import threading
import types

import pytest
import torch
from torch import nn

from tpconvert.analyze.trace.copies import copied
from tpconvert.errors import SourceError


class Holds(nn.Module):
    """A linear, and what else it is given."""

    def __init__(self, **held):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        for name, value in held.items():
            setattr(self, name, value)


def test_computed_tensors_are_copied_as_their_values_wherever_they_are_held():
    module = Holds()
    y = module.linear(torch.ones(2, 3))
    module.aux, module.all = y, [{"y": y.sum()}, types.SimpleNamespace(y=y)]
    module.register_buffer("mean", y.mean(0))
    made = copied(module)
    assert module.aux is y and y.grad_fn is not None
    for mine, want in ((made.aux, y), (made.all[0]["y"], y.sum()), (made.all[1].y, y), (made.mean, y.mean(0))):
        assert torch.equal(mine, want) and not mine.requires_grad
        assert mine.data_ptr() != want.data_ptr()
    assert made.aux is made.all[1].y, "one tensor has become two"


def test_a_copy_is_a_module_of_its_own():
    module = Holds()
    module.tied = module.linear.weight
    made = copied(module)
    assert made.tied is made.linear.weight is not module.tied and made.tied.requires_grad
    with torch.no_grad():
        made.linear.weight.zero_()
    assert module.linear.weight.any()


def test_a_view_of_a_parameter_is_one_of_the_copys():
    module = Holds()
    module.turned = module.linear.weight[1:].t()
    made = copied(module)
    assert torch.equal(made.turned, module.turned)
    (made.turned * 2.0).sum().backward()
    assert module.linear.weight.grad is None
    assert made.linear.weight.grad.tolist() == [[0.0] * 3] + [[2.0] * 3] * 3
    with torch.no_grad():
        made.linear.weight.zero_()
    assert not made.turned.any() and module.turned.any()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_module_has_parameters_of_its_own():
    module = Holds(part=torch.jit.script(nn.Linear(4, 2)))
    module.part.bias.requires_grad_(False)
    made = copied(module)
    made.part(made.linear(torch.ones(2, 3))).sum().backward()
    assert made.part.weight.is_leaf and made.part.weight.grad is not None and made.part.bias.grad is None
    assert all(p.grad is None for p in module.parameters())


def test_parameters_can_be_given():
    module = Holds()
    other = nn.Parameter(torch.zeros(4, 3))
    assert copied(module, {id(module.linear.weight): other}).linear.weight is other


def test_what_refuses_to_be_copied_is_shared():
    lock, steps = threading.Lock(), (i for i in range(3))
    module = Holds(lock=lock, state=types.SimpleNamespace(lock=lock, sizes=[3]), modules_used=[torch, steps])
    made = copied(module)
    assert made.lock is made.state.lock is lock and made.modules_used[1] is steps
    assert made.state is not module.state and made.state.sizes is not module.state.sizes
    assert made.linear.weight is not module.linear.weight


class Refuses(nn.Module):
    def __deepcopy__(self, memo):
        raise RuntimeError("there can be\nonly one")


def test_a_module_that_refuses_is_named():
    with pytest.raises(SourceError, match="Holds cannot be copied: its Refuses raises RuntimeError: there can be only"):
        copied(Holds(part=Refuses()))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_weight_computed_before_each_call_is_computed_of_the_copys_own_parts(norm):
    module = Holds()
    norm(module.linear)
    x = torch.ones(2, 3)
    want = module.eval().linear(x)
    made = copied(module)
    assert torch.equal(made.linear(x), want)
    made.linear(x).sum().backward()
    assert all(p.grad is not None for p in made.parameters()) and all(p.grad is None for p in module.parameters())
