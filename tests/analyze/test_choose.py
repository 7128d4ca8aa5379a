"""Which axes are cut, and what the rules and the user have to say about it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import hf_models
from tests.analyze.test_flow import core, cut, planned
from tests.models import MODELS
from tests.zoo.frame import floats, seeded
from tpconvert.analyze.axes.terms import V
from tpconvert.analyze.choice.choose import Candidate, _independent, shares
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan


def axis(plan: Plan, parameter: str) -> tuple[str, int]:
    """``(pattern, units)`` of the axis along which a parameter is cut."""
    (found,) = [a for a in plan.axes if a.name == plan[parameter].axis]
    return found.pattern, found.size


def local(plan: Plan, parameter: str, tp: int) -> list[int]:
    """How much of a parameter's cut dim each rank holds."""
    return [plan[parameter].layout.local_size(rank, tp) for rank in range(tp)]


# -- what is cut ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_heads_are_cut_rather_than_the_width_of_a_head(tp: int) -> None:
    plan = planned(MODELS["attention"](), tp)
    assert axis(plan, "core.q.weight") == ("attention", 12)
    assert axis(plan, "core.o.weight") == ("attention", 12)


def test_seven_units_are_dealt_four_and_three() -> None:
    class Seven(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 7), nn.Linear(7, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu())

    plan = core(Seven)
    assert local(plan, "core.up.weight", 2) == [4, 3]
    assert local(plan, "core.down.weight", 2) == [4, 3]


def test_halves_of_a_fused_weight_are_dealt_each_by_itself() -> None:
    plan = planned(MODELS["fused_gated_mlp_odd"](), 2)
    layout = plan["core.gate_up.weight"].layout
    assert layout.pieces(0, 2) == [(0, 14), (27, 41)]
    assert layout.pieces(1, 2) == [(14, 27), (41, 54)]


@pytest.mark.parametrize(("tp", "heads"), [(2, [1, 1]), (4, [1, 1, 1, 1])])
def test_with_more_ranks_than_key_heads_each_holds_a_whole_one(tp: int, heads: list[int]) -> None:
    plan = planned(MODELS["gqa_few"](), tp)
    assert local(plan, "core.k.weight", tp) == [5 * n for n in heads]
    queries = [i for r in range(tp) for a, b in plan["core.q.weight"].layout.pieces(r, tp) for i in range(a, b)]
    assert queries == list(range(plan["core.q.weight"].shape[0]))


def test_a_degree_that_key_heads_cannot_share_leaves_them_whole_with_the_numbers() -> None:
    plan = planned(MODELS["gqa_few"](), 3)
    assert not {"core.k.weight", "core.v.weight"} & cut(plan)
    assert "its 2 units cannot be dealt to 3 ranks" in plan["core.k.weight"].reason


def test_vocabularies_are_cut_and_position_tables_are_whole() -> None:
    plan = planned(hf_models.build("gpt2"))
    assert plan["transformer.wte.weight"].pattern == "vocabulary"
    assert not plan["transformer.wpe.weight"].layout.cut
    assert "the rules leave positions whole" in plan["transformer.wpe.weight"].reason


def test_a_norm_over_the_cut_width_keeps_it_whole_and_says_where() -> None:
    plan = planned(MODELS["width_norm"]())
    assert not {"core.q.weight", "core.k.weight"} & cut(plan)
    assert "takes its statistics over this dim (in core.q_norm)" in plan["core.q.weight"].reason


def test_what_the_forward_does_not_use_is_whole() -> None:
    class Spare(nn.Linear):
        def __init__(self, width: int) -> None:
            super().__init__(width, width)
            self.spare = nn.Linear(3, 5)

    plan = core(Spare)
    assert plan["core.spare.weight"].reason == "whole: the traced forward does not use it"


def test_an_expert_that_gets_no_token_is_cut_as_its_siblings_are() -> None:
    plan = make_plan(*MODELS["topk_moe_idle"](), tp=2)
    idle = [v for v in plan.verdicts if "its sibling" in v.reason]
    assert idle
    for v in idle:
        role = v.name.split(".", 3)[-1]
        assert {w.layout for w in plan.verdicts if w.name.startswith("core.experts.") and w.name.endswith(role)} == {
            v.layout
        }


class TwoConflicts(nn.Module):
    """A value that enters and leaves the region at once, beside a plain mlp."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.good, self.back = nn.Linear(width, 84), nn.Linear(84, width)
        self.bad, self.down = nn.Linear(width, 28), nn.Linear(28, width)
        self.bias = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.back(self.good(x).relu())
        y = F.linear(self.bad(x).relu(), self.down.weight, self.bias)
        return F.gelu(y) + self.bias


def test_a_conflict_gives_up_only_the_axes_it_is_about() -> None:
    plan = core(TwoConflicts)
    assert {"core.good.weight", "core.back.weight"} <= cut(plan)
    assert not {"core.bad.weight", "core.down.weight"} & cut(plan)
    assert "whole value" in plan["core.down.weight"].reason or "added to a partial" in plan["core.down.weight"].reason


# -- policy and overrides ------------------------------------------------------------------------------------------


def with_rules(tmp_path: Path, text: str, name: str, tp: int) -> Plan:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return make_plan(*MODELS[name](), tp=tp, rules=[path])


class Stream(nn.Module):
    """A wide stream through two narrow blocks, which is returned and read by a head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(22, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 12), nn.GELU(), nn.Linear(12, 64)) for _ in range(2))
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x * x.square().mean(-1, keepdim=True).rsqrt())
        return x, self.head(x)


def test_what_an_axis_excluded_is_cut_once_that_axis_is_given_up() -> None:
    plan = planned((seeded(Stream), {"x": floats(3, 7, 22)}))
    assert "reaches the model's output" in plan["enter.weight"].reason
    assert cut(plan) >= {f"blocks.{i}.{j}.weight" for i in (0, 1) for j in (0, 2)}
    assert axis(plan, "blocks.0.0.weight")[1] == 12


class Branches(nn.Module):
    """Four narrow branches side by side in each block: their sums are one sum; the width would be summed in each."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(64, 18, bias=False) for _ in range(4))
            self.down = nn.ModuleList(nn.Linear(18, 64, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return sum(down(F.gelu(up(x))) for up, down in zip(self.up, self.down, strict=True))  # type: ignore[return-value]

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(22, 64), nn.Linear(64, 22)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x * x.square().mean(-1, keepdim=True).rsqrt())
        return self.leave(x)


def test_axes_whose_sums_are_one_are_weighed_together() -> None:
    plan = planned((seeded(Branches), {"x": floats(3, 7, 22)}))
    assert {axis(plan, f"blocks.{i}.up.{j}.weight")[1] for i in range(3) for j in range(4)} == {18}
    assert sum(b.kind == "reduce" for b in plan.boundaries) == 3


def test_a_rules_file_can_forbid_a_pattern(tmp_path: Path) -> None:
    text = '[[pattern]]\nname = "mine"\nfeatures = ["row", "columns", "gate"]\ncut = false\n'
    plan = with_rules(tmp_path, text, "gated_mlp", 2)
    assert not any(n.startswith("core") for n in cut(plan))
    assert "the rules leave mine whole" in plan["core.gate.weight"].reason
    assert "head.weight" in cut(plan)


@pytest.mark.parametrize(("tp", "whole"), [(2, True), (5, False), (7, False)])
def test_a_rules_file_can_ask_for_even_parts(tmp_path: Path, tp: int, whole: bool) -> None:
    text = '[[pattern]]\nname = "even"\nfeatures = ["row", "column"]\nuneven = false\n'
    plan = with_rules(tmp_path, text, "mlp_odd", tp)  # 35 units
    assert ("0.weight" not in cut(plan)) is whole
    if whole:
        assert "the rules cut even evenly only, and 35 % 2 = 1" in plan["0.weight"].reason


def test_a_rules_file_can_name_a_pattern(tmp_path: Path) -> None:
    text = '[[pattern]]\nname = "twins"\nfeatures = ["row", "columns"]\n'
    assert with_rules(tmp_path, text, "gated_mlp", 2)["core.up.weight"].pattern == "twins"


def test_a_rules_file_can_teach_an_op(tmp_path: Path) -> None:
    text = '[[op]]\nnames = "cummax"\ndims = "input: ... n! -> ... n; ... n"\n'
    path = tmp_path / "mine.toml"
    path.write_text(text)

    class Peaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(22, 84), nn.Linear(84, 22)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = torch.cummax(self.up(x).transpose(1, 2), -1)
            return self.down(y.transpose(1, 2))

    built = seeded(Peaks), {"x": floats(3, 7, 22)}
    assert "up.weight" not in cut(make_plan(*built, tp=2))
    assert {"up.weight", "down.weight"} <= cut(make_plan(*built, tp=2, rules=[path]))


def test_a_rules_file_can_say_why_an_op_keeps_everything_whole(tmp_path: Path) -> None:
    text = '[[op]]\nnames = "silu"\nwhole = "our kernel reads all of it"\n'
    plan = with_rules(tmp_path, text, "gated_mlp", 2)
    assert not any(n.startswith("core") for n in cut(plan))
    assert "silu: our kernel reads all of it" in plan["core.gate.weight"].reason


@pytest.mark.parametrize("pattern", ["core.up.weight", "core.up", "*.up.*", "core"])
def test_an_override_keeps_the_whole_axis_of_what_it_names(pattern: str) -> None:
    plan = planned(MODELS["gated_mlp"](), overrides=[f"{pattern}=whole"])
    assert not any(n.startswith("core") for n in cut(plan))
    assert "the user keeps a parameter of this axis whole" in plan["core.gate.weight"].reason
    assert "head.weight" in cut(plan)


def test_an_override_of_a_tied_name_keeps_both() -> None:
    plan = planned(hf_models.build("llama_tied_bias"), overrides=["lm_head=whole"])
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & cut(plan)


# -- the search ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 7).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(1, 50), min_size=n, max_size=n),
            st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=10),
        )
    )
)
def test_the_heaviest_set_without_exclusions_is_found(case: tuple[list[int], list[tuple[int, int]]]) -> None:
    weights, pairs = case
    candidates = [Candidate(V(2), weight=w) for w in weights]
    edges: dict[Candidate, set[Candidate]] = {c: set() for c in candidates}
    for i, j in pairs:
        if i != j:
            edges[candidates[i]].add(candidates[j])
            edges[candidates[j]].add(candidates[i])
    found = _independent(set(candidates), edges)
    assert not any(edges[c] & found for c in found)
    best = max(
        sum(w for w, keep in zip(weights, picks, strict=True) if keep)
        for picks in product([False, True], repeat=len(weights))
        if not any(picks[i] and picks[j] for i, j in pairs if i != j)
    )
    assert sum(c.weight for c in found) == best


def test_ranks_are_shared_out_outer_units_first() -> None:
    kv, rep = V(2), V(6)
    candidate = Candidate(kv, (rep,))
    assert shares(candidate, 2) == {kv: (2, 1)}
    assert shares(candidate, 4) == {kv: (2, 2), rep: (2, 1)}


class Tabled(nn.Module):
    """A table far larger than the layers, of which only the width could be cut, the one of all layers' norms."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, 24, scale_grad_by_freq=True)
        self.ups = nn.ModuleList(nn.Linear(24, 48) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(48, 24) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).relu())
        return x.mean(1)


def test_a_table_of_rows_to_look_up_saves_no_products() -> None:
    plan = make_plan(Tabled(), {"ids": torch.randint(0, 4000, (2, 7))}, tp=2)
    assert [plan[f"ups.{i}.weight"].layout.dim for i in range(4)] == [0] * 4
    assert not plan["table.weight"].layout.cut


class Places(nn.Module):
    """The rows and columns of a picture in one dim, which is no square of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dense(self.norm(x.flatten(1, 2))))


def test_places_of_a_picture_in_one_dim_are_counted_as_they_are() -> None:
    plan = make_plan(Places(), {"x": torch.randn(2, 3, 5, 24)}, tp=2, overrides=["*=gathered"])
    assert plan["dense.weight"].layout.cut
