"""Plans of every test model: complete, reasoned, and equal op by op when all ranks run in lockstep."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests import hf_models
from tests.hf_models import CASES
from tests.models import MODELS
from tpconvert.analyze.choice.choose import Choice
from tpconvert.errors import PlanError, RuleError, SourceError, TPConvertError
from tpconvert.planning import make_plan
from tpconvert.planning.make import Planning
from tpconvert.planning.proof.shapes import Fault
from tpconvert.spec.plan import Plan
from tpconvert.verify import emulate_module

SLOW = {
    "deepseek_v3", "deepseek_v3_loop", "whisper", "clip", "bart", "t5", "t5_gated", "qwen3_moe_loop", "mixtral_loop",
    "gpt_oss_loop", "translator", "decoder", "albert", "topk_moe_idle", "opt_projected", "llama_odd",
}  # fmt: skip
"""The models that take longest: on three and four ranks they are left to the nightly run."""

PARTLY = {
    "uncuttable": 0.0, "mha_batch_first": 0.0, "width_norm": 0.4, "recurrent": 0.6, "mqa": 0.65, "albert": 0.7,
    "mha_cross_length_first": 0.7, "residuals": 0.75, "mlp_transposed_tie": 0.8, "latent_attention": 0.8,
    "fused_gated_mlp_odd": 0.8, "unequal_split": 0.8,
    "mixtral": 0.4, "qwen3_moe": 0.3, "gpt_oss": 0.4, "deepseek_v3": 0.5,
}  # fmt: skip
"""Weights that are cut on two ranks, as a fraction, where it is less than 0.85: at least so much."""

WHOLE_CUT = [
    "mlp", "encoder_norm_first", "encoder_dropout", "decoder", "translator", "vocab_odd", "tied_padding",
    "scaled_embedding", "two_heads", "tuple_output", "dict_output", "dataclass_output", "llama", "llama_few",
    "llama_three", "llama_odd", "llama_eager", "llama_padded", "llama_tied_bias", "llama_base", "qwen2", "qwen3",
    "gemma2", "olmo2", "phi3", "gpt_neox", "gpt_neox_serial", "bloom_eight", *hf_models.falcons(),
    "falcon_grouped_one_norm", "t5", "t5_gated",
]  # fmt: skip
"""Models of which every matrix is cut on two ranks."""


def built(name: str) -> tuple[nn.Module, dict]:
    return MODELS[name]() if name in MODELS else hf_models.build(name)


def cut_fraction(plan: Plan) -> float:
    """The fraction of matrix entries that is cut, position tables aside, whose cutting the rules forbid."""
    weights = [v for v in plan.verdicts if v.kind == "parameter" and len(v.shape) > 1 and not v.tied_to]
    weights = [v for v in weights if "the rules leave positions whole" not in v.reason]
    cut = sum(math.prod(v.shape) for v in weights if v.layout.cut)
    return cut / max(1, sum(math.prod(v.shape) for v in weights))


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param(name, tp, marks=[pytest.mark.slow] if tp > 2 and name in SLOW else [])
        for name in (*MODELS, *CASES)
        for tp in (2, 3, 4)
    ],
)
def test_a_plan_is_complete_and_equal_in_lockstep(name: str, tp: int) -> None:
    module, inputs = built(name)
    plan = make_plan(module, inputs, tp=tp)
    named = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    named += [n for n, _ in module.named_buffers(remove_duplicate=False)]
    assert sorted(v.name for v in plan.verdicts) == sorted(named)
    assert all(v.reason for v in plan.verdicts)
    assert Plan.loads(plan.dumps()) == plan
    if tp == 2:
        least = 1.0 if name in WHOLE_CUT else PARTLY.get(name, 0.85)
        assert cut_fraction(plan) >= least
    result = emulate_module(module, inputs, plan)
    assert result.equal, result.verdict()
    assert {"op", "output"} <= {c.kind for c in result.checks}


def test_the_tables_of_expectations_name_models() -> None:
    assert {*SLOW, *PARTLY, *WHOLE_CUT} <= {*MODELS, *CASES}


@pytest.mark.parametrize("name", ["llama_few", "fused_per_group", "latent_attention"])
def test_a_plan_made_without_weights_is_the_plan_made_with_them(name: str) -> None:
    module, inputs = built(name)
    with_weights = make_plan(module, inputs, tp=2)
    assert make_plan(built(name)[0].to("meta"), inputs, tp=2) == with_weights


def test_planning_leaves_the_module_as_it_was() -> None:
    module, inputs = MODELS["nanogpt_literal"]()
    module.train()
    frozen = next(module.parameters()).requires_grad_(False)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    attributes = {n: {k: v for k, v in vars(m).items() if type(v) is int} for n, m in module.named_modules()}
    make_plan(module, inputs, tp=2)
    assert module.training
    assert not frozen.requires_grad
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    for n, m in module.named_modules():
        assert {k: v for k, v in vars(m).items() if type(v) is int} == attributes[n]
        assert not m._forward_hooks
        assert not m._forward_pre_hooks


@pytest.mark.parametrize("name", ["gated_mlp", "conv_mixer"])
def test_a_plan_for_one_rank_holds_everything_on_it(name: str) -> None:
    module, inputs = MODELS[name]()
    plan = make_plan(module, inputs, tp=1)
    assert all(v.layout.local_shape(v.shape, 0, 1) == v.shape for v in plan.verdicts)
    assert emulate_module(module, inputs, plan).equal


# -- mistakes ------------------------------------------------------------------------------------------------------


def refused(kind: type[TPConvertError], **options: object) -> str:
    with pytest.raises(kind) as caught:
        make_plan(*MODELS["gated_mlp"](), **({"tp": 2} | options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tp", [0, -1])
def test_a_degree_below_one_is_refused(tp: int) -> None:
    assert refused(PlanError, tp=tp) == f"tp={tp} is no number of ranks. Use --tp 2 or more."


def test_an_override_that_matches_nothing_names_the_nearest_parameter() -> None:
    assert "Did you mean core.gate.weight?" in refused(RuleError, overrides=["core.gaet.weight=whole"])


def test_an_override_that_asks_for_something_unknown_says_what_is_known() -> None:
    assert "only PATTERN=whole and PATTERN=gathered are known" in refused(RuleError, overrides=["core.gate.weight=cut"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[opp]]\nnames = 'x'\n", ["unknown table 'opp'", "[[op]]"]),
        ("[[op]]\nname = 'x'\n", ["no names"]),
        ("[[op]]\nnames = 'x'\ndim = 'a -> a'\n", ["'x'", "unknown key 'dim'"]),
        ("[[op]]\nnames = 'x'\ndims = 'a, b'\n", ["'x'", "dims must look like"]),
        ("[[op]]\nnames = 'x'\ndims = 'a: i -> i'\nlinear = 'b'\n", ["'x'", "'b' is not one of its operands a"]),
        ("[[op]]\nnames = 'x'\nrule = 'scater'\n", ["'x'", "no rule function 'scater'", "Did you mean 'scatter'?"]),
        ("[[pointwise]]\nnames = 'x'\nlines = 'a'\n", ["'x'", "unknown key 'lines'"]),
        ("[[pattern]]\nfeatures = []\n", ["no name"]),
        ("[[pattern]]\nname = 'x'\nfeatures = ['gated']\n", ["x: unknown feature 'gated'", "gate"]),
        ("[[pattern]]\nname = 'x'\ncuts = false\n", ["unknown key 'cuts'"]),
        ("[[pattern]]\nname = 'x'\ncut = 'false'\n", ["x: cut is 'false', but it must be true or false"]),
        ("[[pattern]]\nname = 'x'\nfeatures = 'gate'\n", ["x: features is 'gate', but it must be a list"]),
        ("[pattern]\nname = 'x'\n", ["'name' is no pattern", "[[pattern]]"]),
        ("[[op]]\nnames = 3\nwhole = 'x'\n", ["names is 3, but it is written as text"]),
        ("[[op]]\nnames = 'x'\nrule = ['scatter']\n", ["'x': rule is ['scatter'], but"]),
        ("[op]\nnames = 'x'\n", ["'names' is no entry", "[[op]]"]),
        ("[[op]]\nnames = 'x'\ndims = 'a: i j -> i -> j'\n", ["'x'", "dims must look like"]),
        ("[[op]]\nnames = 'x'\ndims = 'a: i* -> i'\n", ["'x'", "dims must look like"]),
        ("[[op]\n", ["is not TOML"]),
    ],
)
def test_a_rules_file_that_is_wrong_is_refused_with_its_name_and_entry(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    message = refused(RuleError, rules=[path])
    for part in (str(path), *parts):
        assert part in message


def test_a_rules_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.toml") in refused(RuleError, rules=[tmp_path / "none.toml"])


def test_a_forward_that_fails_is_named_with_the_line_of_the_users_code() -> None:
    module, _ = MODELS["gated_mlp"]()
    with pytest.raises(SourceError, match=r"Framed's forward failed.*frame\.py:\d+ in forward: RuntimeError: "):
        make_plan(module, {"x": torch.zeros(2, 5)}, tp=2)


# -- time ----------------------------------------------------------------------------------------------------------


def llama(layers: int) -> tuple[nn.Module, dict]:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        module = LlamaForCausalLM(LlamaConfig(**hf_models.causal(num_hidden_layers=layers)))
    return module.eval(), hf_models.text() | {"use_cache": False}


def test_the_work_grows_with_the_layers_and_no_faster() -> None:
    import time

    from tpconvert.planning.make import captured

    counts, times = [], []
    for layers in (2, 4, 8):
        module, inputs = llama(layers)
        counts.append(len(captured(module, inputs).nodes))
        tries = []
        for _ in range(3):  # the best of three: a machine has other things to do
            start = time.process_time()
            make_plan(module, inputs, tp=2)
            tries.append(time.process_time() - start)
        times.append(min(tries))
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])
    assert times[2] < 3 * times[1] + 0.3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_plan_does_not_hang_on_the_callers_grad_mode(mode):
    expected = make_plan(*MODELS["head_norms"](), tp=2)
    assert any(b.kind == "copy" for b in expected.boundaries) and any(v.sum_grad for v in expected.verdicts)
    with mode():
        module, inputs = MODELS["head_norms"]()
        assert make_plan(module, inputs, tp=2) == expected


class Beside(nn.Module):
    """A cut region, and two layers that it does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Dropout(0.1), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) + self.one(x.sin()) + self.two(x.cos())


def test_several_modules_that_come_out_wrong_together_leave_it_whole(monkeypatch) -> None:
    def wrong(module: nn.Module, inputs: object, trace: object, choice: Choice, *more: object) -> list[Fault]:
        return [Fault(path, "it gives another shape") for path in ("one", "two") if choice.chosen]

    monkeypatch.setattr("tpconvert.planning.make.prove_shapes", wrong)
    monkeypatch.setattr("tpconvert.planning.slices.prove_shapes", wrong)
    plan = make_plan(Beside(), {"x": torch.randn(2, 5, 8)}, tp=2)
    assert not any(v.layout.cut for v in plan.verdicts)
    assert "one: it gives another shape" in plan["up.weight"].reason


def test_other_axes_are_given_up_where_those_of_a_module_are_given_up_already():
    planning = object.__new__(Planning)
    planning.rewritten, planning.forbidden = {"late": "other lengths"}, {"inside": "other lengths"}
    planner = SimpleNamespace(atoms_inside=lambda module: {"inside"})
    choice = SimpleNamespace(chosen=[SimpleNamespace(atom="before")])
    planning.learn(Fault("late", "other lengths"), planner, choice, frozenset(["inside"]))
    assert planning.forbidden.keys() == {"inside", "before"}
