"""What counts as equal."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from tpconvert.verify.compare.sizes import other_size
from tpconvert.verify.measure.values import form, largest, relative

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("value", "want", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([-INF, 2.5], [-INF, 2.0], 0.25),
        ([-INF, INF], [-INF, INF], 0.0),
        ([INF, 2.0], [-INF, 2.0], INF),
        ([-INF, 2.0], [1.0, 2.0], INF),
        ([1.0, 2.0], [-INF, 2.0], INF),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([1.0, 2.0], [NAN, 2.0], INF),
        ([NAN, 2.0], [NAN, 2.0], INF),
        ([1.0], [1.0, 1.0], INF),
        ([[1.0, 1.0]], [1.0, 1.0], INF),
        ([], [], 0.0),
    ],
)
def test_the_error_is_relative_to_the_largest_entry_and_infinite_for_what_proves_nothing(value, want, error):
    assert relative(torch.tensor(value), torch.tensor(want)) == error


def test_integers_and_masks_are_equal_or_not():
    ids = torch.tensor([3, 4])
    assert relative(ids, ids.clone()) == 0.0 and relative(ids + 1, ids) == INF
    assert relative(torch.tensor([True]), torch.tensor([False])) == INF


def test_a_floor_stands_for_values_that_are_rounding_only():
    tiny = torch.tensor([1e-18])
    assert relative(-tiny, tiny) == 2.0
    assert relative(-tiny, tiny, floor=1e-6) < 1e-11


def test_an_infinite_entry_does_not_make_the_scale_infinite():
    assert largest(torch.tensor([1.0, -3.0, INF, NAN])) == 3.0
    assert largest(torch.tensor([INF])) == largest(torch.empty(0)) == largest(None) == 0.0
    assert relative(torch.tensor([INF, 2.0]), torch.tensor([INF, 1.0])) == 1.0


def test_the_form_of_an_output_is_its_types_names_and_dtypes():
    @dataclass
    class Out:
        logits: torch.Tensor
        more: object = None

    x = torch.ones(2)
    assert form({"a": [x, (x,)]}) == form({"a": [x * 2, (x[:1],)]})
    assert form(Out(x)) == form(Out(x * 3))
    for other in ({"a": [x, x]}, {"b": [x, (x,)]}, {"a": (x, (x,))}, {"a": [x, (x.double(),)]}, {"a": [x, (x, x)]}):
        assert form(other) != form({"a": [x, (x,)]})
    assert form(Out(x, x)) != form(Out(x))


def test_a_smaller_size_is_cut_wherever_the_tensors_are():
    Pair = namedtuple("Pair", "ids mask")
    ids, scale = torch.arange(26).view(2, 13), torch.ones(3)
    smaller = other_size({"pair": Pair(ids, torch.ones(2, 13)), "all": [ids, None], "scale": scale})
    assert type(smaller["pair"]) is Pair
    assert torch.equal(smaller["pair"].ids, ids[:1, :10]) and torch.equal(smaller["all"][0], ids[:1, :10])
    assert smaller["pair"].mask.shape == (1, 13) and smaller["all"][1] is None and smaller["scale"] is scale
    assert other_size((torch.ones(1, 13),)) is None
