import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.checkpoint.frame import fits, layout_size, layouts
from tpconvert.errors import PlanError
from tpconvert.spec.layout import Block, Layout, refuse_degree, share


def test_pieces_of_the_table_in_the_docs():
    assert Layout(0, (Block(11008),)).pieces(1, 4) == [(2752, 5504)]
    assert Layout(0, (Block(8, 128),)).pieces(5, 16) == [(256, 384)]
    fused = Layout(0, (Block(4, 2), Block(2, 2), Block(2, 2)))
    assert fused.pieces(1, 2) == [(4, 8), (10, 12), (14, 16)]
    assert Layout().pieces(0, 3) == []


def test_units_are_dealt_unevenly_by_at_most_one():
    assert [share(14, r, 4) for r in range(4)] == [(0, 4), (4, 8), (8, 11), (11, 14)]
    assert [Layout(0, (Block(14, 8),)).local_size(r, 4) for r in range(4)] == [32, 32, 24, 24]


def test_ranks_that_share_a_unit_deal_its_blocks_among_them():
    q = Layout(0, (Block(2, (Block(4, 8),)),))
    assert [q.pieces(r, 4) for r in range(4)] == [[(0, 16)], [(16, 32)], [(32, 48)], [(48, 64)]]


def test_a_degree_that_cannot_share_units_says_which_can():
    with pytest.raises(
        PlanError, match=r"6 units cannot be shared by 8 ranks \(8 % 6 is not 0\)\. Use a degree up to 6"
    ):
        Layout(0, (Block(6),)).pieces(0, 8)


def test_an_empty_dim_is_dealt_as_nothing():
    layout = Layout(0, (Block(0),))
    assert layout.pieces(1, 4) == []
    assert layout.local_shape((0, 3), 1, 4) == (0, 3)
    assert layout.shared(1, 4) == []


@settings(deadline=None)  # the first draw is slow on a busy machine
@given(st.data(), st.integers(1, 8))
def test_pieces_of_all_ranks_cover_the_dim(data, degree):
    layout, shape = data.draw(layouts((degree,)))
    held = [row for rank in range(degree) for a, b in layout.pieces(rank, degree) for row in range(a, b)]
    assert set(held) == set(range(layout_size(layout)))
    assert layout.fits(shape)


@given(st.data(), st.integers(1, 8))
def test_shared_names_exactly_the_ranks_that_hold_each_row(data, degree):
    layout, _ = data.draw(layouts((degree,)))
    holders = {row: set() for row in range(layout_size(layout))}
    for rank in range(degree):
        for a, b in layout.pieces(rank, degree):
            for row in range(a, b):
                holders[row].add(rank)
    for rank in range(degree):
        local = [row for a, b in layout.pieces(rank, degree) for row in range(a, b)]
        told = {i: set(ranks) for (a, b), ranks in layout.shared(rank, degree) for i in range(a, b)}
        for i, row in enumerate(local):
            assert told.get(i, {rank}) == holders[row]


@given(st.data(), st.integers(1, 8))
def test_pieces_rise_and_local_sizes_add_up(data, degree):
    layout, shape = data.draw(layouts((degree,)))
    for rank in range(degree):
        pieces = layout.pieces(rank, degree)
        assert pieces == sorted(pieces)
        assert all(a < b for a, b in pieces)
        assert layout.local_shape(shape, rank, degree)[layout.dim] == sum(b - a for a, b in pieces)


@settings(deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 24))
def test_a_degree_is_refused_where_some_rank_cannot_be_dealt(data, degree, other):
    layout, _ = data.draw(layouts((degree,)))
    try:
        refuse_degree(layout.blocks, other)
    except PlanError:
        assert not fits(layout, other)
    else:
        assert fits(layout, other)


@given(st.data(), st.integers(1, 8))
def test_json_gives_the_layout_back(data, degree):
    layout, _ = data.draw(layouts((degree,)))
    assume(fits(layout, degree))
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("block", [[-1, 1], [2, -3], [True, 1], ["2", 1], [2, 1.5], [2]])
def test_a_damaged_block_is_refused(block):
    with pytest.raises((ValueError, TypeError)):
        Block.from_json(block)


@pytest.mark.parametrize(
    "layout",
    [None, [], 0, {"dim": 0}, {"dim": True, "blocks": []}, {"dim": 1.0, "blocks": []}, {"dim": 0, "blocks": {}},
     {"dim": 0, "blocks": [], "block": []}],
)  # fmt: skip
def test_a_damaged_layout_is_refused_and_not_taken_for_a_whole_tensor(layout):
    with pytest.raises(ValueError, match="no layout"):
        Layout.from_json(layout)


def test_a_layout_fits_only_a_dim_of_its_size():
    layout = Layout(1, (Block(4, 2),))
    assert layout.fits((3, 8))
    assert not layout.fits((8, 3))
    assert not layout.fits((8,))
