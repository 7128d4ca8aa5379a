"""Which values are slices, where slices are made and put together, and why some models have none."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.verify.frame import built, planned
from tests.zoo.frame import floats, seeded
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan, Slices
from tpconvert.spec.sliced import sliced_form, with_sliced_form
from tpconvert.verify import emulate_module


def places(plan: Plan) -> list[tuple[str, str, str, int | None]]:
    return [(b.kind, b.module, b.side, b.dim) for b in sliced_form(plan).boundaries]


def test_a_llama_has_a_reduce_scatter_for_each_layers_reduce_and_an_all_gather_for_each_copy():
    plan = planned("llama", 2)
    layers = [f"model.layers.{i}" for i in (0, 1)]
    assert sorted(places(plan)) == sorted([
        ("reduce", "model.embed_tokens", "output", None),  # for the model asks how many tokens there are
        ("scatter", "model.layers.0", "input", 1),
        *(("reduce_scatter", f"{at}.self_attn.o_proj", "output", 1) for at in layers),
        *(("reduce_scatter", f"{at}.mlp.down_proj", "output", 1) for at in layers),
        *(("all_gather", f"{at}.{part}", "input", 1) for at in layers for part in ("self_attn", "mlp")),
        ("all_gather", "lm_head", "input", 1),
        ("gather", "lm_head", "output", 2),
    ])  # fmt: skip
    summed = {v.name for v in plan.verdicts if v.on_slices}
    assert summed == {v.name for v in plan.verdicts if "norm" in v.name}
    assert plan.slices.inputs == (("kwargs.input_ids", 1),)


def test_a_gradient_that_comes_back_whole_to_a_region_is_summed_with_its_terms_in_one_reduce_scatter():
    found = places(planned("mixtral_loop", 2))
    for at in ("model.layers.0.mlp", "model.layers.1.mlp"):
        assert ("all_gather", at, "input", 1) in found and ("single", f"{at}.gate", "input", None) in found
    assert ("all_gather", "transformer.ln_f", "output", 1) in places(planned("gpt2", 2))  # the head is past a view


def test_dropout_of_slices_draws_other_numbers_on_each_rank():
    plan = planned("nanogpt_dropout", 2)
    assert not any(s.module == "transformer.drop" for s in plan.switches)
    assert [s.cut for s in sliced_form(plan).switches if s.module == "transformer.drop"] == [True, False]


def test_the_sliced_form_adds_little_to_a_plan():
    plan = planned("llama", 2)
    without = plan.to_json()
    del without["slices"]
    for item in (*without["verdicts"], *without["boundaries"]):
        for key in ("sliced", "moved", "on_slices"):
            item.pop(key, None)
    assert len(plan.dumps()) < 1.1 * len(Plan.from_json(without).dumps())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("uncuttable", "nothing of it is cut"),
        ("conv_mixer", "batch_norm in norm: statistics over this dim"),
        ("nanogpt_literal", "its forward needs the same value whole elsewhere"),
        ("tuple_output", "mean sums over the tokens"),
    ],
)
def test_why_a_model_has_no_slices_is_in_its_plan(name, why):
    assert why in planned(name, 2).slices.reason


class Block(nn.Module):
    """A residual block whose branch may scale by something."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(22)
        self.up, self.down = nn.Linear(22, 84), nn.Linear(84, 22)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Reads(nn.Module):
    """Two blocks, a mixing of tokens between them, and a use of the number of tokens as the class says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.ones(22))

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Positions(Reads):
    """Positions are counted from the number of tokens of a value that could be sliced."""

    def between(self, x: Tensor) -> Tensor:
        return x + torch.sin(torch.arange(x.shape[1], device=x.device).to(x)[:, None] * self.scale)


class Divides(Reads):
    """The number of tokens is a number to compute with."""

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale / x.shape[1]


class Branches(Reads):
    """Python decides by the number of tokens."""

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale if x.shape[1] > 4 else x


class Reshapes(Reads):
    """A size that is the number of tokens of that very value."""

    def between(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        return (x.view(b, t, 2, 11) * self.scale.view(2, 11)).view(b, t, 22)


class Sum(nn.Module):
    """What others write inline."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Forgets(Reads):
    """The number of tokens becomes one that nobody knows the source of, in a forward that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.sum = nn.Embedding(9, 22), Sum()

    def between(self, x: Tensor) -> Tensor:
        if torch.ones(2, dtype=torch.bool).all():
            x = self.sum(x, self.places(torch.arange(int(str(x.shape[1])))))
        return x


class Conditioned(Reads):
    """A value without tokens, made of the input, scales all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(22, 22)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.condition(x.mean(1, keepdim=True)))


class Shared(Reads):
    """A parameter is used on slices and elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x) * self.scale)
        return y * (self.scale * x.mean(1, keepdim=True)).sum()


@pytest.mark.parametrize("cls", [Reads, Positions, Divides, Branches, Reshapes, Forgets, Conditioned, Shared])
def test_what_is_made_of_the_number_of_tokens_stays_right(cls):
    module = seeded(cls)
    inputs = {"x": floats(3, 7, 22)}
    plan = make_plan(module, inputs, tp=2)
    assert plan.slices.reason == ""
    result = emulate_module(module, inputs, plan, sequence_parallel=True)
    assert result.equal, result.verdict()


def test_a_forward_that_does_not_run_on_slices_sees_none():
    plan = make_plan(seeded(Forgets), {"x": floats(3, 7, 22)}, tp=2)
    assert plan.slices.whole == ("", "sum")  # it fails in sum, for what the model gives it
    assert ("gather", "first", "output", 1) in places(plan)  # else it would count too few places, from 0 on each rank


def test_only_values_whose_number_of_tokens_nobody_else_asks_for_are_slices():
    """Between the blocks everything is sliced, or nothing."""
    inputs = {"x": floats(3, 7, 22)}
    for cls, sliced in ((Reads, True), (Reshapes, True), (Positions, False), (Divides, False), (Branches, False)):
        plan = make_plan(seeded(cls), inputs, tp=2)
        at_second = [b for b in sliced_form(plan).boundaries if b.module == "second" and b.side == "input"]
        assert bool(at_second) is not sliced, cls.__name__


def test_every_rank_in_lockstep_finds_a_slice_that_is_not_in_the_plan():
    module, inputs = built("llama")
    plan = planned("llama", 2)
    form = sliced_form(plan)
    less = with_sliced_form(
        plan,
        Plan(**{f: getattr(form, f) for f in ("tp", "verdicts", "axes", "edits")}, boundaries=form.boundaries[1:]),
        Slices(inputs=plan.slices.inputs),
    )
    result = emulate_module(module, inputs, less, sequence_parallel=True)
    assert not result.equal
