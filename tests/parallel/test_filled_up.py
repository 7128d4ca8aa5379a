"""Products of odd widths are filled up where that is faster, and give what the plain ones give."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.parallel.test_products import set_to
from tests.parallel.test_wire import TOKENS, WORDS, model_of
from tpconvert.parallel import parallelize
from tpconvert.parallel.layers import linear as layers
from tpconvert.parallel.layers.loss import cross_entropy
from tpconvert.parallel.layers.products import dtype_of, kept_product, lacking
from tpconvert.planning import make_plan
from tpconvert.spec.layout import Block
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
@pytest.mark.parametrize("apart", [True, False], ids=["gradient of the same rows", "gradient in one run"])
@pytest.mark.parametrize("features", [7, 8, 3])
def test_rows_of_a_product_begin_apart_and_nothing_else_differs(bias, apart, features):
    given = [torch.randn(2, 3, 5), torch.randn(features, 5), torch.randn(features) if bias else None]
    given = [None if t is None else t.double().requires_grad_() for t in given]
    asked = [t for t in given if t is not None]
    grad = torch.randn(2, 3, features + 1).double()[..., :-1]
    found = []
    for product in (F.linear, lambda *a: kept_product(*a, 1)):
        y = product(*given)
        plain = torch.autograd.grad(y, asked, grad if apart else grad.contiguous(), retain_graph=True)
        first = torch.autograd.grad(y.pow(3).sum(), asked, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), asked)
        found.append([y, *plain, *first, *second])
    assert found[1][0].stride() == (3 * (features + 1), features + 1, 1)
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
        if narrow:  # rounded here and there, which shows most where terms cancel
            assert all((a - b).norm() <= 2**-6 * a.norm() for a, b in zip(*found, strict=True))
        else:
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    return asked


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
def test_a_model_whose_products_are_filled_up_is_the_same(run_ranks, options):
    plan = make_plan(model_of("gpt2", 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2).dumps()
    asked = run_ranks(stepped, 2, plan, options, timeout=240)
    assert all(set(each) == {asked[0][0]} and each[0] >= 1 for each in asked)


def with_loss(mesh, name, plan):
    """Loss and gradients of logits that stay cut: as they are, and in rows that begin apart, eager and compiled."""
    model = parallelize(model_of(name, 2), Plan.loads(plan), mesh, gather_output=False)
    ids = torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS
    found, rows = [], []
    for more, loss_of in (
        (0, cross_entropy),
        (3, cross_entropy),
        (3, torch.compile(cross_entropy, backend="aot_eager")),
    ):
        model.zero_grad()
        with set_to(layers, lacking=lambda x, w, more=more: more if len(w) * 2 == WORDS else 0):
            logits = model(input_ids=ids).logits
        logits.register_hook(lambda grad, rows=rows: rows.append(grad.stride()))
        loss = loss_of(logits, ids, mesh, (Block(WORDS),))
        loss.backward()
        rows.append(logits.stride())
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-4, atol=1e-6)
    return rows


@pytest.mark.parametrize("name", ["llama", "gpt2"], ids=["words apart", "words tied"])
def test_the_loss_of_cut_logits_takes_and_gives_rows_that_begin_apart(run_ranks, name):
    plan = make_plan(model_of(name, 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2).dumps()
    words, length = WORDS // 2, TOKENS[1]
    run, apart = (length * words, words, 1), (length * (words + 3), words + 3, 1)
    assert run_ranks(with_loss, 2, name, plan, timeout=240) == [[run, run, apart, apart, apart, apart]] * 2
