import pytest
import torch
from torch import nn

from tests.hf_models import build
from tpconvert.source import Source
from tpconvert.train.model.flops import Work, device_peak, model_flops, peak_flops


def source(module: nn.Module, inputs) -> Source:
    return Source(name="", module=module, inputs=inputs, build=lambda: module, weights=lambda: None)


def test_products_are_counted_at_the_length_of_the_run():
    module = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)).to("meta")
    ids = torch.zeros(2, 5, dtype=torch.int64)
    assert model_flops(source(module, (ids,)), 6, 100) == 3 * 6 * 100 * 2 * (8 * 12 + 12 * 8)


def test_a_llama_is_its_layers_its_attention_and_its_head():
    module, inputs = build("llama")
    c, length = module.config, 24
    heads, shared = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = c.hidden_size * (2 * heads + 2 * shared + 3 * c.intermediate_size) + 2 * length * heads
    once = length * (c.num_hidden_layers * layer + c.hidden_size * c.vocab_size)
    found = model_flops(source(module.to("meta"), inputs), 1, length)
    assert found == pytest.approx(3 * 2 * once, rel=0.01)  # and the angles of the positions


def test_each_word_counts_for_the_experts_it_goes_to():
    module, inputs = build("mixtral")
    c, length = module.config, 24
    heads, shared = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = c.hidden_size * (2 * heads + 2 * shared + c.num_local_experts) + 2 * length * heads
    layer += c.num_experts_per_tok * 3 * c.hidden_size * c.intermediate_size
    once = length * (c.num_hidden_layers * layer + c.hidden_size * c.vocab_size)
    assert model_flops(source(module.to("meta"), inputs), 1, length) == pytest.approx(6 * once, rel=0.01)


class Refuses(nn.Module):
    def forward(self, ids):
        return ids if ids.shape[1] == 5 else ids[:, : int("no")]


def test_a_forward_that_cannot_be_run_so_has_no_count():
    assert model_flops(source(Refuses(), (torch.zeros(2, 5, dtype=torch.int64),)), 1, 9) == 0


def test_the_share_of_what_a_gpu_could():
    work = Work(gpus=8, flops=int(1.6e15), peak=989e12)
    assert work.rate(0.5) == pytest.approx(400.0) and work.share(0.5) == pytest.approx(400 / 989)
    assert Work(gpus=8).rate(0.5) is None and Work(flops=1).share(0.5) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 125), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("AMD Instinct MI300X", 1307), ("Unknown", 0),
    ],
)  # fmt: skip
def test_peaks_by_name(name, tflops):
    assert peak_flops(name) == tflops * 1e12


def test_the_configuration_states_another_peak():
    cpu = torch.device("cpu")
    assert (device_peak(cpu, 2.0, "fp32"), device_peak(cpu, None, "bf16")) == (2e12, 0.0)
