"""Small modules with known answers: which collectives stand where, and which gradients are summed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import hf_models
from tests.models import MODELS
from tests.zoo.frame import Built, Framed, floats, seeded
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import emulate_module


def places(plan: Plan, kind: str) -> list[tuple[str, str]]:
    """``(module, side)`` of each boundary of a kind."""
    return [(b.module, b.side) for b in plan.boundaries if b.kind == kind]


def marked(plan: Plan, mark: str) -> set[str]:
    """The parameters with a mark."""
    return {v.name for v in plan.verdicts if getattr(v, mark)}


def cut(plan: Plan) -> set[str]:
    """The parameters that are cut."""
    return {v.name for v in plan.verdicts if v.layout.cut}


def planned(built: Built, tp: int = 2, **options: object) -> Plan:
    """The plan of a module, after it was found equal in lockstep."""
    module, inputs = built
    plan = make_plan(module, inputs, tp=tp, **options)
    result = emulate_module(module, inputs, plan)
    assert result.equal, result.verdict()
    return plan


def core(make, *args: object, width: int = 22, tp: int = 2, **options: object) -> Plan:
    """The plan of a core inside a frame."""
    module = seeded(lambda: Framed(make(width, *args), width))
    return planned((module, {"x": floats(3, 7, width)}), tp, **options)


# -- copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", "gqa_sdpa", "rotary", "gated_mlp"])
def test_all_layers_that_read_one_value_share_one_copy_of_it(name: str) -> None:
    plan = planned(MODELS[name]())
    assert [p for p in places(plan, "copy") if not p[0].startswith("head")] == [("core", "input")]


def test_attention_and_mlp_side_by_side_share_one_copy() -> None:
    plan = planned(MODELS["parallel_block"]())
    copies = [p for p in places(plan, "copy") if p[0] != "head"]
    assert copies == [("core.0.norm", "output"), ("core.1.norm", "output")]


def test_the_gradient_of_a_router_is_summed_where_it_is_read_and_its_input_copied_once() -> None:
    plan = planned(MODELS["topk_moe"]())
    assert marked(plan, "sum_grad") == {"core.router.weight"}
    assert [p for p in places(plan, "copy") if not p[0].startswith("head")] == [("core", "input")]


def test_weighted_experts_are_summed_once_after_they_are_added_up() -> None:
    plan = planned(MODELS["topk_moe"]())
    assert places(plan, "reduce") == [("core", "output")]


def test_only_the_part_of_an_output_that_enters_the_region_is_copied() -> None:
    plan = planned(MODELS["latent_attention"]())
    (part,) = [b for b in plan.boundaries if b.span is not None]
    assert (part.kind, part.module, part.side, part.dim, part.span) == ("copy", "core.kv_a", "output", 2, (16, 20))


def test_a_value_that_also_stays_outside_is_copied_where_it_enters() -> None:
    plan = planned(MODELS["residuals"]())
    assert [p for p in places(plan, "copy") if p[0] != "head"] == [("core.a", "input"), ("core.b", "input")]


class Encoded(nn.Module):
    """An encoder whose output is read by a decoder and returned as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.up, self.down = nn.Linear(22, 22), nn.Linear(22, 84), nn.Linear(84, 22)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.encode(x).tanh()
        return self.down(self.up(memory).relu()), memory


def test_a_value_that_is_returned_too_is_copied_only_on_its_way_in() -> None:
    plan = planned((seeded(Encoded), {"x": floats(3, 22)}), overrides=["encode=whole"])
    assert places(plan, "copy") == [("up", "input")]
    assert places(plan, "gather") == []


# -- whole parameters in a cut region ------------------------------------------------------------------------------


def test_norm_weights_on_cut_heads_have_their_gradient_summed() -> None:
    assert marked(planned(MODELS["head_norms"]()), "sum_grad") == {"core.q_norm.weight", "core.k_norm.weight"}


def test_key_heads_shared_by_ranks_have_their_gradient_summed() -> None:
    assert marked(planned(MODELS["gqa_few"](), 2), "sum_grad") == set()
    shared = {f"core.{n}.{p}" for n in "kv" for p in ("weight", "bias")}
    assert marked(planned(MODELS["gqa_few"](), 4), "sum_grad") == shared


def test_a_single_key_head_stays_whole_and_its_output_is_copied() -> None:
    plan = planned(MODELS["mqa"]())
    assert {"core.k.weight", "core.v.weight"}.isdisjoint(cut(plan))
    assert {("core.k", "output"), ("core.v", "output")} <= set(places(plan, "copy"))


# -- sums ----------------------------------------------------------------------------------------------------------


def test_the_bias_of_a_summed_layer_counts_once() -> None:
    plan = planned(MODELS["gated_mlp_bias"]())
    assert marked(plan, "once") == {"core.down.bias"}
    assert places(plan, "reduce") == [("core.down", "output")]


class Branches(nn.Module):
    """Two row-parallel branches that are only added and scaled before anything bends them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 84), nn.Linear(width, 28)
        self.out_a, self.out_b = nn.Linear(84, width, bias=False), nn.Linear(28, width)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.out_a(self.a(x).relu()) + self.out_b(self.b(x).tanh()))


def test_sums_that_only_linear_ops_separate_are_sent_once() -> None:
    plan = core(Branches)
    assert places(plan, "reduce") == [("core", "output")]
    assert marked(plan, "once") == {"core.out_b.bias"}


class Reused(nn.Module):
    """A pending sum that a linear op reads first and a bent one afterwards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 84), nn.Linear(84, width, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).relu())
        return y * self.scale + F.gelu(y)


def test_a_sum_read_by_a_linear_op_before_a_bent_one_is_sent_once() -> None:
    assert places(core(Reused), "reduce") == [("core.down", "output")]


class SumTimesCut(nn.Module):
    """A pending sum that scales a cut value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.score = nn.Linear(width, 84), nn.Linear(84, 1, bias=False)
        self.wide, self.down = nn.Linear(width, 28), nn.Linear(28, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.score(self.up(x).relu()) * self.wide(x))


def test_a_sum_is_complete_before_it_scales_a_cut_value() -> None:
    plan = core(SumTimesCut)
    assert {"core.up.weight", "core.wide.weight"} <= cut(plan)
    assert ("core.score", "output") in places(plan, "reduce")


class Filled(nn.Module):
    """A pending sum of which some entries are overwritten by a number that is not zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 84), nn.Linear(84, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.down(self.up(x).relu())[..., :-3].masked_fill(x[..., :-3] > 0, -2.0), (1, 2), value=0.5)


def test_a_number_written_into_a_sum_counts_once() -> None:
    plan = core(Filled)
    assert "core.up.weight" in cut(plan)
    assert places(plan, "reduce") == [("core.down", "output")]


# -- whole beside cut ----------------------------------------------------------------------------------------------


class Beside(nn.Module):
    """A cut and a whole value joined, returned, and taken apart again."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.a, self.b, self.down = nn.Linear(22, 84), nn.Linear(22, 6), nn.Linear(84, 22)
        self.again = again

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        both = torch.cat([self.a(x), self.b(x)], -1)
        if not self.again:
            return (both,)
        wide, narrow = both.split([84, 6], -1)
        return (self.down(wide.relu() * narrow.sum(-1, keepdim=True)),)


@pytest.mark.parametrize("again", [False, True], ids=["returned", "taken apart"])
def test_a_whole_value_joined_to_a_cut_one_keeps_its_gradient(again: bool) -> None:
    plan = planned((seeded(Beside, again), {"x": floats(3, 22)}), overrides=["b=whole"])
    assert {"a.weight", "a.bias"} <= cut(plan)
    assert marked(plan, "sum_grad") == set()


# -- gathers -------------------------------------------------------------------------------------------------------


def test_logits_are_gathered_at_the_head() -> None:
    plan = planned(hf_models.build("llama"))
    assert places(plan, "gather") == [("lm_head", "output")]
    (gather,) = [b for b in plan.boundaries if b.kind == "gather"]
    assert (gather.dim, gather.shape) == (2, (2, 13, 108))
    assert plan["lm_head.weight"].pattern in ("vocabulary", "head")


def test_a_tied_head_is_cut_as_its_table_is() -> None:
    plan = planned(hf_models.build("llama_tied_bias"))
    assert plan["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert plan["lm_head.weight"].layout == plan["model.embed_tokens.weight"].layout
    assert ("model.embed_tokens", "output") in places(plan, "reduce")


def test_a_module_called_twice_has_its_boundaries_at_every_call() -> None:
    plan = planned(MODELS["called_twice"]())
    assert {b.call for b in plan.boundaries} == {-1}
