"""Real transformers checkpoints, written by save_pretrained, sharded and given back byte for byte."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.frame import cut_all, hashes, plan_of
from tests.hf_models import CASES, build
from tpconvert.checkpoint import check_folder, load_rank, merge, reshard, shard
from tpconvert.checkpoint.tensors.compose import compose, full
from tpconvert.checkpoint.tensors.pieces import same_bytes
from tpconvert.errors import SourceError
from tpconvert.source.huggingface.conversion import hf_weights
from tpconvert.spec.recipe import Take, invert, takes


def on_meta(module):
    """The same model without its values."""
    with torch.device("meta"):
        return type(module)._from_config(module.config)


def saved(name, folder, **options):
    module, _ = build(name)
    module.save_pretrained(folder, **options)
    return module, on_meta(module)


@pytest.mark.parametrize("name", CASES)
def test_an_untrained_shard_gives_the_source_back(name, tmp_path):
    module, meta = saved(name, tmp_path / "source", max_shard_size="300KB")
    weights = hf_weights(tmp_path / "source", meta)
    for key, value in module.state_dict().items():
        assert same_bytes(weights.read(key), value), key
    shard(weights, plan_of(weights, 3, cut_all(weights, 3)), tmp_path / "three")
    reshard(tmp_path / "three", tmp_path / "two", tp=2)
    assert check_folder(tmp_path / "two") == []
    merge(tmp_path / "two", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(tmp_path / "source")


@pytest.mark.parametrize(
    ("name", "experts"), [("mixtral", "block_sparse_moe.experts.1.w1"), ("qwen3_moe", "mlp.experts.1.gate_proj")]
)
def test_experts_are_stored_one_by_one_and_held_as_one_tensor(name, experts, tmp_path):
    module, meta = saved(name, tmp_path / "source")
    weights = hf_weights(tmp_path / "source", meta)
    fused = next(n for n in weights.names() if n.endswith("experts.gate_up_proj"))
    assert len(takes(weights.recipes[fused])) > 2
    assert any(experts in stored for stored in weights.store.names())
    value = module.state_dict()[fused]
    assert same_bytes(weights.read(fused, 1, 2), value[1:2])
    assert same_bytes(weights.read(fused, 3, 9, 1), value[:, 3:9])


def test_a_trained_merge_is_what_transformers_reads(tmp_path):
    module, meta = saved("mixtral", tmp_path / "source")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    weights = hf_weights(tmp_path / "source", meta)
    plan = plan_of(weights, 2, cut_all(weights, 2))
    shard(weights, plan, tmp_path / "two")
    module.save_pretrained(tmp_path / "trained")
    shard(hf_weights(tmp_path / "trained", meta), plan, tmp_path / "two-trained")
    merge(tmp_path / "two-trained", tmp_path / "back")
    loaded = type(module).from_pretrained(tmp_path / "back")
    assert all(same_bytes(value, module.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_a_head_is_loaded_into_its_base_and_kept_for_the_merge(tmp_path):
    module, _ = saved("llama", tmp_path / "source")
    base = on_meta(module.model)
    weights = hf_weights(tmp_path / "source", base)
    assert set(weights.names()) == set(base.state_dict())
    assert weights.recipes["norm.weight"] == Take("model.norm.weight", (module.config.hidden_size,))
    assert weights.original().extra == ("lm_head.weight",)
    shard(weights, plan_of(weights, 2, cut_all(weights, 2)), tmp_path / "two")
    assert check_folder(tmp_path / "two") == []
    assert set(load_rank(tmp_path / "two", 0)) == set(base.state_dict())
    merge(tmp_path / "two", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(tmp_path / "source")


def test_a_base_is_loaded_into_a_model_with_a_prefix(tmp_path):
    module, _ = saved("bert_masked_lm", tmp_path / "whole")
    module.bert.save_pretrained(tmp_path / "source")
    head = {n: t for n, t in load_file(tmp_path / "whole" / "model.safetensors").items() if n.startswith("cls.")}
    stored = load_file(tmp_path / "source" / "model.safetensors")
    save_file(stored | head, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    weights = hf_weights(tmp_path / "source", on_meta(module))
    assert takes(weights.recipes["bert.encoder.layer.0.output.dense.weight"])[0].name in stored
    for key, value in module.state_dict().items():
        assert same_bytes(weights.read(key), value), key


def test_a_head_the_source_lacks_is_named(tmp_path):
    module, _ = saved("bert_masked_lm", tmp_path / "whole")
    module.bert.save_pretrained(tmp_path / "source")
    with pytest.raises(
        SourceError, match=r"does not store cls\.predictions\..*which BertForMaskedLM needs\. Choose the --task"
    ):
        hf_weights(tmp_path / "source", on_meta(module))


def test_a_config_of_another_size_is_named(tmp_path):
    module, _ = saved("llama", tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    module.config.intermediate_size = config["intermediate_size"] + 8
    with pytest.raises(SourceError, match=r"_proj\.weight is \[.*\], but the model of its config has"):
        hf_weights(tmp_path / "source", on_meta(module))


def test_an_expert_the_source_lacks_is_named(tmp_path):
    _, meta = saved("qwen3_moe", tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    stored = load_file(file)
    stored.pop(next(n for n in stored if "experts.1.down_proj" in n))
    save_file(stored, file)
    with pytest.raises(SourceError, match=r"experts\.down_proj"):
        hf_weights(tmp_path / "source", meta)


def test_tied_weights_stored_twice_stay_stored_twice(tmp_path):
    module, meta = saved("gpt2", tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {"lm_head.weight": module.lm_head.weight.detach().clone()}, file, {"format": "pt"})
    weights = hf_weights(tmp_path / "source", meta)
    assert weights.tied == {"lm_head.weight": "transformer.wte.weight"}
    shard(weights, plan_of(weights, 2, cut_all(weights, 2)), tmp_path / "two")
    merge(tmp_path / "two", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(tmp_path / "source")


def test_bytes_keep_their_dtype_whatever_the_config_says(tmp_path):
    module, _ = build("llama")
    module.bfloat16()
    module.model.norm.float()
    module.save_pretrained(tmp_path / "source")
    weights = hf_weights(tmp_path / "source", on_meta(module))
    assert weights.info("model.norm.weight")[1] == torch.float32
    assert weights.info("model.embed_tokens.weight")[1] == torch.bfloat16
    shard(weights, plan_of(weights, 2, cut_all(weights, 2)), tmp_path / "two")
    merge(tmp_path / "two", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(tmp_path / "source")


def operations():
    """Every kind of operation that moves elements: name -> (operations, patterns, stored tensors)."""
    from transformers import core_model_loading as loading

    def stored(*shapes):
        return [torch.rand(shape) for shape in shapes]

    experts = {"e.*.w1": stored(*[(6, 4)] * 3), "e.*.w3": stored(*[(6, 4)] * 3)}
    return {
        "stacked": ([loading.MergeModulelist(0)], ["w"], {"e.*.w2": stored(*[(4, 6)] * 3)}),
        "fused": ([loading.MergeModulelist(0), loading.Concatenate(1)], ["w"], experts),
        "chunked": ([loading.Chunk(0)], ["q", "k", "v"], {"qkv": stored((12, 4))}),
        "transposed": ([loading.Transpose(1, 2)], ["w"], {"w": stored((2, 3, 4))}),
        "interleaved": ([loading.Interleave(1)], ["w"], {"w": stored((2, 6, 4))}),
        "interleaved, chunked": ([loading.Interleave(0), loading.Chunk(0)], ["g", "u"], {"gu": stored((8, 3))}),
        "rotary": ([loading.PermuteForRope()], ["w"], {"w": stored((16, 4))}),
        "rotary bias": ([loading.PermuteForRope()], ["w"], {"w": stored((16,))}),
        "flattened": ([loading.Conv3dToLinear(3, (1, 2, 2))], ["w"], {"w": stored((5, 3, 1, 2, 2))}),
        "text and vision": ([loading.ErnieFuseAndSplitTextVisionExperts(0, 1)], ["t", "v"], experts),
        "split modules": ([loading.SplitModulelist(0)], ["e.*.w"], {"w": stored((3, 2, 2))}),
    }


@pytest.mark.parametrize("kind", operations())
def test_an_operation_of_transformers_is_recorded_and_undone(kind):
    from types import SimpleNamespace

    from tpconvert.source.huggingface.conversion import _Recorder

    ops, targets, given = operations()[kind]
    config = SimpleNamespace(num_attention_heads=2)
    named = {f"{key}#{i}": value for key, values in given.items() for i, value in enumerate(values)}

    def run(inputs):
        for op in ops:
            inputs = op.convert(
                inputs,
                source_patterns=list(given),
                target_patterns=targets,
                config=config,
                model=None,
                full_layer_name="",
            )
        return {key: value[0] if isinstance(value, list) else value for key, value in inputs.items()}

    recorder = _Recorder()
    stand_ins = {
        key: [recorder.stand_in(Take(f"{key}#{i}", tuple(v.shape)), v.dtype) for i, v in enumerate(values)]
        for key, values in given.items()
    }
    with recorder:
        recipes = {key: recorder.recipe(value) for key, value in run(stand_ins).items()}
    made = {key: value.contiguous() for key, value in run({k: list(v) for k, v in given.items()}).items()}
    assert set(recipes) == set(made)
    for key, recipe in recipes.items():
        assert same_bytes(composed(recipe, named), made[key]), key
    for key, recipe in invert(recipes).items():
        assert same_bytes(composed(recipe, made), named[key]), key


def composed(recipe, tensors):
    return compose(recipe, full(recipe.shape), tensors.__getitem__).contiguous().view(torch.float32)


def test_values_that_transformers_computes_are_refused():
    from tpconvert.source.huggingface.conversion import _Recorder

    recorder = _Recorder()
    given = recorder.stand_in(Take("a", (4, 2)), torch.float32)
    with recorder:
        moved, made, cast = given.transpose(0, 1).contiguous(), given * 2, given.to(torch.float64)
    assert recorder.recipe(moved).shape == (2, 4)
    for value in (made, cast):
        with pytest.raises(SourceError, match="transformers computes new values for it on loading"):
            recorder.recipe(value)


def test_the_merged_folder_is_read_in_a_fresh_process(tmp_path):
    _, meta = saved("qwen3_moe", tmp_path / "source")
    weights = hf_weights(tmp_path / "source", meta)
    shard(weights, plan_of(weights, 2, cut_all(weights, 2)), tmp_path / "two")
    merge(tmp_path / "two", tmp_path / "back")
    code = (
        "import sys, transformers, torch\n"
        "a, b = (transformers.AutoModelForCausalLM.from_pretrained(p).state_dict() for p in sys.argv[1:])\n"
        "assert all(torch.equal(a[n], b[n]) for n in a)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "source"), str(tmp_path / "back")], check=True)
