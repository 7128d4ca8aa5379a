"""What a converted model returns only when it is asked to was not looked at when it was planned: a part is told."""

import warnings

import pytest
import torch
from torch import nn

from tests.parallel.test_wire import TOKENS, WORDS, model_of
from tpconvert.parallel import parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

IDS = {"input_ids": torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS}


def called(mesh, plan, calls, options):
    """The warnings of each call, on every rank."""
    model = parallelize(model_of("llama", 2, "eager").double(), Plan.loads(plan), mesh, **options)
    found = []
    for more in calls:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model(**IDS, **{k: IDS["input_ids"] if k == "labels" else v for k, v in more.items()})
        found.append([str(w.message).partition(":")[0] for w in told])
    return found


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=["plain", "slices"])
def test_attention_maps_that_are_a_ranks_heads_are_told_once(run_ranks, options):
    plan = make_plan(model_of("llama", 2, "eager"), IDS, tp=2)
    assert plan.returns == ("logits",)
    calls = [{}, {"labels": True}, {"output_attentions": True}, {"output_attentions": True}]
    wanted = [[], [], ["attentions.*"], []]
    assert run_ranks(called, 2, plan.dumps(), calls, options, timeout=240) == [wanted, wanted]


def test_hidden_states_are_whole_and_not_told(run_ranks):
    plan = make_plan(model_of("llama", 2, "eager"), IDS, tp=2).dumps()
    assert run_ranks(called, 2, plan, [{"output_hidden_states": True}], {}, timeout=240) == [[[]], [[]]]


def test_what_was_planned_comes_back_whole(run_ranks):
    plan = make_plan(model_of("llama", 2, "eager"), IDS | {"output_attentions": True}, tp=2)
    assert plan.returns == ("attentions.*", "logits")
    calls = [{"output_attentions": True}]
    assert run_ranks(called, 2, plan.dumps(), calls, {}, timeout=240) == [[[]], [[]]]


class Asked(nn.Module):
    """Returns what is asked for of a cut region."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, more=None):
        h = self.up(x).relu()
        y = self.down(h)
        kinds = {
            "integers": (h * 100).long(),
            "complex": torch.complex(h, h),
            "empty": y[:0],
            "whole": y * 2,
        }
        return y if more is None else (y, {more: [kinds[more]]})


def told_of(mesh, plan, more):
    model = parallelize(Asked().double(), Plan.loads(plan), mesh)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(torch.ones(3, 4, dtype=torch.float64), more)
    return [str(w.message).partition(":")[0] for w in told]


@pytest.mark.parametrize(("more", "part"), [("integers", True), ("complex", True), ("empty", False), ("whole", False)])
def test_parts_of_any_kind_are_told(run_ranks, more, part):
    plan = make_plan(Asked(), (torch.ones(3, 4),), tp=2)
    assert plan["up.weight"].layout.cut and plan.returns == ("",)
    assert run_ranks(told_of, 2, plan.dumps(), more) == [[f"1.{more}.*"] if part else []] * 2
