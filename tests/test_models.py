"""The test models themselves: they run, repeat, reach every parameter, and hide nothing."""

import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.hf_models import CASES, Widened, build, ready
from tests.models import MODELS, as_double, leaves, loss_of, perturb

# Parameters without a gradient, and why.
UNTRAINED = {
    ("topk_moe_idle", r"core\.experts\.\d+\..*"): "experts that no token chose",
    ("whisper", r"model\.encoder\.embed_positions\.weight"): "sinusoids, frozen by the class",
}
# Parameters whose gradient is zero but for rounding: a key's bias adds the same to all scores of a query, and batch
# norm takes away the mean that the bias before it adds.
SHIFTS = re.compile(r"(.*\.)?(k|k_proj|k_lin|key)\.bias|conv1\.bias")
TABLES = [*MODELS, *CASES]


def make(name: str) -> tuple[nn.Module, dict]:
    """The named model of either table, perturbed, in float64 where it can, with dropout off."""
    if name in CASES:
        return ready(name)
    module, inputs = MODELS[name]()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    return as_double(perturb(module), inputs)


def grad_scale(module: nn.Module) -> float:
    """The largest number in any gradient."""
    return max(p.grad.abs().max().item() for p in module.parameters() if p.grad is not None)


def test_the_tables_share_no_name() -> None:
    assert not set(MODELS) & set(CASES)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_model_gives_the_same_output_twice(name: str, training: bool) -> None:
    (module, inputs), (again, inputs_again) = make(name), make(name)
    with torch.no_grad():
        first = list(leaves(module.train(training)(**inputs)))
        second = list(leaves(again.train(training)(**inputs_again)))
        third = list(leaves(module(**inputs)))
    assert first
    for a, b, c in zip(first, second, third, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("name", TABLES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    module, inputs = make(name)
    loss_of(module.train()(**inputs)).backward()
    tiny = grad_scale(module) * (1e-5 if name in CASES and CASES[name].narrow else 1e-9)
    for key, p in module.named_parameters():
        if any(model == name and re.fullmatch(pattern, key) for model, pattern in UNTRAINED):
            continue
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
        assert SHIFTS.fullmatch(key) or p.grad.abs().max() > tiny, f"{key} hardly matters"


@pytest.mark.parametrize(("name", "pattern"), UNTRAINED)
def test_a_parameter_listed_without_a_gradient_has_none(name: str, pattern: str) -> None:
    module, inputs = make(name)
    loss_of(module(**inputs)).backward()
    without = [key for key, p in module.named_parameters() if p.grad is None]
    assert without
    assert all(re.fullmatch(pattern, key) for key in without)


@pytest.mark.parametrize("name", TABLES)
def test_weights_are_float64_where_the_class_allows(name: str) -> None:
    module, inputs = make(name)
    expected = torch.float32 if name in CASES and CASES[name].narrow else torch.float64
    assert {p.dtype for p in module.parameters()} == {expected}
    assert {x.dtype for x in inputs.values() if isinstance(x, torch.Tensor) and x.is_floating_point()} <= {expected}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.narrow])
def test_a_model_listed_as_narrow_cannot_run_in_float64(name: str) -> None:
    module, inputs = as_double(*build(name))
    with pytest.raises(RuntimeError, match="Double"):
        module(**inputs)


class Watch(TorchFunctionMode):
    """Notes float32 results that carry a gradient, and the smallest gap between the chosen and the others of a topk."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow: set[str] = set()
        self.gap = float("inf")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            k = args[1] if len(args) > 1 else kwargs["k"]
            ranked = args[0].detach().sort(dim=-1, descending=True).values
            if k < ranked.shape[-1]:
                self.gap = min(self.gap, (ranked[..., k - 1] - ranked[..., k]).min().item())
        if any(x.dtype == torch.float32 and x.requires_grad for x in leaves(out)):
            self.narrow.add(func.__name__)
        return out


@pytest.mark.parametrize("name", [name for name in TABLES if name in MODELS or not CASES[name].narrow])
def test_nothing_trained_passes_through_float32_when_widened(name: str) -> None:
    module, inputs = make(name)
    with Watch() as watch, Widened():
        module(**inputs)
    assert not watch.narrow


def test_real_classes_pass_through_float32_when_not_widened() -> None:
    module, inputs = make("llama")
    with Watch() as watch:
        module(**inputs)
    assert watch.narrow


@pytest.mark.parametrize("name", ["topk_moe", "topk_moe_idle", "stacked_moe", *(n for n in CASES if CASES[n].narrow)])
def test_routing_is_far_from_a_tie(name: str) -> None:
    module, inputs = make(name)
    with Watch() as watch, torch.no_grad():
        module(**inputs)
    assert 5e-4 < watch.gap < float("inf")


@pytest.mark.parametrize("name", MODELS)
def test_a_builder_leaves_the_random_state_alone_and_travels(name: str) -> None:
    state = torch.get_rng_state()
    module, _ = MODELS[name]()
    assert torch.equal(torch.get_rng_state(), state)
    assert pickle.loads(pickle.dumps(MODELS[name])) is MODELS[name]
    copy = pickle.loads(pickle.dumps(module))
    assert copy.state_dict().keys() == module.state_dict().keys()


@pytest.mark.parametrize("name", ["nanogpt_dropout", "encoder_dropout"])
def test_dropout_of_one_tenth_changes_the_output_in_train_mode(name: str) -> None:
    module, inputs = MODELS[name]()
    assert {part.p for part in module.modules() if isinstance(part, nn.Dropout)} == {0.1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert not torch.equal(module.train()(**inputs), module(**inputs))
    assert torch.equal(module.eval()(**inputs), module(**inputs))


@pytest.mark.parametrize("name", ["conv_net", "nanogpt", "rotary", "bart", "deepseek_v3"])
def test_perturbing_leaves_no_default_and_no_integer_changed(name: str) -> None:
    module, _ = MODELS[name]() if name in MODELS else build(name)
    before = {key: b.clone() for key, b in module.named_buffers()}
    for key, p in perturb(module, 3).named_parameters():
        assert not (p == 0).any(), key
        assert not (p == 1).any(), key
    for key, b in module.named_buffers():
        same = not b.is_floating_point()
        assert torch.equal(b, before[key]) is same, key
        assert b.dtype == before[key].dtype
        assert not key.endswith("var") or (b > 0.5).all()


def test_perturbing_leaves_integer_and_boolean_buffers_alone() -> None:
    module = nn.Module()
    module.register_buffer("places", torch.arange(40))
    module.register_buffer("mask", torch.zeros(40, dtype=torch.bool))
    perturb(module)
    assert torch.equal(module.places, torch.arange(40))
    assert not module.mask.any()


def test_perturbing_is_seeded_and_keeps_ties() -> None:
    one, two, three = (perturb(MODELS["tied_padding"]()[0], seed) for seed in (1, 1, 2))
    assert torch.equal(one.embed.weight, two.embed.weight)
    assert not torch.equal(one.embed.weight, three.embed.weight)
    assert one.head.weight is one.embed.weight


def test_the_vanilla_table_needs_no_transformers() -> None:
    code = "import sys, tests.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
