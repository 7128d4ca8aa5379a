"""The ranks of one start find one another, whatever earlier starts have left in the store."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tpconvert.errors import TrainError
from tpconvert.train.together import meeting
from tpconvert.train.together.meeting import meet


def started(store, counts: list[int], late: int = 0) -> list[tuple[str, bool]]:
    """What the ranks of one start agree on, whose machines have counted so many starts; one of them comes late."""

    def rank(number: int) -> tuple[str, bool]:
        time.sleep(0.3 * (number == late))
        return meet(store, number, len(counts), counts[number] > 0)

    with ThreadPoolExecutor(len(counts)) as pool:
        return list(pool.map(rank, range(len(counts))))


@pytest.mark.parametrize("late", [0, 2])
def test_ranks_agree_also_where_their_machines_have_counted_unequally(late: int):
    store = dist.HashStore()
    first = started(store, [0, 0, 0], late)
    second = started(store, [0, 0, 1], late)
    third = started(store, [0, 0, 1], late)
    for found, again in ((first, False), (second, True), (third, True)):
        assert len(set(found)) == 1 and found[0][1] is again
    assert len({found[0][0] for found in (first, second, third)}) == 3
    assert started(store, [1]) != started(store, [1]) and started(store, [1])[0][1]


def test_a_rank_that_was_answered_by_a_start_that_is_over_asks_again(monkeypatch):
    monkeypatch.setattr(meeting, "ANSWER", 0.3)
    store, found = dist.HashStore(), []
    thread = threading.Thread(target=lambda: found.append(meet(store, 1, 2, False)))
    thread.start()
    while not store.check(["word/1"]):
        time.sleep(0.01)
    store.set(f"name/{store.get('word/1').decode()}", "old")
    while not store.check(["here/old/1"]):
        time.sleep(0.01)
    name = meet(store, 0, 2, False)
    thread.join()
    assert found == [name] and name[0] != "old"


def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 0.2)
    with pytest.raises(TrainError, match="Ranks 1, 2 did not come within"):
        meet(dist.HashStore(), 0, 3, False)
    with pytest.raises(TrainError, match="Rank 1 has waited"):
        meet(dist.HashStore(), 1, 3, False)
