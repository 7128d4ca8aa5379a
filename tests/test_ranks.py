"""The pool of ranks itself: a failure is told quickly, with its traceback, and the next test gets new ranks."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Pool, RankFailedError


def place(mesh, word):
    x = torch.ones(())
    if mesh.group is not None:
        dist.all_reduce(x, group=mesh.group)
    return word, mesh.rank, mesh.dp_rank, x.item()


def one_raises(mesh):
    if mesh.rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.all_reduce(torch.ones(()), group=mesh.group)  # waits for rank 1 for ever


def one_dies(mesh):
    if mesh.rank == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(()), group=mesh.group)


def one_sleeps(mesh):
    time.sleep(300 if mesh.rank == 1 else 0)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_answers_come_in_order_of_rank(run_ranks, degree):
    assert run_ranks(place, degree, "hello") == [("hello", rank, 0, degree) for rank in range(degree)]


def test_dp_ranks_are_the_outer_axis(run_ranks):
    assert run_ranks(place, 2, "hello", dp=2) == [("hello", r, d, 2.0) for d in (0, 1) for r in (0, 1)]


def begun(pool):
    """The time at which ranks stand that have imported all; a busy machine takes as long for that as it likes."""
    assert pool.run(place, 2, "here") == [("here", rank, 0, 2.0) for rank in range(2)]
    return time.monotonic()


def test_a_failing_dying_or_hanging_rank_fails_the_test_and_the_pool_recovers():
    pool = Pool(2)
    try:
        start = begun(pool)
        with pytest.raises(RankFailedError, match=r"Rank 1 failed:\n(.|\n)*ValueError: rank 1 has had enough"):
            pool.run(one_raises, 2)
        assert time.monotonic() - start < 30 and not pool.ranks  # rank 0 would have waited for 90 s
        begun(pool)
        with pytest.raises(RankFailedError, match=r"Rank \d died|Rank 0 failed"):
            pool.run(one_dies, 2)
        begun(pool)
        with pytest.raises(RankFailedError, match=r"Ranks \[1\] gave no answer within 10 s"):
            pool.run(one_sleeps, 2, timeout=10)
    finally:
        pool.close()


def test_ranks_that_start_too_late_answer_no_later_task(monkeypatch):
    """What they say once they are there is no answer of the next function."""
    pool = Pool(2)
    try:
        with monkeypatch.context() as patch, pytest.raises(RankFailedError, match="gave no answer within 0 s"):
            patch.setattr("tests.ranks.START_LIMIT", 0.0)
            pool.run(place, 2, "first")
        assert not pool.ranks
        assert pool.run(place, 2, "second") == [("second", rank, 0, 2.0) for rank in range(2)]
    finally:
        pool.close()
