"""What is said of a comparison."""

import json
import pickle

import pytest

from tpconvert.verify import Check, Result, proof_text
from tpconvert.verify.result import FLOAT32, FLOAT64

GOOD = Check("output", "logits", 2e-16, 1e-9, "eval")
BAD = Check("gradient", "a.weight", 0.5, 1e-9, "train")
STORED = Check("bytes", "b.weight", 0.0, 0.0)


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 1e-8])
def test_one_bad_check_makes_a_result_unequal(error):
    bad = Check("gradient", "a.weight", error, 1e-9, "train")
    result = Result((GOOD, bad, STORED), FLOAT64)
    assert not bad.equal and not result.equal
    assert result.worst(1) == [bad]
    assert "worst gradient a.weight" in result.verdict()


def test_nothing_compared_is_not_equal():
    result = Result((), FLOAT64)
    assert not result.equal and result.verdict() == "Not verified: nothing was compared."


def test_the_worst_are_those_furthest_beyond_their_bound():
    loose = Check("output", "logits", 1e-6, 1e-5, "no grad")
    stored = Check("bytes", "c.weight", float("inf"), 0.0)
    assert Result((GOOD, loose, BAD, stored), FLOAT64).worst() == [stored, BAD, loose, GOOD]


def test_the_verdict_counts_the_kinds_and_names_where_values_part():
    losses = (Check("loss", "loss", 0.0, 1e-9, "eval"), Check("loss", "loss", 0.0, 1e-9, "train"))
    kinds = (GOOD, *losses, STORED, STORED, Check("boundary", "x", 0.0, 0.0), Check("boundary", "y", 0.0, 0.0))
    assert Result(kinds, FLOAT64).verdict() == (
        "Equal: 1 output, 2 losses, 2 bytes, 2 boundaries; largest error 2.0e-16, bound 1e-09."
    )
    assert Result((GOOD, BAD), FLOAT64, "a (output)").verdict() == (
        "Not equal: 1 of 2 checks (1 output, 1 gradient); worst gradient a.weight, error 5.0e-01, bound 1e-09."
        " Values first part in a (output)."
    )


def test_the_table_shows_the_worst_dozen_first_and_all_on_request():
    checks = tuple(Check("gradient", f"layer.{i}.weight", i * 1e-16, 1e-9, "eval") for i in range(20))
    short = proof_text(Result(checks, FLOAT32, notes=("a guess",)))
    rows = [line for line in short.splitlines() if line.startswith("gradient")]
    assert len(rows) == 12 and "layer.19.weight" in rows[0]
    assert "... and 8 more, all no worse (--all shows them)" in short
    assert "Bound: 2e-03 (float32: " in short and "Note: a guess" in short
    assert proof_text(Result(checks, FLOAT32), every=True).count("layer.") == 20


def test_a_result_travels_between_processes_and_into_json():
    result = Result((GOOD, BAD), FLOAT64, "a (output)", ("a guess",))
    assert pickle.loads(pickle.dumps(result)) == result
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert (data["equal"], data["parted"], data["notes"]) == (False, "a (output)", ["a guess"])
    assert [c["name"] for c in data["checks"]] == ["a.weight", "logits"]


def test_json_has_no_infinity_and_no_nan():
    checks = tuple(Check("output", "logits", float(e), 1e-9) for e in ("inf", "nan"))
    data = json.loads(json.dumps(Result(checks, FLOAT64).to_json(), allow_nan=False))
    assert [(c["error"], c["equal"]) for c in data["checks"]] == [(None, False), (None, False)]
