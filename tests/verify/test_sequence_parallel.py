"""Models whose values between regions are slices of the tokens are equal to the whole ones, on gloo ranks."""

from dataclasses import replace

import pytest
import torch

from tests.ranks import RankFailedError
from tests.verify.frame import built, planned
from tpconvert.parallel import Mesh, parallelize
from tpconvert.spec.plan import Plan, Slices
from tpconvert.spec.sliced import sliced_form, with_sliced_form
from tpconvert.verify import Result, compare_on_rank, emulate_module

TWO = [
    "gated_mlp_bias", "mqa", "mha_length_first", "latent_attention", "parallel_block", "encoder_dropout", "translator",
    "nanogpt_dropout", "tied_padding", "scaled_embedding", "two_heads", "soft_moe", "stacked_moe", "residuals",
    "dict_output", "llama", "llama_padded", "llama_tied_bias", "llama_base", "gemma2", "olmo2", "phi3", "gpt2",
    "bloom_eight", "falcon_multi_rotary_parallel", "mpt", "t5", "bart", "bert", "vit", "mixtral_loop",
    "deepseek_v3_loop",
]  # fmt: skip
FOUR = ["nanogpt", "vocab_odd", "llama_few", "gpt2", "bert_masked_lm", "mixtral_loop"]


def compared(mesh: Mesh, name: str, plan: str) -> Result | None:
    return compare_on_rank(*built(name), Plan.loads(plan), mesh, sequence_parallel=True)


@pytest.mark.parametrize(("name", "tp"), [*((n, 2) for n in TWO), *((n, 4) for n in FOUR)])
def test_a_model_with_slices_is_equal(run_ranks, name, tp):
    plan = planned(name, tp)
    assert plan.slices.reason == ""
    assert any(b.kind == "reduce_scatter" for b in sliced_form(plan).boundaries)
    result = run_ranks(compared, tp, name, plan.dumps(), timeout=120)[0]
    assert result.equal, result.verdict()
    assert {c.kind for c in result.checks} >= {"output", "loss", "gradient", "gradient norm", "after 2 steps"}


@pytest.mark.parametrize("name", ["llama", "nanogpt", "mixtral_loop", "t5"])
def test_all_ranks_in_lockstep_are_equal_with_slices_of_unequal_length(name):
    module, inputs = built(name)
    result = emulate_module(module, inputs, planned(name, 2), sequence_parallel=True)
    assert result.equal, result.verdict()


# -- faults -------------------------------------------------------------------------------------------------------


def without_summed_norm(plan: Plan) -> Plan:
    (name,) = [v.name for v in plan.verdicts if v.on_slices and "layers.1.post_attention" in v.name]
    return replace(plan, verdicts=tuple(replace(v, on_slices=v.on_slices and v.name != name) for v in plan.verdicts))


def turned(kind: str, into: str, module: str):
    def change(plan: Plan) -> Plan:
        sliced = sliced_form(plan)
        assert sum((b.kind, b.module) == (kind, module) for b in sliced.boundaries) == 1
        boundaries = [replace(b, kind=into) if (b.kind, b.module) == (kind, module) else b for b in sliced.boundaries]
        return with_sliced_form(plan, replace(sliced, boundaries=tuple(boundaries)), Slices(inputs=plan.slices.inputs))

    return change


def dropped(kind: str, module: str):
    def change(plan: Plan) -> Plan:
        form = sliced_form(plan)
        boundaries = [b for b in form.boundaries if (b.kind, b.module) != (kind, module)]
        assert len(boundaries) == len(form.boundaries) - 1
        return with_sliced_form(plan, replace(form, boundaries=tuple(boundaries)), Slices(inputs=plan.slices.inputs))

    return change


FAULTS = {
    "the gradient of a norm not summed": without_summed_norm,
    "a gather where its gradient is partial": turned("all_gather", "gather", "model.layers.1.mlp"),
    "a slice of a term of the sum": turned("reduce_scatter", "scatter", "model.layers.0.mlp.down_proj"),
}


def test_a_gradient_that_is_whole_is_not_summed_with_terms(run_ranks):
    name, change = "mixtral_loop", dropped("single", "model.layers.1.mlp.gate")
    assert not run_ranks(compared, 2, name, change(planned(name, 2)).dumps(), timeout=120)[0].equal


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_sliced_form_is_found(run_ranks, fault):
    plan = FAULTS[fault](planned("llama", 2))
    if "gather" in fault:  # which need not come so far as to be compared
        with pytest.raises(RankFailedError, match=r"PlanError: .* whose gradient nobody sums over ranks"):
            run_ranks(compared, 2, "llama", plan.dumps(), timeout=120)
        return
    assert not run_ranks(compared, 2, "llama", plan.dumps(), timeout=120)[0].equal


def with_slices_exchanged(mesh: Mesh, plan: str) -> Result | None:
    """Each rank takes another's slice of a sum."""
    from unittest import mock

    from tpconvert.parallel.comm import collectives

    def exchanged(x, dim, mesh, rows):
        other = replace(mesh, rank=(mesh.rank + 1) % mesh.degree)
        return collectives.own_slice(collectives.summed(x, mesh), dim, other, rows)

    with mock.patch.object(collectives, "summed_slice", exchanged):
        return compared(mesh, "nanogpt", plan)


def test_slices_of_other_ranks_are_found(run_ranks):
    assert not run_ranks(with_slices_exchanged, 2, planned("nanogpt", 2).dumps())[0].equal


# -- what the runtime does ----------------------------------------------------------------------------------------


def held_between_regions(mesh: Mesh, plan: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of what a norm and an attention see."""
    module, inputs = built("llama")
    parallelize(module, Plan.loads(plan), mesh, sequence_parallel=True)
    seen = []
    layer = module.model.layers[1]
    layer.input_layernorm.register_forward_hook(lambda _m, args, _out: seen.append(tuple(args[0].shape)))
    layer.self_attn.q_proj.register_forward_hook(lambda _m, args, _out: seen.append(tuple(args[0].shape)))
    module(input_ids=inputs["input_ids"][:, :12], use_cache=False)
    return seen[0], seen[1]


def test_each_rank_has_its_share_of_the_tokens_between_regions(run_ranks):
    assert run_ranks(held_between_regions, 2, planned("llama", 2).dumps()) == [((2, 6, 40), (2, 12, 40))] * 2


def given_embeddings(mesh: Mesh, plan: str) -> bool:
    """Whether a model that is given embeddings instead of words returns what the whole one does."""
    whole, _ = built("llama")
    ours, _ = built("llama")
    parallelize(ours, Plan.loads(plan), mesh, sequence_parallel=True)
    x = torch.randn(2, 12, 40, generator=torch.Generator().manual_seed(0))
    found = (m(inputs_embeds=x, use_cache=False).logits for m in (whole, ours))
    return torch.allclose(*found, atol=1e-5)


def test_embeddings_that_are_given_are_not_summed(run_ranks):
    assert run_ranks(given_embeddings, 2, planned("llama", 2).dumps()) == [True, True]


def odd_length(mesh: Mesh, plan: str) -> str:
    from tpconvert.errors import PlanError

    module, inputs = built("llama")
    parallelize(module, Plan.loads(plan), mesh, sequence_parallel=True)
    try:
        module(**inputs)
    except PlanError as error:
        return str(error)
    return ""


def test_a_length_that_cannot_be_shared_is_told(run_ranks):
    every = run_ranks(odd_length, 2, planned("llama", 2).dumps())
    assert all("A sequence of 13 cannot be shared equally by 2 ranks (13 % 2 is 1)" in text for text in every)
    assert all("Pad it to 14" in text for text in every)


def compiled_is_equal(mesh: Mesh, plan: str) -> bool:
    """The same loss and gradients from layers that are compiled without a break."""
    torch._dynamo.reset()
    found = []
    for is_compiled in (False, True):
        module, inputs = built("llama")
        parallelize(module, Plan.loads(plan), mesh, sequence_parallel=True)
        if is_compiled:
            for layer in module.model.layers:
                layer.compile(fullgraph=True, backend="aot_eager")
        logits = module(input_ids=inputs["input_ids"][:, :12], use_cache=False).logits
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad for p in module.parameters())])
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))


def test_layers_with_slices_compile_in_one_graph(run_ranks):
    assert run_ranks(compiled_is_equal, 2, planned("llama", 2).dumps(), timeout=300) == [True, True]
