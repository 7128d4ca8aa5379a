import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.frame import layouts
from tpconvert.checkpoint.tensors.pieces import gather_pieces, same_bytes, take_pieces, unequal_replicas
from tpconvert.errors import CheckpointError
from tpconvert.spec.layout import Block, Layout

SHARED = Layout(0, (Block(2, 2),))  # two units on four ranks: each is held twice


@given(st.data(), st.integers(1, 8))
def test_gathering_what_was_taken_gives_the_tensor_back(data, degree):
    layout, shape = data.draw(layouts((degree,)))
    whole = torch.rand(shape)
    parts = [take_pieces(whole, layout, rank, degree) for rank in range(degree)]
    assert [tuple(p.shape) for p in parts] == [layout.local_shape(shape, r, degree) for r in range(degree)]
    assert torch.equal(gather_pieces(parts, layout, shape, check=True), whole)


def test_a_whole_tensor_is_the_same_on_every_rank():
    whole = torch.rand(3, 2)
    parts = [take_pieces(whole, Layout(), rank, 3) for rank in range(3)]
    assert torch.equal(gather_pieces(parts, Layout(), (3, 2), check=True), whole)


def test_the_first_holder_counts_where_ranks_share():
    parts = [torch.full((2,), float(rank)) for rank in range(4)]
    assert gather_pieces(parts, SHARED, (4,)).tolist() == [0, 0, 2, 2]


def test_unequal_replicas_are_named():
    parts = [torch.zeros(2), torch.zeros(2), torch.ones(2), torch.tensor([1.0, 2.0])]
    assert unequal_replicas(parts, SHARED) == [(2, 3)]
    with pytest.raises(CheckpointError, match="Ranks 2 and 3 share rows"):
        gather_pieces(parts, SHARED, (4,), check=True)
    assert unequal_replicas([torch.zeros(2), torch.ones(2)], Layout()) == [(0, 1)]


def test_empty_and_scalar_tensors_pass():
    empty = Layout(0, (Block(0),))
    parts = [take_pieces(torch.empty(0, 3), empty, rank, 2) for rank in range(2)]
    assert gather_pieces(parts, empty, (0, 3)).shape == (0, 3)
    assert gather_pieces([torch.tensor(1.5)] * 2, Layout(), ()).item() == 1.5


def test_bytes_tell_signed_zeros_and_nans_apart():
    assert same_bytes(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
