"""Which slices can be rows of all sequences: where nothing tells sequences apart, and else not."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.analyze.test_slicing import Block
from tests.ranks import RankFailedError
from tests.verify.frame import built, planned
from tests.zoo.frame import floats, seeded, words
from tpconvert.errors import PlanError, VerifyError
from tpconvert.parallel import Mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.spec.sliced import sliced_form
from tpconvert.verify import compare_on_rank, emulate_module

WIDTH = 22


class Modulation(nn.Module):
    """What all tokens of a sequence are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, WIDTH)

    def forward(self, each: Tensor) -> Tensor:
        return self.linear(each)[:, None]


class Two(nn.Module):
    """Tokens are mixed, then two blocks, and between them what the class says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.place, self.each = nn.Embedding(8, WIDTH), Modulation()

    def between(self, x: Tensor, each: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, each: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(x, x, x)
        return self.second(self.between(self.first(x), each))


class Halved(Two):
    """By the number of sequences, which is the same for all."""

    def between(self, x: Tensor, each: Tensor) -> Tensor:
        return x / len(x)


class Placed(Two):
    """What is added hangs on the token and not on the sequence."""

    def between(self, x: Tensor, each: Tensor) -> Tensor:
        return x + self.place(torch.arange(8))


class Modulated(Two):
    """What is multiplied by hangs on the sequence and not on the token, as a picture's class does."""

    def between(self, x: Tensor, each: Tensor) -> Tensor:
        return x * self.each(each)


class Centred(Two):
    """The mean of all sequences."""

    def between(self, x: Tensor, each: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Shifted(Two):
    """A sequence takes the next one's."""

    def between(self, x: Tensor, each: Tensor) -> Tensor:
        return x + x.roll(1, 0)


class Turned(Two):
    """Tokens come first, so that a slice of them is one run in any case."""

    def forward(self, x: Tensor, each: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(x, x, x).transpose(0, 1)
        return self.second(self.first(x))


class Spread(Two):
    """To all tokens of all sequences the same is added, as many times as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Parameter(torch.randn(WIDTH))

    def between(self, x: Tensor, each: Tensor) -> Tensor:
        return x + self.same.expand(x.shape[0], x.shape[1], -1)


class FirstToken(Two):
    """The first token of each sequence is another, as one that stands for a class."""

    def between(self, x: Tensor, each: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 1.0
        return x


class TurnedBetween(Two):
    """Tokens come first in one block and second in the other."""

    def between(self, x: Tensor, each: Tensor) -> Tensor:
        return x.transpose(0, 1).tanh()


INPUTS = {"x": floats(3, 8, WIDTH), "each": floats(3, 4)}


def planned_of(cls) -> Plan:
    return make_plan(seeded(cls), INPUTS, tp=2)


@pytest.mark.parametrize(
    ("cls", "rows"),
    [
        (Two, True), (Halved, True), (Turned, True), (Placed, False), (Modulated, False), (Centred, False),
        (Shifted, False), (TurnedBetween, False), (Spread, True),
    ],
)  # fmt: skip
def test_slices_are_of_rows_where_nothing_between_regions_tells_sequences_apart(cls, rows):
    plan = planned_of(cls)
    assert plan.slices.reason == "" and plan.slices.rows is rows
    result = emulate_module(seeded(cls), INPUTS, plan, sequence_parallel=True)
    assert result.equal, result.verdict()


def test_what_is_written_to_one_token_is_written_to_whole_values(run_ranks):
    plan = planned_of(FirstToken)
    assert ("scatter", "second") in {(b.kind, b.module) for b in sliced_form(plan).boundaries}
    assert run_ranks(compared, 2, FirstToken, plan.dumps())[0]


def test_what_is_the_same_for_all_tokens_is_made_for_as_many_as_a_slice_has():
    plan = planned_of(Spread)
    assert [v.on_slices for v in plan.verdicts if v.name == "same"] == [True]
    kinds = {(b.kind, b.module) for b in sliced_form(plan).boundaries}
    assert ("reduce_scatter", "first.down") in kinds and ("scatter", "second") not in kinds


def compared(mesh: Mesh, cls, plan: str) -> bool:
    result = compare_on_rank(seeded(cls), INPUTS, Plan.loads(plan), mesh, sequence_parallel=True)
    return result is None or result.equal


ALL = [Two, Halved, Turned, Placed, Modulated, Centred, Shifted, TurnedBetween, Spread]


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("tp", [2, 4])
def test_they_are_equal_on_ranks(run_ranks, cls, tp):
    assert run_ranks(compared, tp, cls, make_plan(seeded(cls), INPUTS, tp=tp).dumps())[0]


@pytest.mark.parametrize("cls", [Placed, Modulated, Centred, Shifted])
def test_slices_that_cannot_be_of_rows_are_found_if_a_plan_says_so(run_ranks, cls):
    plan = planned_of(cls)
    wrong = replace(plan, slices=replace(plan.slices, rows=True))
    if cls is Placed:  # which need not come so far as to be compared
        with pytest.raises(RankFailedError, match="3 sequences meet a value that is for all of them"):
            run_ranks(compared, 2, cls, wrong.dumps())
    else:
        assert not run_ranks(compared, 2, cls, wrong.dumps())[0]
    with pytest.raises(VerifyError, match="slices of rows, which cannot be: the model: "):
        emulate_module(seeded(cls), INPUTS, wrong, sequence_parallel=True)


def test_one_sequence_tells_nothing_of_several():
    one = {"x": INPUTS["x"][:1], "each": INPUTS["each"][:1]}
    assert not make_plan(seeded(Two), one, tp=2).slices.rows
    plan = planned_of(Two)
    assert emulate_module(seeded(Two), one, plan, sequence_parallel=True).equal


def test_a_module_that_adds_positions_sees_no_slices_if_sums_of_lookups_alone_are_whole_for_it():
    plan = planned("bert", 2)
    assert plan.slices.rows and plan.slices.whole == ("embeddings",)
    kinds = {(b.kind, b.module) for b in sliced_form(plan).boundaries}
    assert ("reduce", "embeddings.word_embeddings") in kinds
    assert ("reduce_scatter", "encoder.layer.0.attention.output.dense") in kinds


@pytest.mark.parametrize(("name", "rows"), [*((n, True) for n in ("llama", "gpt2", "vit", "t5")), ("nanogpt", False)])
def test_slices_of_usual_models_are_of_rows(name, rows):
    plan = planned(name, 2)  # nanogpt adds positions to slices of words in the forward that every layer is called in
    assert plan.slices.rows is rows and plan.slices.whole == ()


def test_a_plan_keeps_it():
    plan = planned("llama", 2)
    assert Plan.loads(plan.dumps()).slices.rows and sliced_form(plan).slices.rows
    module, inputs = built("llama")
    assert emulate_module(module, inputs, plan, sequence_parallel=True).equal


# -- other calls ------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Blocks on words, with places that each sequence may have of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, WIDTH), nn.Embedding(8, WIDTH)
        self.first, self.second = Block(), Block()

    def forward(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        if places is None:
            places = torch.arange(ids.shape[1])[None]
        x = self.words(ids)
        x = F.scaled_dot_product_attention(x, x, x)
        return self.second(self.first(x) + self.places(places))


class Masked(Words):
    """What is multiplied by hangs on the sequence, if there is a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.each = Modulation()

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        x = self.first(F.scaled_dot_product_attention(x, x, x))
        if attention_mask is not None:
            x = x * self.each(attention_mask[:, :4].to(x.dtype))
        return self.second(x)


IDS = words(3, 8, vocab=30)
OWN = torch.arange(8).repeat(3, 1)


def called_otherwise(mesh: Mesh, plan: str) -> str:
    """What a model says that was planned with places of each sequence, and is given none."""
    local = parallelize(seeded(Words), Plan.loads(plan), mesh, sequence_parallel=True)
    whole = seeded(Words)
    torch.testing.assert_close(local(IDS, OWN), whole(IDS, OWN))
    torch.testing.assert_close(local(IDS[:1]), whole(IDS[:1]))
    torch.testing.assert_close(local(IDS[:, :4], OWN[:, :4]), whole(IDS[:, :4], OWN[:, :4]))
    try:
        local(IDS)
    except PlanError as error:
        return error.message
    return ""


def test_a_value_for_all_sequences_is_refused_where_it_was_planned_as_each_ones_own(run_ranks):
    plan = make_plan(seeded(Words), {"ids": IDS, "places": OWN}, tp=2)
    assert plan.slices.rows
    for said in run_ranks(called_otherwise, 2, plan.dumps()):
        assert said.startswith("places: 3 sequences meet a value that is for all of them ([1, 8, 22])")
    assert not make_plan(seeded(Words), {"ids": IDS}, tp=2).slices.rows


def test_slices_are_not_of_rows_if_a_call_with_a_mask_tells_sequences_apart():
    assert make_plan(seeded(Words), {"ids": IDS, "places": OWN}, tp=2).slices.rows
    plan = make_plan(seeded(Masked), {"ids": IDS}, tp=2)
    assert plan.slices.reason == "" and not plan.slices.rows
