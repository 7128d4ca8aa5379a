"""Models are compared without dropout, in float64 throughout, and with no parameter at a special value."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hf_models import build
from tests.zoo.frame import floats
from tpconvert.verify.measure.modes import Exact, perturb, tensors_of
from tpconvert.verify.measure.values import loss_of, relative, spread_of

X = floats(2, 4, 6).double()


class Parts(nn.Module):
    """A parameter or a buffer of each kind that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.bn = nn.Linear(7, 5), nn.LayerNorm(5), nn.BatchNorm1d(5)
        self.tied = self.linear.weight
        nn.init.zeros_(self.linear.bias)
        mask = torch.triu(torch.full((4, 4), float("-inf")), 1)
        for name, buffer in {
            "mask": mask,
            "large": torch.tensor([0.0, -1e9, torch.finfo(torch.float32).min, 1.5]),
            "ids": torch.arange(6),
            "flags": torch.tensor([True, False]),
            "table": torch.linspace(-1, 1, 9),
            "empty": torch.empty(0),
        }.items():
            self.register_buffer(name, buffer)


def perturbed(seed=0):
    """The parts and, apart from them, what they were."""
    module = Parts()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    perturb(module, seed)
    return module, before


def test_perturbing_is_a_function_of_the_seed():
    torch.manual_seed(0)
    module, other, third = Parts(), Parts(), Parts()
    for m in (other, third):
        m.load_state_dict(module.state_dict())
    state = torch.get_rng_state()
    perturb(module, 1)
    torch.randn(3)
    perturb(other, 1)
    perturb(third, 2)
    torch.set_rng_state(state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert not torch.equal(module.linear.weight, third.linear.weight)


def test_perturbing_does_not_draw_from_the_default_generator():
    module, state = Parts(), torch.get_rng_state()
    perturb(module)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_parameter_stays_at_a_special_value():
    module, before = perturbed()
    for name, p in module.named_parameters():
        assert (p != before[name]).all(), name
        assert (p != 0).all() and (p != 1).all()
        assert p.unique().numel() == p.numel()


def test_masks_and_what_counts_stay_as_they_are():
    module, before = perturbed()
    for name in ("ids", "flags", "bn.num_batches_tracked", "empty"):
        assert torch.equal(module.state_dict()[name], before[name]), name
    assert torch.equal(module.mask.isinf(), before["mask"].isinf())
    assert module.large[1:3].tolist() == before["large"][1:3].tolist() and module.large[3] != 1.5
    assert (module.table != before["table"]).all()


def test_variances_stay_positive_and_ties_get_their_noise_once():
    for seed in range(20):
        module, before = perturbed(seed)
        assert (module.bn.running_var > 0).all() and (module.bn.running_var != 1).any()
        assert module.tied is module.linear.weight
        assert (module.tied - before["linear.weight"]).abs().max() < 5 * 0.1


def test_the_noise_does_not_depend_on_the_other_dtypes():
    module, double = Parts(), Parts()
    double.load_state_dict(module.state_dict())
    double.double()
    perturb(module)
    perturb(double)
    torch.testing.assert_close(double.linear.weight.float(), module.linear.weight)


# -- dropout ------------------------------------------------------------------------------------------------------

DROPS = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "F.dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "F.dropout1d": lambda x: F.dropout1d(x, 0.5),
    "F.dropout2d": lambda x: F.dropout2d(x[None], 0.5)[0],
    "F.dropout3d": lambda x: F.dropout3d(x[None, None], 0.5)[0, 0],
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "F.feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "torch.dropout by keywords": lambda x: torch.dropout(input=x, p=0.5, train=True),
    "torch.native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "aten": lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0],
    "nn.Dropout": nn.Dropout(0.5).train(),
    "nn.AlphaDropout": nn.AlphaDropout(0.5).train(),
}


@pytest.mark.parametrize("name", DROPS)
def test_a_dropout_is_left_out_and_its_rate_kept(name):
    torch.manual_seed(0)
    assert not torch.equal(DROPS[name](X), X)
    with Exact() as exact:
        assert torch.equal(DROPS[name](X), X)
    assert exact.rates == [0.5]


def test_a_dropout_that_rests_has_rate_0():
    with Exact() as exact:
        nn.Dropout(0.5).eval()(X)
        F.dropout(X, 0.5, training=False)
        torch.dropout(X, 0.5, train=False)
    assert exact.rates == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention_drops_nothing(weights):
    attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True).double()

    def run() -> Tensor:
        return attention(X, X, X, need_weights=weights)[0]

    assert not torch.equal(run(), run())
    with Exact() as exact:
        dropping = run()
    torch.testing.assert_close(dropping, attention.eval()(X, X, X)[0])
    assert exact.rates == [0.5]


def test_attention_drops_nothing_by_position_or_by_name():
    q = X[:, None]
    want = F.scaled_dot_product_attention(q, q, q)
    with Exact() as exact:
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, None, 0.5), want)
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, dropout_p=0.25), want)
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), want)
        torch.testing.assert_close(
            F.scaled_dot_product_attention(q, q, q, None, 0.5, True),
            F.scaled_dot_product_attention(q, q, q, is_causal=True),
        )
    assert exact.rates == [0.5, 0.25, 0.5]


def test_a_transformer_drops_nothing():
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True).double()
    with Exact() as exact:
        dropping = layer(X)
    assert exact.rates == [0.5] * 4
    torch.testing.assert_close(dropping, layer.requires_grad_(True).eval()(X))


# -- dtypes -------------------------------------------------------------------------------------------------------

NARROWINGS = {
    "float()": lambda x: x.float(),
    "to(dtype)": lambda x: x.to(torch.float32),
    "to(device, dtype)": lambda x: x.to("cpu", torch.float32),
    "to(dtype=)": lambda x: x.to(dtype=torch.float32),
    "type(dtype)": lambda x: x.type(torch.float32),
    "type(name)": lambda x: x.type("torch.FloatTensor"),
    "type(class)": lambda x: x.type(torch.FloatTensor),
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "sum": lambda x: x.sum(dtype=torch.float32),
    "arange": lambda x: torch.arange(3, dtype=torch.float32),
    "zeros": lambda x: torch.zeros(3, dtype=torch.float32),
    "tensor": lambda x: torch.tensor([0.5], dtype=torch.float32),
    "new_zeros": lambda x: x.new_zeros(3, dtype=torch.float32),
}


@pytest.mark.parametrize("name", NARROWINGS)
def test_what_asks_for_float32_gets_float64(name):
    with Exact():
        assert NARROWINGS[name](X).dtype == torch.float64
    with Exact(torch.float32):
        assert NARROWINGS[name](X).dtype == torch.float32


HALVES = {
    "half()": (lambda x: x.half(), torch.float16),
    "bfloat16()": (lambda x: x.bfloat16(), torch.bfloat16),
    "to(dtype)": (lambda x: x.to(torch.bfloat16), torch.bfloat16),
    "type(name)": (lambda x: x.type("torch.HalfTensor"), torch.float16),
    "type(class)": (lambda x: x.type(torch.BFloat16Tensor), torch.bfloat16),
    "zeros": (lambda x: torch.zeros(3, dtype=torch.float16), torch.float16),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_asks_for_a_half_gets_what_the_model_is_run_in(name, dtype):
    narrow, own = HALVES[name]
    assert narrow(X).dtype == own
    with Exact(dtype):
        assert narrow(X).dtype == dtype


def test_wider_and_other_types_stay_as_they_are():
    with Exact(torch.float32):
        assert X.to(torch.float64).dtype == X.double().dtype == X.type(torch.DoubleTensor).dtype == torch.float64
        assert X.type(torch.LongTensor).dtype == X.long().dtype == X.to(torch.int64).dtype == torch.int64
        assert X.half().dtype == torch.float32 and X.to(torch.complex64).dtype == torch.complex64
    with Exact():
        assert X.to(torch.complex64).dtype == torch.complex128


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "bloom", "gpt_oss_loop"])
def test_a_model_that_goes_down_to_float32_inside_does_not(name):
    module, inputs = build(name)
    module.double()
    seen = {}

    def keep(path):
        def hook(part, args, output):
            seen[path] = {t.dtype for _, t in tensors_of(output) if t.is_floating_point()}

        return hook

    for path, part in module.named_modules():
        part.register_forward_hook(keep(path))
    with torch.no_grad(), Exact():
        module(**inputs)
    assert {p: d for p, d in seen.items() if d - {torch.float64}} == {}


# -- losses -------------------------------------------------------------------------------------------------------


def test_the_loss_weighs_every_entry_of_every_output_in_its_own_way():
    outputs = [X.clone().requires_grad_(), {"a": X.clone().requires_grad_(), "b": torch.arange(3)}, None]
    loss_of(outputs).backward()
    weights = torch.cat([outputs[0].grad.flatten(), outputs[1]["a"].grad.flatten()])
    assert weights.unique().numel() == weights.numel() and (weights != 0).all()


def test_the_loss_leaves_out_infinities():
    x = torch.tensor([1.0, float("-inf"), 2.0], requires_grad=True)
    loss_of(x).backward()
    assert x.grad[1] == 0 and (x.grad[[0, 2]] != 0).all()


def test_a_loss_whose_terms_cancel_is_held_to_what_they_are():
    """Of thousands of terms in bfloat16 a sum near zero has no digit right, though each term has two."""
    x = torch.randn(2, 64, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    weights = torch.autograd.grad(loss_of(x), x)[0]
    x = (x - weights * loss_of(x) / weights.square().sum()).detach().requires_grad_()
    assert loss_of(x).abs() < 1e-9
    assert spread_of(x) == pytest.approx(1, rel=0.02)
    rounded = x.detach().bfloat16().requires_grad_()
    assert relative(loss_of(rounded), loss_of(x).float(), spread_of(x)) < 2**-8


def test_a_loss_of_one_number_is_as_large_as_its_term():
    x = torch.tensor(3.0, requires_grad=True)
    assert spread_of({"loss": x}) == pytest.approx(loss_of({"loss": x}).abs().item())


def test_without_an_output_to_differentiate_there_is_no_loss():
    assert loss_of({"ids": torch.arange(3), "seen": X}) is None


def test_masks_are_what_is_most_likely() -> None:
    """Dropout written by hand draws ones or zeros: ranks would draw others for their parts than the whole model."""
    with Exact():
        assert torch.empty(9).bernoulli_(0.9).eq(1).all() and torch.empty(9).bernoulli_(0.1).eq(0).all()
        assert torch.bernoulli(torch.tensor([0.2, 0.7])).tolist() == [0.0, 1.0]
        assert torch.bernoulli(torch.zeros(2), 0.7).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_scores_do_not_overflow_a_loss(dtype):
    scores = torch.ones(4, 9, dtype=dtype, requires_grad=True)
    loss = loss_of(scores.masked_fill(torch.arange(9) > 3, torch.finfo(dtype).min))
    loss.backward()
    assert loss.isfinite() and loss.abs() > 0.1
    assert (scores.grad[:, :4] != 0).all()
