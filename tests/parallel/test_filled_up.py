"""Products of odd widths are filled up where that is faster, and give what the plain ones give."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.parallel.test_products import set_to
from tests.parallel.test_wire import TOKENS, WORDS, model_of
from tpconvert.parallel import parallelize
from tpconvert.parallel.layers import linear as layers
from tpconvert.parallel.layers.products import dtype_of, filled_up, lacking
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan


@pytest.mark.parametrize(
    ("device", "features", "tokens", "dtype", "more"),
    [
        ("cuda", 15261, (4, 64), torch.bfloat16, 3),
        ("cuda", 25129, (1, 4096), torch.bfloat16, 7),
        ("cuda", 25129, (512,), torch.float32, 3),
        ("cuda", 15261, (512,), torch.float8_e4m3fn, 3),
        ("cuda", 16000, (4, 64), torch.bfloat16, 0),
        ("cuda", 16004, (4, 64), torch.float32, 0),
        ("cuda", 15261, (4, 63), torch.bfloat16, 0),  # a step of generate
        ("cuda", 511, (4, 64), torch.bfloat16, 0),
        ("cpu", 15261, (4, 64), torch.bfloat16, 0),
    ],
)
def test_rows_are_filled_up_to_16_bytes_on_a_gpu(device, features, tokens, dtype, more):
    with FakeTensorMode():
        x, weight = (torch.empty(*n, 8, device=device, dtype=dtype) for n in (tokens, [features]))
        assert lacking(x, weight) == more


def test_a_product_is_computed_in_the_dtype_of_autocast():
    x, weight = torch.empty(2, 3), torch.empty(5, 3)
    assert dtype_of(x, weight) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert dtype_of(x, weight) == torch.bfloat16


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_filled_up_is_not_seen(bias):
    given = [torch.randn(2, 3, 5), torch.randn(7, 5), torch.randn(7) if bias else None]
    given = [None if t is None else t.double().requires_grad_() for t in given]
    asked = [t for t in given if t is not None]
    found = []
    for product in (F.linear, lambda *a: filled_up(F.linear, *a, 1)):
        y = product(*given)
        assert y.is_contiguous()
        first = torch.autograd.grad(y.pow(3).sum(), asked, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), asked)
        found.append([y, *first, *second])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def stepped(mesh, plan, options):
    """Logits and gradients, plain and with every column product filled up, in both dtypes of a step."""
    model = parallelize(model_of("gpt2", 2), Plan.loads(plan), mesh, **options)
    ids = torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS
    asked = []
    for narrow in (False, True):
        found = []
        for more in (0, 3):
            model.zero_grad()
            counted = []
            with (
                set_to(layers, lacking=lambda *a, more=more, counted=counted: counted.append(a) or more),
                torch.autocast("cpu", torch.bfloat16, enabled=narrow),
            ):
                out = model(input_ids=ids).logits
            out.float().square().sum().backward()
            asked.append(len(counted))
            found.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(*found, rtol=2**-5 if narrow else 1e-4, atol=2**-5 if narrow else 1e-5)
    return asked


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
def test_a_model_whose_products_are_filled_up_is_the_same(run_ranks, options):
    plan = make_plan(model_of("gpt2", 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2).dumps()
    asked = run_ranks(stepped, 2, plan, options, timeout=240)
    assert all(set(each) == {asked[0][0]} and each[0] >= 1 for each in asked)
