"""Each collective against arithmetic on all ranks' values at once, in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpconvert.parallel.comm import collectives
from tpconvert.parallel.comm.collectives import (
    all_gather,
    copy,
    copy_own,
    copy_shared,
    copy_span,
    gather,
    gather_slices,
    once,
    parts_of,
    reduce,
    reduce_scatter,
    scatter,
    scatter_slices,
    single,
)
from tpconvert.parallel.comm.mesh import dry_mesh
from tpconvert.parallel.layers.products import summed_product
from tpconvert.spec.layout import Block, Layout

DEGREES = [2, 3, 4]


def value(rank, *shape):
    """What a rank holds; every rank can say what any other does."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def run_through(function, x, mesh, grad):
    """Output and gradient; checks that neither the input nor the incoming gradient was written to."""
    x = x.clone().requires_grad_()
    before, grad_before = x.detach().clone(), grad.clone()
    y = function(x)
    y.backward(grad)
    assert torch.equal(x, before) and torch.equal(grad, grad_before)
    return y.detach(), x.grad


def copies(mesh):
    x, grads = value(9, 2, 5), [value(20 + r, 2, 5) for r in range(mesh.degree)]
    y, g = run_through(lambda x: copy(x, mesh), x, mesh, grads[mesh.rank])
    torch.testing.assert_close(y, x)
    torch.testing.assert_close(g, sum(grads))
    y, g = run_through(lambda x: copy_own(x * 1, mesh).mul_(2), x, mesh, grads[mesh.rank])
    torch.testing.assert_close(y, 2 * x)
    torch.testing.assert_close(g, 2 * sum(grads))
    with pytest.raises(RuntimeError, match="a view and is being modified inplace"):
        copy(x.clone().requires_grad_() * 1, mesh).mul_(2)
    y, g = run_through(lambda x: copy_span(x, 1, (1, 3), mesh), x, mesh, grads[mesh.rank])
    expected = grads[mesh.rank].clone()
    expected[:, 1:3] = sum(grads)[:, 1:3]
    torch.testing.assert_close(y, x)
    torch.testing.assert_close(g, expected)
    y, g = run_through(lambda x: single(x, mesh), x, mesh, grads[mesh.rank])
    torch.testing.assert_close(y, x)
    torch.testing.assert_close(g, grads[0] if mesh.rank == 0 else torch.zeros_like(x))


def sums(mesh):
    xs, grad = [value(r, 2, 5) for r in range(mesh.degree)], value(30, 2, 5)
    y, g = run_through(lambda x: reduce(x, mesh), xs[mesh.rank], mesh, grad)
    torch.testing.assert_close(y, sum(xs))
    torch.testing.assert_close(g, grad)
    y, g = run_through(lambda x: once(x * 1, mesh), xs[0], mesh, grad)
    torch.testing.assert_close(y, xs[0] if mesh.rank == 0 else torch.zeros(2, 5, dtype=torch.float64))
    torch.testing.assert_close(g, grad)


def pieces(mesh, dim, blocks):
    parts = parts_of(dim, blocks, mesh)
    shape = [2, 3, 4]
    shape[dim] = parts.size
    whole, grad = value(7, *shape), value(8, *shape)
    rows = torch.tensor([i for start, stop in parts.pieces for i in range(start, stop)], dtype=torch.long)
    mine, mine_grad = whole.index_select(dim, rows), grad.index_select(dim, rows)
    y, g = run_through(lambda x: gather(x, parts, mesh), mine, mesh, grad)
    torch.testing.assert_close(y, whole)
    torch.testing.assert_close(g, mine_grad)
    assert y.is_contiguous()
    y, g = run_through(lambda x: scatter(x, parts, mesh), whole, mesh, mine_grad)
    torch.testing.assert_close(y, mine)
    torch.testing.assert_close(g, grad)


def shared_rows(mesh):
    blocks = (Block(2, 3), Block(1, 2), Block(4, 1))
    parts = parts_of(1, blocks, mesh)
    mesh.connect([Layout(1, blocks)])
    size = parts.sizes[mesh.rank]
    grads = [value(40 + r, 2, parts.sizes[r]) for r in range(mesh.degree)]
    y, g = run_through(lambda x: copy_shared(x, parts, mesh), value(1, 2, size), mesh, grads[mesh.rank])
    torch.testing.assert_close(y, value(1, 2, size))
    # Ranks 0 and 1 share the first unit of 3 rows, 2 and 3 the second; all share the 2 rows; the last is cut.
    mates = [0, 1] if mesh.rank < 2 else [2, 3]
    torch.testing.assert_close(g[:, :3], sum(grads[r][:, :3] for r in mates))
    torch.testing.assert_close(g[:, 3:5], sum(grads)[:, 3:5])
    torch.testing.assert_close(g[:, 5:], grads[mesh.rank][:, 5:])


def slices(mesh, dim, size, rows):
    shape = [2, 3, 2]
    shape[dim] = size * mesh.degree
    mine = slice(mesh.rank * size, (mesh.rank + 1) * size)

    def own(x):
        if not rows:
            return x.movedim(dim, 0)[mine].movedim(0, dim)
        run = x.flatten(0, dim)
        count = len(run) // mesh.degree
        return run[mesh.rank * count : (mesh.rank + 1) * count].reshape(*shape[:dim], size, *shape[dim + 1 :])

    wholes, whole = [value(r, *shape) for r in range(mesh.degree)], value(50, *shape)
    for function, x, y, grad, expected in (
        (gather_slices, own(whole), whole, wholes[0], own(wholes[0])),
        (all_gather, own(whole), whole, wholes[mesh.rank], own(sum(wholes))),
        (scatter_slices, whole, own(whole), own(wholes[0]), wholes[0]),
        (reduce_scatter, wholes[mesh.rank], own(sum(wholes)), own(whole), whole),
    ):
        found, g = run_through(lambda x, f=function: f(x, dim, mesh, rows), x, mesh, grad.contiguous())
        torch.testing.assert_close(found, y, msg=f"{function.__name__} forward")
        torch.testing.assert_close(g, expected, msg=f"{function.__name__} backward")
        assert found.is_contiguous(), function.__name__
        run_through(lambda x, f=function: f(x, dim, mesh, rows).mul_(2), x, mesh, grad.contiguous())  # may be written


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("rows", [False, True], ids=["of each", "rows of all"])
def test_slices_are_joined_and_made_along_any_dim(run_ranks, degree, dim, size, rows):
    run_ranks(slices, degree, dim, size, rows)


class Copies(TorchDispatchMode):
    """Counts what is copied."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten.cat)
        return func(*args, **(kwargs or {}))


def copied(mesh, shape, rows):
    """How often something is copied to gather and scatter slices, forward and backward."""
    x = torch.ones(shape, requires_grad=True)
    with Copies() as seen:
        y = reduce_scatter(all_gather(x, 1, mesh, rows), 1, mesh, rows)
        y.backward(torch.ones(shape))
    return seen.count


def test_slices_of_rows_are_gathered_and_scattered_without_a_copy(run_ranks):
    few = run_ranks(copied, 2, (1, 2, 5), False)[0]  # what gloo copies by itself
    assert run_ranks(copied, 2, (3, 2, 5), True)[0] == few
    assert run_ranks(copied, 2, (3, 2, 5), False)[0] == few + 4


@pytest.mark.parametrize("function", [all_gather, gather_slices, reduce_scatter, scatter_slices])
def test_a_slice_of_a_dry_mesh_is_all_but_the_last(function):
    joins = function in (all_gather, gather_slices)
    assert function(torch.zeros(2, 5, 3), 1, dry_mesh(0, 4)).shape == (2, 6 if joins else 4, 3)


@pytest.mark.parametrize("degree", DEGREES)
def test_copy_is_identity_forward_and_sums_backward(run_ranks, degree):
    run_ranks(copies, degree)


@pytest.mark.parametrize("degree", DEGREES)
def test_reduce_sums_forward_and_once_counts_on_rank_0_only(run_ranks, degree):
    run_ranks(sums, degree)


@pytest.mark.parametrize(
    ("degree", "dim", "blocks"),
    [
        (2, 1, (Block(8),)),
        (2, 0, (Block(7),)),
        (3, 2, (Block(7),)),
        (3, 1, (Block(4, 2), Block(5))),
        (4, 0, (Block(2, 3), Block(2, 3))),
        (4, 1, (Block(2, (Block(2, 2),)), Block(1, 4))),
    ],
    ids=str,
)
def test_gather_joins_what_scatter_deals(run_ranks, degree, dim, blocks):
    run_ranks(pieces, degree, dim, blocks)


def test_copy_of_shared_rows_sums_each_run_over_its_holders(run_ranks):
    run_ranks(shared_rows, 4)


def compiled(mesh):
    """Every collective in one graph, without a break."""
    parts = parts_of(1, (Block(2, 2), Block(5)), mesh)
    shared = parts_of(1, (Block(1, 2), Block(4)), mesh)

    def chain(x, w):
        y = gather(scatter(copy(x, mesh), parts, mesh).sin(), parts, mesh)
        y = reduce(copy_span(y, 1, (2, 5), mesh) * once(w, mesh), mesh)
        return (copy_shared(scatter(y[:, :6], shared, mesh), shared, mesh) ** 2).sum()

    def gradients(function):
        x, w = value(1, 3, 9).requires_grad_(), value(2, 9).requires_grad_()
        loss = function(x, w)
        loss.backward()
        return loss.detach(), x.grad, w.grad

    eager = gradients(chain)
    traced = gradients(torch.compile(chain, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(traced, eager)
    with torch.no_grad():
        alone = torch.compile(chain, backend="aot_eager", fullgraph=True)(value(1, 3, 9), value(2, 9))
    torch.testing.assert_close(alone, eager[0])


def test_every_collective_compiles_into_one_graph(run_ranks):
    run_ranks(compiled, 2, timeout=120)


def sliced_lengths(mesh):
    """The collectives of slices in one graph for every length."""

    def chain(x):
        y = all_gather(scatter_slices(x, 1, mesh).sin(), 1, mesh)
        return (gather_slices(reduce_scatter(y * x, 1, mesh).cos(), 1, mesh) ** 2).sum()

    graph = torch.compile(chain, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (4, 6, 10):
        found = []
        for function in (chain, graph):
            x = value(1, 3, length).requires_grad_()
            loss = function(x)
            loss.backward()
            found.append((loss.detach(), x.grad))
        torch.testing.assert_close(found[1], found[0])


def test_slices_of_any_length_compile_into_one_graph(run_ranks):
    run_ranks(sliced_lengths, 2, timeout=120)


def twice(mesh):
    """Every collective in one function, and the same arithmetic on whole values."""
    degree = mesh.degree
    parts = parts_of(1, (Block(2, 2), Block(5)), mesh)
    layout = Layout(1, (Block(1, 2), Block(4)))
    shared = parts_of(1, layout.blocks, mesh)
    of_rank = [value(50 + r, 2, 9) for r in range(degree)]  # constants that differ between ranks

    def ours(x, w):
        mine = of_rank[mesh.rank]
        h = gather(scatter(x, parts, mesh).sin(), parts, mesh)
        a = reduce((copy(h, mesh) * mine).sin() + once(w, mesh), mesh)
        a = a + single(copy(h, mesh), mesh).cos()
        b = copy_span(a, 1, (2, 5), mesh)
        c = reduce((b[:, 2:5] * mine[:, 2:5]).sin(), mesh) * b[:, 5:8]
        d = copy_shared(scatter(a[:, :6], shared, mesh), shared, mesh)
        e = reduce((d * mine[:, : d.shape[1]]).sin().sum(1), mesh)
        f = all_gather(scatter_slices(x, 0, mesh).sin(), 0, mesh)
        i = gather_slices(reduce_scatter((f * mine).sin(), 0, mesh).sin(), 0, mesh)
        return c.sin().sum() + e.sin().sum() + i.sum()

    def whole(x, w):
        h = x.sin()
        a = sum((h * mine).sin() for mine in of_rank) + w + h.cos()
        c = sum((a[:, 2:5] * mine[:, 2:5]).sin() for mine in of_rank) * a[:, 5:8]
        e = 0
        for r, mine in enumerate(of_rank):
            d = torch.cat([a[:, start:stop] for start, stop in layout.pieces(r, degree)], 1)
            e = e + (d * mine[:, : d.shape[1]]).sin().sum(1)
        i = sum((h * mine).sin() for mine in of_rank).sin()
        return c.sin().sum() + e.sin().sum() + i.sum()

    found = []
    for function in (ours, whole):
        x, w = value(1, 2, 9).requires_grad_(), value(2, 2, 9).requires_grad_()
        first = torch.autograd.grad(function(x, w), (x, w), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, w), create_graph=True)
        third = torch.autograd.grad(sum(g.square().sum() for g in second), (x, w))
        found.append([g.detach() for g in (*first, *second, *third)])
    torch.testing.assert_close(*found)

    transformed = torch.func.grad(lambda x: ours(x, value(2, 2, 9)))(value(1, 2, 9))
    torch.testing.assert_close(transformed, found[1][0])


def test_gradients_of_gradients_are_those_of_whole_values(run_ranks):
    run_ranks(twice, 2)


def test_degree_1_and_dry_meshes_leave_no_trace_but_the_shape():
    x = torch.randn(2, 6, requires_grad=True)
    one = dry_mesh(0, 1)
    parts = parts_of(1, (Block(6),), one)
    for out in (copy(x, one), reduce(x, one), gather(x, parts, one), scatter(x, parts, one), once(x, one)):
        assert out is x
    dry = dry_mesh(2, 4)
    parts = parts_of(1, (Block(6),), dry)
    meta = torch.empty(2, 6, device="meta", requires_grad=True)
    assert copy(meta, dry) is meta and reduce(meta, dry) is meta
    part = scatter(meta, parts, dry)
    assert part.shape == (2, 1) and part.is_meta
    assert gather(part, parts, dry).shape == (2, 6)
    assert collectives.summed(meta, dry) is meta


def test_a_dry_mesh_joins_what_a_rank_has_over_again():
    """Values that decide how much there is would see ties among zeros: a search for peaks would find every place."""
    dry = dry_mesh(1, 3)
    part, parts = value(1, 2, 2), parts_of(1, (Block(7),), dry)
    torch.testing.assert_close(gather(part, parts, dry), part[:, [0, 1, 0, 1, 0, 1, 0]])
    torch.testing.assert_close(gather_slices(part, 1, dry), part[:, [0, 1, 0]])
    assert gather_slices(part[:, :0], 1, dry).shape == (2, 1)


def written_into(mesh, name, backend):
    """A gradient behind a write into what a collective made, eager and compiled."""
    x, weight = value(mesh.rank, 4, 6), value(7, 6, 6)
    made = {"reduce": lambda y: reduce(y, mesh), "summed product": lambda y: summed_product(y, weight, mesh)}
    made |= {"reduce scatter": lambda y: reduce_scatter(y, 0, mesh), "all gather": lambda y: all_gather(y, 0, mesh)}

    def written(x):
        y = made[name](x @ weight)
        y += 1
        return y.square().sum()

    found = []
    for function in (written, torch.compile(written, backend=backend, fullgraph=True)):
        given = x.clone().requires_grad_()
        found.append(torch.autograd.grad(function(given), given)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["reduce", "summed product", "reduce scatter", "all gather"])
def test_what_a_collective_made_may_be_written_into_where_it_is_compiled(run_ranks, name, backend):
    run_ranks(written_into, 2, name, backend, timeout=120)
