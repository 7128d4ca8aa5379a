"""The page of what was measured of each type."""

import json

import pytest

from benchmarks.zoo.render import render
from benchmarks.zoo.whole import reasons_of


@pytest.mark.parametrize(("ranks", "said"), [("equal", "planned and equal"), ("not equal", "planned and NOT equal")])
def test_the_page_counts_the_worse_of_lockstep_and_ranks(tmp_path, ranks, said):
    line = {"type": "t", "class": "T", "outcome": "equal", "parameters": 7, "cut": 1.0, "matrices_cut": 0.5}
    line |= {
        "linear_cut": 0.25,
        "linear_cut_reached": 0.5,
        "linear_never": ["spoken.weight"],
        "worst": [["op", "x", "eval", 1e-15]],
        "rewrites": [],
        "notes": [],
        "way_back": "identical",
    }
    line |= {"ranks": {"outcome": ranks, "why": "x"}, "torch": "2", "transformers": "5", "date": "2026-01-01"}
    line |= {"theirs": {"same": 3, "other": 1, "whole": 0}, "degrees": {"3": {"outcome": "equal"}}}
    line |= {"export": {"outcome": "agrees"}, "whole": [["whole: dim 0: norm (in a.b.*); dim 1: norm", 2, "w [3]"]]}
    (tmp_path / "run.jsonl").write_text(json.dumps(line) + "\n")
    render(tmp_path / "run.jsonl", tmp_path / "docs", ["t", "u"])
    page = (tmp_path / "docs/coverage.md").read_text()
    assert f"| {said} | 1 |" in page
    assert "| 100.0 | 25.0 | 50.0 | 3/4 |" in page
    assert "- **t** `spoken.weight`" in page
    assert "of those that the inputs reach |  | mean 50.0 %" in page
    assert "75.0 % of 4 weights in 1 types, 1 along the other dim, 0 whole" in page
    assert "| norm | 2 | 1 | w [3] of t |" in page
    assert "1 more types were not measured in this run." in page
    assert json.loads((tmp_path / "docs/coverage.jsonl").read_text())["type"] == "t"


def test_the_page_says_which_code_the_lines_are_of(tmp_path):
    line = {"class": "T", "outcome": "refused", "why": "x", "torch": "2", "transformers": "5", "date": "1"}
    lines = [line | {"type": "a", "commit": "12ab"}, line | {"type": "b", "commit": "12ab"}, line | {"type": "c"}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    render(tmp_path / "run.jsonl", tmp_path)
    page = (tmp_path / "coverage.md").read_text()
    assert "Commits that were measured, with their types: 12ab (2), older ones (1)." in page
    assert json.loads((tmp_path / "coverage.jsonl").read_text().splitlines()[0])["commit"] == "12ab"


def test_the_page_names_no_places_of_a_machine(tmp_path):
    allocation = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    )
    why = f"SourceError: /opt/x/site-packages/transformers/m.py:1: {allocation}allocate 7 bytes. Error code 12 (Cannot)"
    line = {"type": "t", "class": "T", "outcome": "refused", "why": why, "torch": "2", "transformers": "5", "date": "1"}
    (tmp_path / "run.jsonl").write_text(json.dumps(line) + "\n")
    render(tmp_path / "run.jsonl", tmp_path)
    page = (tmp_path / "coverage.md").read_text()
    assert "- **t** SourceError: transformers/m.py:1: out of memory" in page
    assert "| the check did not end | 1 |" in page


def test_reasons_are_counted_without_the_places_where_they_arose():
    text = "whole: dim 0: layer_norm takes its statistics (in h.*.ln (2)); dim 1: h.3.mlp: a reduce (x) has no place"
    assert reasons_of(text) == ["layer_norm takes its statistics", "a reduce (x) has no place"]


def test_types_that_were_not_measured_anew_keep_their_lines(tmp_path):
    line = {
        "class": "T",
        "parameters": 7,
        "cut": 1.0,
        "matrices_cut": 0.5,
        "linear_cut": 1.0,
        "linear_cut_default": 0.5,
    }
    line |= {
        "outcome": "equal",
        "worst": [["op", "x", "eval", 2e-15], ["op", "y", "eval", 1e-15]],
        "way_back": "identical",
    }
    line |= {"whole": [[f"whole: reason {c}", 9 - n, "w [3]"] for n, c in enumerate("abcdefgh")], "rewrites": ["a"]}
    line |= {"torch": "2", "transformers": "5", "date": "1", "commit": "old", "degrees": {"3": {"outcome": "equal"}}}
    bad = {"outcome": "not equal", "why": "1 of 2 checks"}
    run, docs = tmp_path / "run.jsonl", tmp_path / "docs"
    run.write_text("".join(json.dumps(line | {"type": t, "ranks": bad}) + "\n" for t in ("a", "b")))
    render(run, docs, ["a", "b"])
    first = (docs / "coverage.md").read_text()
    assert "| planned and NOT equal | 2 |" in first and "on ranks: 1 of 2 checks" in first
    run.write_text("")
    render(run, docs, ["a", "b"], onto=True)
    assert (docs / "coverage.md").read_text() == first
    run.write_text(json.dumps(line | {"type": "b", "ranks": {"outcome": "equal"}, "commit": "new"}) + "\n")
    render(run, docs, ["a", "b"], onto=True)
    page = (docs / "coverage.md").read_text()
    assert "| planned and NOT equal | 1 |" in page and "old (1), new (1)" in page
    assert "| planned and equal | 1 |" in page and "- **a** on ranks" in page and "- **b** on ranks" not in page
    assert page.count("equal 2e-15") == 1 and page.count("| w [3] of a |") == 6
