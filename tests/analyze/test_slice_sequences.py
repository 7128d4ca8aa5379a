"""Slices that are whole sequences: where ranks cannot share the tokens, whatever a model is called with."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.analyze.test_slicing import Block
from tests.verify.frame import built, planned
from tests.zoo.frame import floats, seeded
from tpconvert.errors import PlanError
from tpconvert.parallel import Mesh, dry_mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.report import plan_report, plan_text
from tpconvert.spec.plan import Plan
from tpconvert.spec.sliced import sliced_form
from tpconvert.verify import compare_on_rank, emulate_module

WIDTH = 22


class Pictures(nn.Module):
    """Four patches of a picture and a token beside them, which makes five; then two blocks, and something between."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.beside = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, 5, WIDTH))
        self.first, self.second, self.norm = Block(), Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 6)

    def embedded(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.beside.expand(x.shape[0], -1, -1), x], 1) + self.places

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedded(x)
        x = F.scaled_dot_product_attention(x, x, x)
        return self.head(self.norm(self.second(self.between(self.first(x))))[:, 0])


class Counted(Pictures):
    """Pictures are counted in a way that nobody can follow."""

    def embedded(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.beside.expand(len(x), -1, -1), x], 1) + self.places


class Centred(Pictures):
    """The mean of all pictures."""

    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Shifted(Pictures):
    """A picture takes the next one's."""

    def between(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 0)


class Halved(Pictures):
    """By the number of pictures, of which a rank has fewer."""

    def between(self, x: Tensor) -> Tensor:
        return x / len(x)


class Mixed(Pictures):
    """Tokens are mixed between the blocks, each picture's by themselves."""

    def between(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


class Turned(Pictures):
    """Tokens come first."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedded(x)
        x = F.scaled_dot_product_attention(x, x, x).transpose(0, 1)
        return self.head(self.norm(self.second(self.first(x)))[0])


class First(Pictures):
    """The first picture is another."""

    def between(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[0] = 1.0
        return x


class Last(Pictures):
    """All but the first are written to."""

    def between(self, x: Tensor) -> Tensor:
        x = x * 1
        x[1:] = x[:1]
        return x


class FirstToken(Pictures):
    """The first token of each is another."""

    def between(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = self.beside[0, 0]
        return x


class Standardized(Pictures):
    """By statistics of all pictures, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.standard = nn.BatchNorm1d(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return self.standard(x.transpose(1, 2)).transpose(1, 2)


INPUTS = {"x": floats(4, 3, 8, 8)}
ALL = (Pictures, Counted, Mixed, Turned, Centred, Shifted, Halved, First, Last, FirstToken, Standardized)


@pytest.mark.parametrize(
    ("cls", "first", "second"),
    [
        (Pictures, True, False), (Counted, True, False), (Mixed, True, False), (Turned, True, False),
        *((cls, False, True) for cls in (Centred, Shifted, Halved)),  # what lies between sees whole values
        (First, True, True), (Last, True, True), (FirstToken, True, False),
        (Standardized, True, False),  # a module of its own does
    ],
)  # fmt: skip
def test_an_odd_number_of_tokens_that_no_input_has_leaves_sequences_to_share(cls, first, second):
    plan = make_plan(seeded(cls), INPUTS, tp=2)
    assert plan.slices.reason == "" and plan.slices.sequences and not plan.slices.rows
    found = {(b.kind, b.module, b.dim) for b in sliced_form(plan).boundaries}
    dim = int(cls is Turned)
    assert ("reduce_scatter", "second.down", dim) in found
    assert (("reduce_scatter", "first.down", dim) in found) is first
    assert (("scatter", "second", dim) in found) is second
    assert (("scatter", "", 0) in found) is (first and cls is not Counted)  # where the token beside is as often
    result = emulate_module(seeded(cls), INPUTS, plan, sequence_parallel=True)
    assert result.equal, result.verdict()


def compared(mesh: Mesh, cls, inputs, plan: str) -> bool:
    result = compare_on_rank(seeded(cls), inputs, Plan.loads(plan), mesh, sequence_parallel=True)
    return result is None or result.equal


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize(("tp", "pictures"), [(2, 4), (2, 3), (4, 2)])
def test_they_are_equal_on_ranks(run_ranks, cls, tp, pictures):
    inputs = {"x": INPUTS["x"][:pictures]}
    assert run_ranks(compared, tp, cls, inputs, make_plan(seeded(cls), INPUTS, tp=tp).dumps())[0]


def test_tokens_are_shared_where_they_can_be():
    class Even(Pictures):
        def embedded(self, x: Tensor) -> Tensor:
            return super().embedded(x)[:, 1:]

    slices = make_plan(seeded(Even), INPUTS, tp=2).slices
    assert slices.reason == "" and not slices.sequences and slices.rows
    assert make_plan(seeded(Even), INPUTS, tp=3).slices.sequences
    assert not planned("llama", 2).slices.sequences  # its 13 tokens are an input's, which may have others


def test_tokens_stay_where_no_sequences_can_be_shared():
    """A single picture, say: then a slice has to be of tokens, and the number that ranks cannot share is told."""
    plan = make_plan(seeded(Pictures), {"x": INPUTS["x"][:1]}, tp=2)
    assert plan.slices.reason == "" and not plan.slices.sequences


class Shaded(Pictures):
    """With a shade for all pictures, or one for each."""

    def forward(self, x: Tensor, shade: Tensor) -> Tensor:
        x = self.embedded(x)
        x = F.scaled_dot_product_attention(x, x, x)
        return self.head(self.norm(self.second(self.first(x) + shade))[:, 0])


def shaded(mesh: Mesh, plan: str, pictures: int) -> str:
    module = parallelize(seeded(Shaded), Plan.loads(plan), mesh, sequence_parallel=True)
    module(INPUTS["x"], floats(1, 1, WIDTH))
    try:
        module(INPUTS["x"][:pictures], shade=floats(pictures, 1, WIDTH))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("pictures", [2, 4])
def test_what_was_one_for_all_pictures_cannot_be_one_for_each(run_ranks, pictures):
    """A slice of two has one picture, which would meet both shades."""
    plan = make_plan(seeded(Shaded), {"x": INPUTS["x"], "shade": floats(1, 1, WIDTH)}, tp=2)
    assert plan.slices.sequences and plan.slices.common == ("kwargs.shade",)
    for told in run_ranks(shaded, 2, plan.dumps(), pictures):
        assert f"'kwargs.shade' was one for all sequences and is {pictures} now" in told


class Prompted(Pictures):
    """Compared with prompts of its own, an odd number of them with an odd number of words each."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts, self.third = nn.Parameter(torch.randn(7, 3, WIDTH)), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedded(x)
        x = F.scaled_dot_product_attention(x, x, x)
        x = self.second(self.first(x)).mean(1)
        t = self.prompts + F.scaled_dot_product_attention(self.prompts, self.prompts, self.prompts)
        return x @ self.third(t).mean(1).T


class Placed(Pictures):
    """Places are given, as many as there are tokens, and stand beside those of a parameter."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = self.embedded(x) + places
        x = F.scaled_dot_product_attention(x, x, x)
        return self.head(self.norm(self.second(self.first(x)))[:, 0])


@pytest.mark.parametrize(
    ("cls", "given"), [(Prompted, {}), *((Placed, {"places": floats(*s, WIDTH)}) for s in ((5,), (1, 5), (4, 5)))]
)
def test_sequences_are_those_that_a_model_is_called_with(run_ranks, cls, given):
    inputs = INPUTS | given
    plan = make_plan(seeded(cls), inputs, tp=2)
    found = {(b.kind, b.module) for b in sliced_form(plan).boundaries}
    assert plan.slices.sequences and ("reduce_scatter", "second.down") in found
    assert ("reduce_scatter", "third.down") not in found
    assert emulate_module(seeded(cls), inputs, plan, sequence_parallel=True).equal
    assert run_ranks(compared, 2, cls, inputs, plan.dumps())[0]


def odd_batch(mesh: Mesh, plan: str) -> str:
    module = parallelize(seeded(Pictures), Plan.loads(plan), mesh, sequence_parallel=True)
    try:
        module(INPUTS["x"][:3])
    except PlanError as error:
        return str(error)
    return ""


def test_a_batch_that_cannot_be_shared_is_told(run_ranks):
    every = run_ranks(odd_batch, 2, make_plan(seeded(Pictures), INPUTS, tp=2).dumps())
    assert all("A batch of 3 cannot be shared equally by 2 ranks (3 % 2 is 1)" in text for text in every)
    assert all("Use a multiple of 2" in text for text in every)


def test_a_plan_that_says_so_of_other_slices_is_refused():
    plan = make_plan(seeded(Pictures), INPUTS, tp=2)
    other = replace(plan, slices=replace(plan.slices, sequences=False))
    assert not emulate_module(seeded(Pictures), INPUTS, other, sequence_parallel=True).equal
    module, inputs = built("llama")
    told = planned("llama", 2)
    other = replace(told, slices=replace(told.slices, sequences=True))
    assert not emulate_module(module, inputs, other, sequence_parallel=True).equal


def test_a_plan_and_its_report_keep_it():
    plan = make_plan(seeded(Pictures), INPUTS, tp=2)
    assert Plan.loads(plan.dumps()).slices.sequences and sliced_form(plan).slices.sequences
    assert "whole sequences" in plan_text(plan_report(plan))


# -- the bias of a sum ------------------------------------------------------------------------------------------------


class Rows(TorchDispatchMode):
    """How many rows each sum over rows has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.sum.dim_IntList and args[0].dim() > 1 and args[0].shape[-1] == WIDTH:
            self.found.append(args[0].numel() // WIDTH)
        return func(*args, **(kwargs or {}))


def summed_rows(mesh: Mesh, plan: str) -> tuple[list[int], bool]:
    whole = seeded(Pictures).double()
    x = INPUTS["x"].double()
    whole(x).square().sum().backward()
    module = parallelize(seeded(Pictures).double(), Plan.loads(plan), mesh, sequence_parallel=True)
    loss = module(x).square().sum()
    with Rows() as rows:
        loss.backward()
    ours, theirs = (dict(m.named_parameters()) for m in (module, whole))
    names = ("first.down.bias", "second.down.bias")
    same = [torch.allclose(ours[name].grad, theirs[name].grad, rtol=1e-10, atol=1e-12) for name in names]
    return rows.found, all(same)


def test_the_gradient_of_a_bias_after_a_sum_is_of_the_rows_that_a_rank_has(run_ranks):
    """Two of four pictures, of five tokens; gathered, every rank would sum all 20 rows."""
    plan = make_plan(seeded(Pictures), INPUTS, tp=2)
    for rows, same in run_ranks(summed_rows, 2, plan.dumps()):
        assert same and 20 not in rows and rows.count(10) >= 2


def test_a_copied_and_a_pickled_module_keep_how_they_share():
    plan = make_plan(seeded(Pictures), INPUTS, tp=2)
    module = parallelize(seeded(Pictures), plan, dry_mesh(0, 2, device="cpu"), sequence_parallel=True)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.first.down.tp_shares is not None
        assert other(INPUTS["x"]).shape == module(INPUTS["x"]).shape
