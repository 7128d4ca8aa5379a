"""Memory that another rank writes into, simulated: what was sent is what is read, however far one rank runs ahead."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpconvert.parallel.comm.ring import FLAGS, Ring


class Rank:
    """A stream that computes, and one that copies; each takes its steps in order, and neither waits for the other's."""

    def __init__(self, size):
        self.size, self.memory, self.flags = size, [None] * size, set()
        self.computing, self.copying, self.begun, self.copied, self.read = [], [], set(), set(), []

    def program(self, steps):
        """What its two streams do; the same ring decides on both."""
        ring, under_way, number = Ring(self.size), {}, -1
        for what, which, context in steps:
            if what == "end":
                place = under_way.pop(which, None)
                if place is not None:
                    ring.end(place)
                    self.computing.append(("end", which, place))
                continue
            number += 1
            found = ring.begin(which, context, context[0] > 0)
            if found is None:  # no room beside what is under way: it would go another way
                continue
            place, meets = found
            if meets:
                self.computing.append(("meet", number, None))
            self.computing.append(("begin", number, place))
            self.copying.append((number, place))
            under_way[number] = place


def runs(ranks, order):
    """Let both run, a step of any stream at a time until all is done; each stream sleeps for long now and then."""
    asleep = set()
    while any(r.computing or r.copying for r in ranks):
        able = [(key, step) for i, rank in enumerate(ranks) for key, step in ready(rank, ranks[1 - i], i)]
        assert able, "both wait for ever"
        if order.random() < 0.1:
            asleep = {(i, what) for i in (0, 1) for what in ("copies", "computes") if order.random() < 0.5}
        order.choice([step for key, step in able if key not in asleep] or [step for _, step in able])()


def ready(rank, other, which):
    if rank.copying and rank.copying[0][0] in rank.begun:
        yield (which, "copies"), lambda: copied(rank, other)
    if not rank.computing:
        return
    what, number, place = rank.computing[0]
    key = which, "computes"
    if what == "begin":
        yield key, lambda: rank.begun.add(rank.computing.pop(0)[1])
    elif what == "end" and place.flag in rank.flags and number in rank.copied:
        yield key, lambda: received(rank)
    elif what == "meet" and other.computing and other.computing[0][:2] == ("meet", number):
        yield key, lambda: (rank.computing.pop(0), other.computing.pop(0))


def copied(rank, other):
    number, place = rank.copying.pop(0)
    assert place.flag not in other.flags, "a flag is set that is not yet taken down"
    other.memory[place.start : place.stop] = [number] * (place.stop - place.start)
    other.flags.add(place.flag)
    rank.copied.add(number)


def received(rank):
    _, number, place = rank.computing.pop(0)
    rank.flags.remove(place.flag)
    assert rank.memory[place.start : place.stop] == [number] * (place.stop - place.start)
    rank.read.append(number)


def steps_of(sizes, most, rng, contexts):
    """Begins and ends in any order, so many under way at most."""
    steps, under_way, left = [], [], list(enumerate(sizes))
    while left or under_way:
        if left and len(under_way) < most and (not under_way or rng.random() < 0.6):
            number, size = left.pop(0)
            steps.append(("begin", size, rng.choice(contexts)))
            under_way.append(number)
        else:
            steps.append(("end", under_way.pop(rng.randrange(len(under_way))), None))
    return steps


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=90),
    most=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    contexts=st.sampled_from([[(0, 1)], [(0, 1), (0, 2)], [(0, 1), (1, 1), (2, 1)]]),
)
def test_what_was_sent_is_what_is_read(sizes, most, seed, contexts):
    rng = random.Random(seed)
    steps = steps_of(sizes, most, rng, contexts)
    ranks = [Rank(256 * 6), Rank(256 * 6)]
    for rank in ranks:
        rank.program(steps)
    runs(ranks, rng)
    assert ranks[0].read == ranks[1].read and len(ranks[0].read) > len(sizes) // 2


def meetings(sizes, ring, under_way=1):
    """Which begins have to meet, where so many are begun before the first of them ends."""
    found, places = [], []
    for size in sizes:
        place, meets = ring.begin(size, (0, 1), False)
        places.append(place)
        found.append(meets)
        if len(places) == under_way:
            for p in places:
                ring.end(p)
            places.clear()
    return found


def test_ranks_meet_once_and_then_know_of_each_other_what_they_need():
    assert meetings([512] * 80, Ring(1024)) == [True] + [False] * 79
    assert meetings([256] * 80, Ring(1024), under_way=2) == [True] + [False] * 79


def test_with_room_for_one_they_meet_each_time():
    assert meetings([512] * 5, Ring(512)) == [True] * 5


def test_what_is_not_in_a_graph_meets_once_there_is_a_graph():
    ring = Ring(4096)
    for context, recording, wanted in [
        ((0, 1), False, True),
        ((0, 1), False, False),
        ((7, 1), True, True),
        ((7, 1), True, False),
        ((8, 1), True, True),
        ((0, 1), False, True),
        ((0, 1), False, True),
    ]:
        place, meets = ring.begin(256, context, recording)
        ring.end(place)
        assert meets is wanted


@pytest.mark.parametrize(("size", "begun"), [(1024, 4), (2**20, FLAGS // 2 - 1)])
def test_no_place_is_given_that_is_still_read_or_has_no_flag(size, begun):
    ring = Ring(size)
    for _ in range(begun):
        assert ring.begin(256, (0, 1), False) is not None
    assert ring.begin(256, (0, 1), False) is None
