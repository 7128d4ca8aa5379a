"""Plans are made for one call and held to others: with a mask or places, which take a forward another way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import hf_models
from tests.analyze.test_flow import cut
from tests.zoo.frame import seeded, words
from tpconvert.errors import PlanError, VerifyError
from tpconvert.parallel import Mesh, dry_mesh, parallelize
from tpconvert.planning import make_plan
from tpconvert.planning.calls.ways import ids_of, packed, padded, restarting, ways
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank, emulate_module

HEADS, KEYS, HEAD = 12, 3, 5


class Attention(nn.Module):
    """12 heads that read 3 keys; a mask makes it repeat the keys itself."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = HEADS // KEYS
        self.q, self.o = nn.Linear(22, HEADS * HEAD), nn.Linear(HEADS * HEAD, 22)
        self.k, self.v = nn.Linear(22, KEYS * HEAD), nn.Linear(22, KEYS * HEAD)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, -1, HEAD).transpose(1, 2) for p in (self.q, self.k, self.v))
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (z[:, :, None].expand(-1, -1, self.groups, -1, -1).flatten(1, 2) for z in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, mask[:, None, None].bool())
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class Literal(Attention):
    """The number of heads stands in the code, in two places of which each call comes to one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 12, HEAD).transpose(1, 2)
        if mask is None:
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            return self.o(y.transpose(1, 2).reshape(b, t, 60))
        scores = (q @ q.transpose(-1, -2)).masked_fill(mask[:, None, None] == 0, -1e4).softmax(-1)
        return self.o((scores @ q).permute(0, 2, 1, 3).reshape(b, t, 60))


class Mlp(nn.Module):
    """A mask makes it normalise its whole width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(22, 84), nn.Linear(84, 22)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h if mask is None else F.normalize(h * mask[..., None], dim=-1))


class Hiding(nn.Module):
    """A mask is multiplied with what comes in, before two layers read it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(22, 84), nn.Linear(22, 84), nn.Linear(84, 22)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = (x * mask[..., None]).to(x.dtype)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Repeating(nn.Module):
    """A part that runs once more with a mask, as an expert does for as many tokens as come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(22, 84), nn.GELU(), nn.Linear(84, 22))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for _ in range(2 if mask is None else 3):
            x = x + self.part(x)
        return x


class Refusing(Mlp):
    """No padding at the left, nor at the right."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and not bool(mask.all()):
            raise ValueError("padding is not for this model")
        return super().forward(x)


class Lm(nn.Module):
    """Words, a core that is given the mask, and a head."""

    def __init__(self, core: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm, self.core = nn.Embedding(60, 22), nn.LayerNorm(22), core()
        self.head = nn.Linear(22, 10)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        return self.head(x + self.core(self.norm(x), attention_mask))


def lm(core: type[nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    return seeded(lambda: Lm(core)), {"input_ids": words(3, 7)}


def planned(core: type[nn.Module], tp: int = 2) -> Plan:
    return make_plan(*lm(core), tp=tp)


def proved(mesh: Mesh, core: type[nn.Module], plan: str) -> tuple[str, set[tuple[str, str]], tuple[str, ...]] | str:
    """What differs, nothing where all is equal; what was compared; and what was not."""
    try:
        result = compare_on_rank(*lm(core), Plan.loads(plan), mesh)
    except VerifyError as error:
        return error.message
    if result is None:
        return ""
    return "" if result.equal else result.verdict(), {(c.kind, c.mode) for c in result.checks}, result.notes


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("core", [Attention, Literal])
def test_a_call_with_a_mask_is_as_equal_as_one_without(run_ranks, core, tp: int) -> None:
    plan = planned(core, tp)
    assert cut(plan) >= {"core.q.weight", "core.o.weight"}
    differs, compared, notes = run_ranks(proved, tp, core, plan.dumps(), timeout=120)[0]
    assert differs == "" and notes == ()
    assert compared >= {("output", "with attention_mask"), ("gradient", "with attention_mask")}
    assert ("output", "with attention_mask of four dims") not in compared  # which the cores cannot take


def test_an_attribute_that_only_the_other_path_reads_is_edited() -> None:
    plan = planned(Attention, 4)
    assert [(e.module, e.attribute, e.value) for e in plan.edits] == [("core", "groups", 4)]
    assert not plan.rewrites and not plan.notes


def test_a_forward_that_is_written_anew_is_written_for_each_call() -> None:
    module, inputs = lm(Literal)
    plan = make_plan(module, inputs, tp=2)
    assert [(r.module, r.signature["args.1"]) for r in plan.rewrites] == [
        ("core", {"const": None}),
        ("core", "tensor"),
    ]
    assert Plan.loads(plan.dumps()) == plan
    local = parallelize(module, plan, dry_mesh(0, 2, device="cpu"))
    x = torch.randn(3, 7, 22)
    assert not torch.equal(local.core(x, None), local.core(x, torch.ones(3, 7)))
    with pytest.raises(PlanError, match="core: its forward was regenerated for calls where mask is None; here it is 7"):
        local.core(x, 7)


def test_gradients_are_summed_where_a_forward_begins_though_it_hides_padding_first(run_ranks) -> None:
    plan = planned(Hiding)
    assert {v.layout.dim for v in plan.verdicts if v.name in ("core.up.weight", "core.gate.weight")} == {0}
    (copy,) = (b for b in plan.boundaries if b.kind == "copy" and b.module.startswith("core"))
    assert (copy.module, copy.side) == ("core", "input")
    differs, compared, notes = run_ranks(proved, 2, Hiding, plan.dumps(), timeout=120)[0]
    assert differs == "" and notes == () and ("gradient", "with attention_mask") in compared


def test_how_often_a_part_is_called_makes_no_other_plan(run_ranks) -> None:
    plan = planned(Repeating)
    assert cut(plan) >= {"core.part.0.weight", "core.part.2.weight"}
    differs, compared, notes = run_ranks(proved, 2, Repeating, plan.dumps(), timeout=120)[0]
    assert differs == "" and notes == () and ("gradient", "with attention_mask") in compared


def test_what_the_other_path_needs_whole_stays_whole_with_the_reason(run_ranks) -> None:
    plan = planned(Mlp)
    assert "core.up.weight" not in cut(plan)
    assert "core takes another path with attention_mask, where this does not hold: " in plan["core.up.weight"].reason
    differs, compared, _ = run_ranks(proved, 2, Mlp, plan.dumps(), timeout=120)[0]
    assert differs == "" and ("gradient", "with attention_mask") in compared


def test_a_call_that_the_model_does_not_take_is_noted_and_nothing_given_up(run_ranks) -> None:
    plan = planned(Refusing)
    assert cut(plan) >= {"core.up.weight", "core.down.weight"}
    assert len(plan.notes) == 1 and "not planned with attention_mask: " in plan.notes[0]
    assert "padding is not for this model" in plan.notes[0]
    differs, compared, notes = run_ranks(proved, 2, Refusing, plan.dumps(), timeout=120)[0]
    assert differs == "" and not any("attention_mask" in mode for _, mode in compared)
    assert "A call with attention_mask was not tried: the model does not run so (" in notes[0]


def test_verification_finds_what_only_a_call_with_a_mask_needs(run_ranks) -> None:
    plan = planned(Attention, 4)
    wrong = replace(plan, edits=())
    assert emulate_module(*lm(Attention), plan).equal
    assert not emulate_module(*lm(Attention), wrong).equal
    assert "fails where the whole one runs" in str(run_ranks(proved, 4, Attention, wrong.dumps(), timeout=120)[0])


def test_a_rank_that_repeats_its_keys_once_needs_nothing_written_anew() -> None:
    """4 heads a key on 3 ranks: one of them has 1, and leaves the repetition out."""
    plan = make_plan(*hf_models.build("llama_few"), tp=3)
    assert {e.attribute for e in plan.edits} == {"num_key_value_groups"} and not plan.rewrites


def test_a_plan_for_a_call_with_a_mask_is_held_to_one_without() -> None:
    module, inputs = lm(Attention)
    masked = inputs | {"attention_mask": padded(inputs["input_ids"])}
    assert [way.name for way in ways(module, masked)] == ["without attention_mask"]
    plan = make_plan(module, masked, tp=4)
    result = emulate_module(module, masked, plan)
    assert result.equal, result.verdict()
    assert any(c.mode == "without attention_mask" and c.kind == "op" for c in result.checks)


class Placed(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None) -> Tensor:
        return input_ids


def test_other_calls_are_made_of_the_arguments_that_a_forward_has() -> None:
    ids = words(2, 7)
    assert [way.name for way in ways(Placed(), (ids,))] == [
        "with attention_mask and position_ids", "with attention_mask", "with attention_mask", "with position_ids",
    ]  # fmt: skip
    assert [way.name for way in packed(Placed(), (ids,))] == ["with position_ids", "with attention_mask of four dims"]
    assert not list(ways(nn.Linear(2, 2), {"input": torch.ones(2, 2)})) and not list(ways(nn.Embedding(9, 2), (ids,)))
    assert padded(ids).tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]
    assert padded(ids, left=False).tolist() == [[1, 1, 1, 1, 1, 0, 0]] * 2
    assert restarting(ids).tolist() == [[0, 1, 2, 3, 0, 1, 2]] * 2
    seen = list(packed(Placed(), (ids,)))[1].inputs["attention_mask"]
    assert seen.shape == (2, 1, 7, 7) and seen[0, 0, 6].tolist() == [False] * 4 + [True] * 3
    assert ids_of({"attention_mask": torch.ones(2, 7), "types": words(2, 5), "input_ids": ids}) is ids
