"""SOURCE in its forms: what is on meta, what is real, and what goes in."""

import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tpconvert.errors import SourceError
from tpconvert.source import open_source, twin
from tpconvert.source.build.frugal import frugal
from tpconvert.source.huggingface.tasks import task_names

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, 6)
        self.register_buffer("scale", torch.arange(6.0))

    def forward(self, x):
        return self.head(self.down(self.up(x))) * self.scale

def as_dict():
    return Net(), {"x": torch.ones(2, 6)}

def as_tuple():
    return Net(), (torch.ones(2, 6),)

def as_tensor():
    return Net(), torch.ones(2, 6)

def looking():
    net = Net()
    if net.up.weight.sum().item() > 1e9:
        raise ValueError
    return net, (torch.ones(2, 6),)
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def save_config(folder, **config):
    import json

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# -- Hugging Face -----------------------------------------------------------------------------------------------


def test_parameters_are_on_meta_and_buffers_are_true(llama):
    source = open_source(str(llama))
    real = dict(source.build().named_buffers())
    assert all(p.is_meta for p in source.module.parameters())
    assert real.keys() == dict(source.module.named_buffers()).keys()
    assert all(torch.equal(b, real[n]) for n, b in source.module.named_buffers())


def test_build_gives_the_stored_weights(llama):
    stored = load_file(llama / "model.safetensors")
    built = open_source(str(llama)).build().state_dict()
    assert all(torch.equal(built[n], t) for n, t in stored.items())


def test_a_folder_of_weights_is_read_lazily_by_the_names_of_the_module(llama):
    source = open_source(str(llama))
    weights = source.weights()
    assert set(weights.names()) == set(source.module.state_dict())
    assert source.has_weights


def test_inputs_are_real_words_of_the_vocabulary_of_prime_length(llama):
    inputs = open_source(str(llama)).inputs
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (2, 13)
    assert inputs["input_ids"].max() < 59
    assert not set(inputs["input_ids"].flatten().tolist()) & {1, 2}  # begin and end
    assert inputs["use_cache"] is False


@pytest.mark.parametrize("of", [lambda source: source, twin])
def test_the_build_can_be_given_to_another_process(of, llama, own):
    built = of(open_source(str(llama)))
    again = pickle.loads(pickle.dumps(built.build))()
    for (name, value), (_, other) in zip(built.build().state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(value, other), name
    code = "import pickle, sys; print(type(pickle.load(sys.stdin.buffer)()).__name__)"  # it has no module ``own``
    given = pickle.dumps(open_source(f"{own}:as_dict").build)
    assert subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=True).stdout == b"Net\n"


def test_a_config_alone_opens_with_seeded_weights(llama, tmp_path):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    source = open_source(str(tmp_path))
    assert not source.has_weights
    assert "holds no weights" in source.notes[0]
    first, second = source.build().state_dict(), source.build().state_dict()
    assert all(torch.equal(first[n], second[n]) for n in first)
    weights = source.weights()
    assert all(torch.equal(weights.read(n), first[n]) for n in weights.names())
    assert weights.source["name"] == str(tmp_path)


def test_the_description_says_what_was_opened(llama):
    description = open_source(str(llama)).description
    assert description["name"] == str(llama)
    assert description["class"] == "LlamaForCausalLM"
    assert description["inputs"]["input_ids"] == "int64[2, 13]"
    assert description["torch"] == torch.__version__


def test_a_task_chooses_the_head(llama):
    assert type(open_source(str(llama), task="feature-extraction").module).__name__ == "LlamaModel"


def test_tasks_are_those_of_transformers():
    names = task_names()
    assert names["causal-lm"] == "AutoModelForCausalLM"
    assert names["seq2seq-lm"] == "AutoModelForSeq2SeqLM"
    assert names["ctc"] == "AutoModelForCTC"
    assert names["image-classification"] == "AutoModelForImageClassification"


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (
            {
                "model_type": "vit",
                "architectures": ["ViTForImageClassification"],
                "hidden_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 20,
                "image_size": 16,
                "patch_size": 8,
            },
            {"pixel_values": (2, 3, 16, 16)},
        ),
        (
            {
                "model_type": "t5",
                "architectures": ["T5ForConditionalGeneration"],
                "d_model": 24,
                "d_kv": 8,
                "num_heads": 2,
                "num_layers": 1,
                "d_ff": 20,
                "vocab_size": 50,
                "decoder_start_token_id": 0,
            },
            {"input_ids": (2, 13), "attention_mask": (2, 13), "decoder_input_ids": (2, 7)},
        ),
        (
            {
                "model_type": "whisper",
                "architectures": ["WhisperForConditionalGeneration"],
                "d_model": 24,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 20,
                "decoder_ffn_dim": 20,
                "vocab_size": 50,
                "max_source_positions": 20,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "decoder_start_token_id": 3,
            },
            {"input_features": (2, 80, 40), "decoder_input_ids": (2, 7)},
        ),
    ],
    ids=["vit", "t5", "whisper"],
)
def test_inputs_suit_the_model_and_it_runs_on_them(tmp_path, config, shapes):
    source = open_source(save_config(tmp_path / "m", **config))
    assert {k: tuple(v.shape) for k, v in source.inputs.items() if isinstance(v, torch.Tensor)} == shapes
    with torch.no_grad():
        source.build()(**source.inputs)


def test_a_model_that_needs_two_kinds_of_input_gets_both(tmp_path):
    part = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = part | {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
    vision = part | {"image_size": 16, "patch_size": 8}
    config = {"model_type": "clip", "architectures": ["CLIPModel"], "text_config": text, "vision_config": vision}
    source = open_source(save_config(tmp_path / "m", **config))
    assert {"input_ids", "pixel_values"} <= source.inputs.keys()


def test_code_beside_the_weights_runs_when_trusted(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom transformers import PretrainedConfig, PreTrainedModel\n"
        "class MyConfig(PretrainedConfig):\n    model_type = 'mine'\n"
        "    def __init__(self, width=6, vocab_size=20, **more):\n"
        "        self.width, self.vocab_size = width, vocab_size\n        super().__init__(**more)\n"
        "class MyModel(PreTrainedModel):\n    config_class = MyConfig\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.words = torch.nn.Embedding(config.vocab_size, config.width)\n        self.post_init()\n"
        "    def forward(self, input_ids):\n        return self.words(input_ids)\n"
    )
    auto = {"AutoConfig": "mine.MyConfig", "AutoModel": "mine.MyModel"}
    name = save_config(tmp_path, model_type="mine", architectures=["MyModel"], auto_map=auto, width=10)
    source = open_source(name, trust_remote_code=True)
    assert dict(source.module.named_parameters())["words.weight"].shape == (20, 10)
    with pytest.raises(SourceError, match="not run unasked"):
        open_source(name)


def test_a_hub_id_in_the_cache_opens_without_a_network(llama, tmp_path, monkeypatch):
    import huggingface_hub.constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "models--owner--small"
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text(commit)
    (home / "snapshots").mkdir()
    (home / "snapshots" / commit).symlink_to(llama)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    source = open_source("owner/small")
    assert source.description["revision"] == commit
    assert source.has_weights


def test_a_405b_config_opens_in_seconds_and_little_memory(tmp_path):
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    name = save_config(
        tmp_path / "big",
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        num_key_value_heads=8,
        vocab_size=128256,
        dtype="bfloat16",
        **sizes,
    )
    code = (
        "import time\nfrom pathlib import Path\nimport transformers.models.llama.modeling_llama\n"
        "from tpconvert.source import open_source\nstart = time.process_time()\n"
        f"source = open_source({name!r})\n"
        "print(sum(p.numel() for p in source.module.parameters()), time.process_time() - start,\n"
        "      Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )  # the most of this program: what getrusage gives begins with what the parent had when it was forked
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    parameters, seconds, kilobytes = map(float, done.stdout.split())
    assert parameters > 405e9
    assert seconds < 10
    assert kilobytes < 1e6


# -- functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["as_dict", "as_tuple", "as_tensor", "looking"])
def test_a_function_in_a_file_opens_on_meta(own, function):
    source = open_source(f"{own}:{function}")
    assert all(p.is_meta for p in source.module.parameters())
    assert torch.equal(source.module.scale, torch.arange(6.0))
    inputs = source.inputs
    output = source.build()(**inputs) if isinstance(inputs, dict) else source.build()(*inputs)
    assert output.shape == (2, 6)


def test_a_function_that_looks_at_weights_is_called_with_them_and_that_is_said(own):
    assert "called with them" in open_source(f"{own}:looking").notes[0]
    assert open_source(f"{own}:as_tuple").notes == ()


def test_a_function_of_a_package_opens(own, monkeypatch):
    monkeypatch.chdir(own.parent)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    assert open_source("own:as_dict").description["class"] == "Net"


def test_a_function_builds_the_same_weights_each_time(own):
    source = open_source(f"{own}:as_dict")
    first, second = source.build().state_dict(), source.build().state_dict()
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(torch.equal(source.weights().read(n), first[n]) for n in first)


def test_weights_of_a_file_are_loaded_and_read(own, tmp_path):
    module = open_source(f"{own}:as_dict").build()
    changed = {n: t + 1 for n, t in module.state_dict().items()}
    save_file(changed, tmp_path / "w.safetensors")
    source = open_source(f"{own}:as_dict", weights=str(tmp_path / "w.safetensors"))
    assert all(torch.equal(t, changed[n]) for n, t in source.build().state_dict().items())
    assert torch.equal(source.weights().read("up.weight"), changed["up.weight"])


def test_weights_that_do_not_fit_are_told_by_name(own, tmp_path):
    module = open_source(f"{own}:as_dict").build()
    state = module.state_dict()
    state["upp.bias"] = state.pop("up.bias")
    save_file(state, tmp_path / "w.safetensors")
    source = open_source(f"{own}:as_dict", weights=str(tmp_path / "w.safetensors"))
    with pytest.raises(SourceError, match=r"no tensor up\.bias\. It has upp\.bias"):
        source.build()


def test_options_of_the_other_kind_of_source_are_refused(own, llama):
    with pytest.raises(SourceError, match="--task is for Hugging Face models"):
        open_source(f"{own}:as_dict", task="causal-lm")
    with pytest.raises(SourceError, match="--weights is for functions"):
        open_source(str(llama), weights="w.safetensors")


# -- building on meta -------------------------------------------------------------------------------------------


def test_ties_stay_ties_on_meta():
    with frugal():
        net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        net["b"].weight = net["a"].weight
        shared = nn.Parameter(torch.ones(3))
        net["a"].bias = shared
        net["b"].bias = shared
    assert net["b"].weight is net["a"].weight
    assert net["b"].bias is net["a"].bias
    assert all(p.is_meta for p in net.parameters())


def test_a_huge_weight_takes_no_memory_and_a_small_buffer_keeps_its_values():
    with frugal():
        net = nn.Module()
        net.weight = nn.Parameter(torch.zeros(1 << 20, 1 << 20))
        net.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        net.register_buffer("like", torch.zeros_like(net.weight[0, :5]))
    assert net.weight.is_meta
    assert net.mask.sum() == 10
    assert not net.like.is_meta


def test_nothing_stays_changed_afterwards():
    with pytest.raises(ZeroDivisionError), frugal():
        _ = 1 / 0
    assert not nn.Linear(300, 300).weight.is_meta
