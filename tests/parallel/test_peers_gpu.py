"""Exchanges of two GPUs: the values NCCL gives, in eager code, in compiled layers and in recorded steps."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.compare import models
from tpconvert.parallel import cross_entropy, make_mesh, parallelize
from tpconvert.parallel.compiled.graphed import GraphedStep
from tpconvert.parallel.compiled.layers import compile_layers
from tpconvert.parallel.convert import output_gathers
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore")


def on_gpus(fn, folder, *args):
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs")
    mp.start_processes(_on_rank, (fn, str(folder), args), 2, start_method="spawn")


def _on_rank(rank, fn, folder, args):
    os.environ["NCCL_NVLS_ENABLE"], os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "0", "1"
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    fn(torch.device("cuda", rank), *args)
    torch.cuda.synchronize()
    dist.barrier()


def by_nccl(x, kind, mesh):
    if kind == "sum":
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=mesh.group)
    elif kind == "gather":
        out = x.new_empty(2 * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=mesh.group)
    else:
        out = x.new_empty(len(x) // 2, *x.shape[1:])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=mesh.group)
    return out


def values(device):
    mesh = make_mesh(2, device=device, collectives="copies")
    random = torch.Generator(device).manual_seed(dist.get_rank())
    for number in range(120):
        rows, kind = 2 + 2 * (number * 37 % 300), ("sum", "gather", "scatter")[number % 3]
        dtype = (torch.bfloat16, torch.float32, torch.float64, torch.int64)[number % 4]
        x = (100 * torch.randn(rows, 48, generator=random, device=device)).to(dtype)
        x = x.t().contiguous().t() if number % 5 == 0 else x
        assert torch.equal(mesh.peers.exchange(x, kind), by_nccl(x, kind, mesh)), (number, kind, dtype)
        mine = torch.randn(rows, 48, generator=random, device=device).to(dtype)
        crossed = mesh.peers.receive(mesh.peers.send(x, "cross"), mine=mine)
        assert torch.equal(crossed, mine + by_nccl(x, "gather", mesh).chunk(2)[mesh.peers.other])
    given = [torch.randn(64, 512, generator=random, device=device) for _ in range(24)]
    for most in (2, 5, 24):  # under way at once, ended in another order
        for at in range(0, 24, most):
            sent = [mesh.peers.send(x, "sum") for x in given[at : at + most]]
            for x, each in reversed(list(zip(given[at : at + most], sent, strict=True))):
                assert torch.equal(mesh.peers.receive(each), by_nccl(x, "sum", mesh))


def recorded_exchanges(device):
    """Two graphs and what is in none, on several streams, in any order: each gives the sums of its own inputs."""
    mesh = make_mesh(2, device=device, collectives="copies")
    inputs = [[torch.zeros(256, 1024, device=device) for _ in range(5)] for _ in range(2)]
    graphs, outs, stream = [], [], torch.cuda.Stream()
    mesh.peers.exchange(torch.ones(2048, 1024, device=device), "sum")  # the memory is there before it is recorded
    torch.cuda.synchronize()
    for xs in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            first, second = mesh.peers.send(xs[0], "sum"), mesh.peers.send(xs[1], "sum")
            found = [mesh.peers.receive(second), mesh.peers.receive(first)]
            found += [mesh.peers.exchange(x, "sum") for x in xs[2:]]
        graphs.append(graph)
        outs.append(found)
    for turn in range(60):
        which = turn * 7 % 3
        if which == 2:
            x = torch.full((512, 1024), float(turn * (mesh.rank + 1)), device=device)
            assert (mesh.peers.exchange(x, "sum") == 3 * turn).all()
            with torch.cuda.stream(stream):
                y = mesh.peers.exchange(x + 1, "sum")
            torch.cuda.current_stream().wait_stream(stream)
            assert (y == 3 * turn + 2).all()
            continue
        for number, x in enumerate(inputs[which]):
            x.fill_(float(turn * (mesh.rank + 1) + number))
        graphs[which].replay()
        for number, out in zip((1, 0, 2, 3, 4), outs[which], strict=True):
            assert (out == 3 * turn + 2 * number).all(), (turn, number)


def trained(device, text, compiled, options):
    """A step with copies gives what the same step gives over NCCL, and the same again when it is recorded."""
    config, plan = models.config_of("llama", 2, 1, True, models.UNMASKED), Plan.loads(text)
    given = []
    for number in range(3):
        random = torch.Generator().manual_seed(number)
        given.append([torch.randint(0, config.vocab_size, (1, 1024), generator=random).to(device) for _ in range(2)])
    found = []
    for collectives in ("nccl", "copies"):
        torch.compiler.reset()
        mesh = make_mesh(2, device=device, collectives=collectives)
        torch.manual_seed(0)
        whole, gathers = models.KINDS["llama"][0](config), output_gathers(plan)
        module = parallelize(whole, plan, mesh, gather_output=False, **options).to(device).train()

        def loss(ids, labels, module=module, mesh=mesh, gathers=gathers):
            return cross_entropy(module(input_ids=ids, use_cache=False).logits, labels, mesh, gathers[0].blocks)

        if compiled:
            compile_layers(module)
        found.append([stepped(module, loss, batch) for batch in given])
        step = GraphedStep(module, loss, given[0])
        found.append([stepped(module, step, batch, own=True) for batch in (*given, *given)][3:])
        if collectives == "copies":
            assert mesh.peers.memory.ring.count > 0 and not mesh.peers.under_way
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)


def stepped(module, step, batch, own=False):
    module.zero_grad()
    loss = step(*batch)
    if not own:
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.gpu
@pytest.mark.parametrize("checked", [values, recorded_exchanges])
def test_what_gpus_exchange_is_what_nccl_gives(checked, tmp_path):
    on_gpus(checked, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"waves": 2}, {"sequence_parallel": True}], ids=["plain", "waves", "sliced"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_converted_model_is_the_same_with_copies(compiled, options, tmp_path):
    config = models.config_of("llama", 2, 1, True, models.UNMASKED)
    plan = make_plan(models.skeleton_of("llama", config), models.example_of("llama", config), tp=2).dumps()
    on_gpus(trained, tmp_path, plan, compiled, options)
