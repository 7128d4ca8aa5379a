"""Several sources in one stream: shares, order, going on from any position, and what is held out."""

import numpy as np
import pytest

from tests.train.test_data import take
from tpconvert.errors import ConfigError
from tpconvert.train.data.batch import fingerprint
from tpconvert.train.data.order import Batches, Position
from tpconvert.train.data.run import Held
from tpconvert.train.examples.objectives import Part, split


def blend(sizes=(40, 10), weights=(3.0, 1.0), **place) -> Batches:
    """Sequences of one token, which says its source by its hundreds."""
    sources = tuple(Part(Named(k), range(n)) for k, n in enumerate(sizes))
    given = {"seed": 0, "micro": 4, "accumulation": 1, "dp_rank": 0, "dp_degree": 1} | place
    return Batches(sources, weights=weights, **given)


class Named:
    def __init__(self, source: int) -> None:
        self.source = source

    def __len__(self) -> int:
        return 1000

    def __call__(self, index: int, epoch: int):
        return {"ids": np.array([100 * self.source + index]), "labels": np.array([0]), "used": 1}


def drawn(of: Batches, steps: int, position: Position | None = None) -> list[int]:
    return [int(i) for micros, _ in take(of, steps, position) for b in micros for i in b.ids[:, 0]]


def test_each_step_has_its_share_of_every_source():
    numbers = drawn(blend(), 5)
    for step in range(5):
        assert sum(n >= 100 for n in numbers[4 * step : 4 * step + 4]) == 1


def test_no_sequence_comes_again_before_its_source_was_gone_through():
    numbers = drawn(blend(weights=(1.0, 1.0)), 20)
    first, second = [n for n in numbers if n < 100], [n for n in numbers if n >= 100]
    assert sorted(first) == list(range(40))
    for epoch in range(4):
        assert sorted(second[10 * epoch :][:10]) == list(range(100, 110))
    assert second[:10] != second[10:20]


def test_a_blend_goes_on_from_any_position_on_any_number_of_ranks():
    alone = blend()
    ((_, after),) = take(alone, 3)[-1:]
    expected = drawn(alone, 9)[12:]
    assert drawn(alone, 6, after) == expected
    two = [blend(micro=2, dp_rank=r, dp_degree=2) for r in range(2)]
    parts = [drawn(of, 6, after) for of in two]
    assert [n for i in range(0, 12, 2) for p in parts for n in p[i : i + 2]] == expected


def test_another_number_of_sources_cannot_go_on():
    with pytest.raises(ConfigError, match="was trained on 3 sources of data, but there are 2 now"):
        take(blend(), 1, Position(0, (1, 2, 3)))


def test_workers_give_the_same_steps_in_the_same_order():
    plain = take(blend(), 7)
    ahead = take(blend(workers=2), 7)
    assert [(fingerprint(m), p) for m, p in ahead] == [(fingerprint(m), p) for m, p in plain]
    ((_, after),) = plain[2:3]
    assert drawn(blend(workers=2), 4, after) == drawn(blend(), 7)[12:]


# -- what is held out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_held_out_is_not_trained_on(packed: bool):
    train, held = split(Named(0), 0.05, packed=packed, seed=0)
    assert len(train) == 950 and len(held) == 50
    every = [p(i, 0)["ids"][0] for p in (train, held) for i in range(len(p))]
    assert sorted(every) == list(range(1000))
    assert (held(0, 0)["ids"][0] == 950) == packed


def test_holding_out_everything_is_an_error():
    with pytest.raises(ConfigError, match=r"data\.eval\.fraction 0\.9 of 2 sequences leaves none to train on"):
        split(Part(Named(0), range(2)), 0.9, packed=True, seed=0)


@pytest.mark.parametrize("count", [1, 4, 9, 16, 17])
def test_dp_ranks_share_out_the_held_out_set_in_as_many_batches_each(count: int):
    ranks = [Held((Part(Named(0), range(count)),), 4, r, 2).batches() for r in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    counted = [int(i) for of in ranks for batch, counts in of if counts for i in batch.ids[:, 0]]
    assert sorted(counted) == list(range(count))
