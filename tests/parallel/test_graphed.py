"""Steps recorded as CUDA graphs: the numbers of the step itself, for every batch, and what cannot be recorded."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.compare import models
from tpconvert.errors import PlanError
from tpconvert.parallel import cross_entropy, make_mesh, parallelize
from tpconvert.parallel.compiled.graphed import GraphedStep, _why
from tpconvert.parallel.convert import output_gathers
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore")


def plain(module, loss, batch):
    """The loss and the gradients of one step."""
    module.zero_grad()
    value = loss(*batch)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in module.parameters())]


def recorded(module, step, batch):
    """The same of a recorded one."""
    value = step(*batch)
    return [value, *(p.grad.clone() for p in module.parameters())]


def normed():
    """A model with running statistics, on a GPU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)).cuda()


def batches(count, rows=8):
    return [(torch.randn(rows, 16, device="cuda"), torch.randn(rows, 16, device="cuda")) for _ in range(count)]


def test_a_module_on_a_cpu_is_refused():
    with pytest.raises(PlanError, match="on a GPU, which this is not"):
        GraphedStep(nn.Linear(3, 3), lambda x: x.sum(), [torch.ones(2, 3)])


def test_what_went_wrong_first_is_told_and_a_full_gpu_is_still_one():
    def chained(first: Exception) -> Exception:
        try:
            try:
                raise first
            finally:
                raise RuntimeError("capture failed")
        except RuntimeError as error:
            return error

    told = _why(chained(ValueError("a wait.\nand more")))
    assert isinstance(told, PlanError) and told.message == "The step cannot be recorded as a CUDA graph: a wait."
    full = torch.OutOfMemoryError("CUDA out of memory")
    assert _why(chained(full)) is full


@pytest.mark.gpu
def test_each_batch_gives_its_own_loss_and_gradients_and_statistics_go_on():
    one, other = normed(), normed()
    given = batches(4)

    def loss_of(module):
        return lambda x, y: nn.functional.mse_loss(module(x), y)

    step = GraphedStep(one, loss_of(one), given[0])
    for name, buffer in one.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name)), name  # recording has not moved them
    for batch in given:
        torch.testing.assert_close(recorded(one, step, batch), plain(other, loss_of(other), batch))
        one.zero_grad()
    for name, buffer in one.named_buffers():
        torch.testing.assert_close(buffer, other.get_buffer(name))


@pytest.mark.gpu
def test_dropout_drops_anew_each_time():
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).cuda()
    step = GraphedStep(module, lambda x: module(x).square().mean(), [torch.ones(8, 16, device="cuda")])
    losses = [float(step(torch.ones(8, 16, device="cuda"))) for _ in range(4)]
    assert len(set(losses)) == 4


@pytest.mark.gpu
def test_gradients_add_up_until_they_are_forgotten():
    one, other = normed(), normed()
    step = GraphedStep(one, lambda x, y: ((one(x) - y).square().mean(), x.sum()), batches(1)[0], accumulate=True)
    for _ in range(2):
        step.zero_grad()
        one.zero_grad()
        other.zero_grad()
        for x, y in batches(3):
            loss, total = step(x, y)
            expected = (other(x) - y).square().mean()
            expected.backward()
            assert torch.equal(total, x.sum())
            torch.testing.assert_close(loss, expected.detach())
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda y: y * float(y.detach().sum()), r"cannot be recorded as a CUDA graph: .*captur"),
        (lambda y: y * torch.rand(()).item(), "draws random numbers on the CPU"),
    ],
    ids=["waits", "draws"],
)
def test_what_a_graph_would_repeat_or_cannot_hold_is_refused(forward, message):
    module = nn.Linear(16, 16).cuda()
    with pytest.raises(PlanError, match=message):
        GraphedStep(module, lambda x, y: forward(module(x)).sum(), batches(1)[0])
    torch.cuda.synchronize()
    assert torch.rand(3, device="cuda").sum().item() > 0  # all goes on as before


@pytest.mark.gpu
def test_another_size_and_moved_parameters_are_refused():
    module = normed()
    step = GraphedStep(module, lambda x, y: (module(x) - y).square().mean(), batches(1)[0])
    with pytest.raises(PlanError, match=r"recorded for float32\[8, 16\], not float32\[4, 16\]"):
        step(*batches(1, rows=4)[0])
    module[0].weight.data = module[0].weight.data.clone()
    with pytest.raises(PlanError, match="parameters have moved"):
        step(*batches(1)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_converted_model_over_nccl_is_the_same_recorded(compiled, sequence_parallel, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs")
    config = models.config_of("llama", 2, 1, True, models.UNMASKED)
    plan = make_plan(models.skeleton_of("llama", config), models.example_of("llama", config), tp=2).dumps()
    mp.start_processes(_on_rank, (str(tmp_path), plan, compiled, sequence_parallel), 2, start_method="spawn")


@pytest.mark.gpu
def test_dropout_of_cut_and_whole_regions_draws_what_it_would_not_recorded(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs")
    config = dropping()
    plan = make_plan(models.skeleton_of("bert-large", config), models.example_of("bert-large", config), tp=2).dumps()
    mp.start_processes(_drop_on_rank, (str(tmp_path), plan), 2, start_method="spawn")


def dropping():
    """A small BERT, whose attention drops on what is cut and whose residuals on what is whole."""
    config = models.config_of("bert-large", 2, 1, True)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.2
    return config


def _drop_on_rank(rank, folder, text):
    _begin(rank, folder)
    config, plan, mesh = dropping(), Plan.loads(text), make_mesh(2, device=torch.device("cuda", rank))
    torch.manual_seed(0)
    module = models.KINDS["bert-large"][0](config).to(mesh.device).train()
    parallelize(module, plan, mesh)
    given = [
        torch.randint(5, config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(n)).to(mesh.device)
        for n in range(3)
    ]

    def loss(ids):
        return module(input_ids=ids).logits.float().square().mean()

    def seeded(run):
        found = []
        for number, ids in enumerate(given):
            torch.manual_seed(number)
            found.append(run(ids))
        return found

    expected = seeded(lambda ids: plain(module, loss, [ids]))
    step = GraphedStep(module, loss, given[:1])
    assert len(step.tapes) == 1 and len(step.tapes[0].cuts) >= 2
    for got, want in zip(seeded(lambda ids: recorded(module, step, [ids])), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    assert len({float(want[0]) for want in expected}) == 3
    after = seeded(lambda ids: plain(module, loss, [ids]))
    assert all(torch.equal(a, b) for a, b in zip(after[0], expected[0], strict=True))  # streams are as they were
    os._exit(0)


def _begin(rank, folder):
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    method = f"file://{folder}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=method, rank=rank, world_size=2)


def _on_rank(rank, folder, text, compiled, sequence_parallel):
    _begin(rank, folder)
    config, plan = models.config_of("llama", 2, 1, True, models.UNMASKED), Plan.loads(text)
    mesh = make_mesh(2, device=torch.device("cuda", rank))
    torch.manual_seed(0)
    whole = models.KINDS["llama"][0](config)
    gathers = output_gathers(plan)
    parallelize(whole, plan, mesh, gather_output=False, sequence_parallel=sequence_parallel)
    module = whole.to(mesh.device).train()
    given = []
    for number in range(3):
        random = torch.Generator().manual_seed(number)
        ids = (torch.randint(0, config.vocab_size, (1, 64), generator=random) for _ in range(2))
        given.append([i.to(mesh.device) for i in ids])

    def loss(ids, labels):
        return cross_entropy(module(input_ids=ids, use_cache=False).logits, labels, mesh, gathers[0].blocks)

    expected = [plain(module, loss, batch) for batch in given]
    if compiled:
        from tpconvert.parallel.compiled.layers import compile_layers

        compile_layers(module)
    step = GraphedStep(module, loss, given[0])
    for batch, want in zip(given, expected, strict=True):
        torch.testing.assert_close(recorded(module, step, batch), want, rtol=1e-3, atol=1e-4)
    os._exit(0)  # taking NCCL down takes seconds
