"""The frame of the comparison on several GPUs: its processes, its turns, its tables."""

import json
import time

import pytest

from benchmarks.compare import cases, tables
from benchmarks.compare.case import Case
from benchmarks.compare.growth import along, growth
from benchmarks.compare.measure import covered, summary
from benchmarks.compare.page import write
from benchmarks.compare.processes import Job, run_all

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def returns(rank, turn, value):
    return {"value": value, "rank": rank}


def raises(rank, turn):
    raise ValueError("no such thing")


def one_hangs(rank, turn):
    time.sleep(60 * rank)
    with turn.preparing():
        return {"value": 1}


def measures(rank, turn, path):
    with turn.measuring(lambda: None):
        before = path.read_text() if path.exists() else ""
        time.sleep(0.2)
        path.write_text(before + "x")
    return {}


def ran(jobs, folder, seconds=30.0):
    """Name -> result, in the order in which they were done."""
    found = {}
    run_all(jobs, folder, time.monotonic() + seconds, lambda job, result: found.update({job.name: result}))
    return found


def test_each_job_costs_only_itself(tmp_path):
    jobs = [Job("good: 1/2", returns, (3,), 2), Job("bad", raises), Job("late", one_hangs, (), 2, (0, 1), limit=2.0)]
    found = ran(jobs, tmp_path)
    assert found["good: 1/2"] == {"value": 3, "rank": 0}
    assert found["bad"] == {"error": "ValueError: no such thing"}
    assert found["late"] == {"value": 1} or found["late"]["error"].startswith("not done within ")
    assert not any(p.is_alive() for job in jobs for p in job.processes)


def test_no_job_outlasts_the_call(tmp_path):
    found = ran([Job("late", one_hangs, (), 2, (0, 1))], tmp_path, seconds=1.0)
    assert list(found) == ["late"]


def test_one_measures_at_a_time(tmp_path):
    path = tmp_path / "said"
    ran([Job(f"job {i}", measures, (path,)) for i in range(3)], tmp_path)
    assert path.read_text() == "xxx"  # each saw what those before it wrote


def test_what_is_covered_is_counted_once():
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)]) == 4.0
    assert covered([]) == 0.0


def test_the_spread_is_of_the_middle_half():
    assert summary([1.0, 2.0, 3.0, 4.0, 100.0])["ms"] == 3.0
    assert summary([2.0]) == {"ms": 2.0, "ms_low": 2.0, "ms_high": 2.0}


def test_cases_have_names_of_their_own():
    found = cases.network(8) + cases.others() + cases.costs()
    assert len({(c.size, c.name) for c in found if c.network}) == len({c for c in found if c.network})
    assert {c.tp for c in found if c.network and c.way == "fsdp"} == {2, 4, 8}
    assert {c.tp for c in cases.network(2)} == {1, 2}


def test_the_table_divides_by_the_whole_model_at_equal_settings():
    figures = {"ms": 80.0, "tokens_per_s": 51200.0, "peak_gib": 9.0, "loss": 2.0}
    whole = Case("whole", compiled=True).to_json() | figures | {"part": "steps"}
    ours = Case("converted", tp=2, network=True, compiled=True).to_json() | figures | {"ms": 50.0, "part": "steps"}
    eager = Case("converted", tp=2, network=True).to_json() | figures | {"part": "steps"}
    failed = {"part": "steps", "job": "a case", "error": "not done within 9 s"}
    about = {"command": "c", "seconds": 1, "torch": "2", "transformers": "5", "gpus": 2, "toy": False}
    text = tables.markdown([whole, ours, eager, failed], [about])
    assert "| converted tp=2, compiled | 50.0 | 51,200 | 9.00 | 0.80 |" in text
    assert "| converted tp=2, eager | 80.0 | 51,200 | 9.00 |  |" in text
    assert "- a case: not done within 9 s" in text


def test_a_page_keeps_the_latest_figure_and_no_failure_beside_one(tmp_path):
    about = {"command": "c", "seconds": 1, "torch": "2", "transformers": "5", "gpus": 2, "toy": False}
    old = {"part": "runner", "job": "runner", "steps": 100}
    files = []
    for name, rows in {
        "a": [old, {"part": "written", "job": "written", "gb": 1.0}],
        "b": [old | {"steps": 200}, {"part": "written", "job": "written", "error": "no time left"}],
    }.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"about": about, "rows": rows}))
    write(files, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "- steps: 200" in text and "- steps: 100" not in text
    assert "- gb: 1" in text and "no time left" not in text


def test_a_rank_is_measured_against_the_whole_model_of_its_own_call(tmp_path):
    about = {"command": "c", "seconds": 1, "torch": "2", "transformers": "5", "gpus": 1, "toy": False}
    whole, one, two = Case("whole"), Case("converted"), Case("converted", tp=2)
    files = []
    for name, times in {"a": {whole: 80.0, two: 50.0}, "b": {one: 90.0, two: 60.0}, "c": {two: 40.0}}.items():
        figures = {"tokens_per_s": 1.0, "peak_gib": 1.0, "part": "alone"}
        rows = [case.to_json() | figures | {"ms": ms, "job": f"{name} {case.name}"} for case, ms in times.items()]
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"about": about, "rows": rows}))
    write(files, tmp_path / "page.md")
    lines = [line.split("|") for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| conv")]
    ratios = {(cells[1].strip(), cells[2].strip()): cells[5].strip() for cells in lines}
    assert ratios == {
        ("converted tp=1, eager", "90.0"): "",
        ("converted tp=2, eager", "50.0"): "0.80",
        ("converted tp=2, eager", "60.0"): "0.75",
        ("converted tp=2, eager", "40.0"): "",
    }


def test_growth_is_along_one_number_at_a_time():
    rows = [
        {"part": "costs", "layers": n, "tokens": t, "width": 1, "tp": 2, "ms": 10.0 * n + 5, "peak_gib": 1 + n / 2}
        | {"tokens_per_s": 1.0}
        for n, t in [(4, 4096), (2, 4096), (8, 4096), (4, 8192)]
    ]
    assert [r["layers"] for r in along(rows, "layers")] == [2, 4, 8]
    text = "\n".join(growth(rows))
    assert "layers to the power of 0.88" in text
    assert "A line through all: 5.0 ms and 10.00 ms a layer; 1.00 GiB and 0.500 GiB a layer." in text
    assert "### tp" not in text
