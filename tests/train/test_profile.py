import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.train.test_loop import changed, run, settings
from tests.train.tiny import make_folder
from tpconvert.train.settings.config import Profile
from tpconvert.train.shown.profile import Watch, is_sending, joined, split


@dataclass
class Kind:
    name: str


@dataclass
class Event:
    called: str
    start: int
    stop: int
    device: str = "CUDA"
    mark: bool = False

    def name(self):
        return self.called

    def start_ns(self):
        return self.start * 10**9

    def duration_ns(self):
        return (self.stop - self.start) * 10**9

    def is_user_annotation(self):
        return self.mark

    def device_type(self):
        return Kind(self.device)


def test_sending_behind_what_is_computed_is_hidden_and_the_rest_exposed():
    found = split([
        Event("aten::mm", 0, 20, "CPU"),
        Event("gemm", 2, 8), Event("gemm", 7, 10), Event("ncclDevKernel_AllReduce_Sum", 6, 13),
        Event("FSDP::all_gather", 0, 20, mark=True), Event("norm", 12, 14), Event("ncclDevKernel_AllGather", 15, 16),
    ])  # fmt: skip
    assert (found.wall, found.busy, found.sending, found.exposed, found.hidden) == (20, 10, 8, 3, 5)
    assert found.kernels[:2] == (("gemm", 9.0, 2), ("ncclDevKernel_AllReduce_Sum", 7.0, 1))
    table = found.table()
    assert "communication, exposed       3.0000 s   15.0%" in table and "neither                      7.0000 s" in table


def test_without_a_gpu_the_ops_of_the_cpu_count():
    found = split([
        Event("step", 0, 10, "CPU"), Event("aten::mm", 1, 4, "CPU"), Event("c10d::allreduce_", 4, 5, "CPU"),
        Event("gloo:all_reduce", 3, 8, "CPU"),
    ])  # fmt: skip
    assert (found.wall, found.busy, found.sending, found.exposed) == (10, 3, 5, 4)


def test_spans_that_touch_are_one():
    assert joined([(5, 7), (0, 2), (2, 3), (6, 6)]) == [(0, 3), (5, 7)]
    assert split([]).wall == 0 and split([]).table()


@pytest.mark.parametrize("name", ["ncclDevKernel_AllReduce", "gloo:all_gather", "c10d::broadcast_"])
def test_kernels_that_send_are_known(name):
    assert is_sending(name) and not is_sending("aten::mm")


def steps(watch: Watch, count: int) -> list[str]:
    told = []
    for step in range(1, count + 1):
        watch.begin(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        told.append(watch.end(step))
    return [*told, watch.close(count)]


def test_a_window_is_written_once_and_told(tmp_path: Path):
    told = steps(Watch(tmp_path, Profile(start=2, steps=2), 1, gpu=False), 4)
    assert [bool(text) for text in told] == [False, False, True, False, False]
    assert "profile of steps 2 to 3" in told[2] and "aten::mm" in told[2]
    trace = json.loads(gzip.decompress((tmp_path / "profile/steps-2-3.json.gz").read_bytes()))
    assert sum(event.get("name") == "aten::mm" for event in trace["traceEvents"]) == 2
    assert (tmp_path / "profile/steps-2-3.txt").read_text().rstrip() in told[2]


def test_a_window_ends_with_the_run(tmp_path: Path):
    told = steps(Watch(tmp_path, Profile(start=2, steps=9), None, gpu=False), 3)
    assert "profile of steps 2 to 3" in told[-1] and (tmp_path / "profile/steps-2-3.txt").is_file()


def test_a_profile_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "profile").write_text("in the way")
    told = steps(Watch(tmp_path, Profile(start=1, steps=1), None, gpu=False), 2)
    assert "the profile of steps 1 to 1 cannot be written" in told[0]


def test_a_run_shows_where_its_time_goes_and_its_numbers_stay(run_ranks, tmp_path: Path):
    plain = settings(tmp_path, steps=4)
    folder = make_folder(tmp_path / "model", 2)
    logging = {"jsonl": True, "split_every": 3, "peak_tflops": 0.5}
    seen = changed(plain, logging=logging, profile={"start": 2, "steps": 1})
    losses = run_ranks(run, 2, folder, plain, tmp_path / "plain")[0]
    assert run_ranks(run, 2, folder, seen, tmp_path / "seen")[0] == losses
    lines = [json.loads(line) for line in (tmp_path / "seen/metrics.jsonl").read_text().splitlines()]
    assert ["communication_seconds" in line for line in lines] == [False, True, True, True]
    for line in lines:
        parts = [line.get(f"{name}_seconds", 0.0) for name in ("compute", "communication", "data")]
        assert sum(parts) == pytest.approx(line["step_seconds"]) and parts[0] > 0
        assert line["mfu"] == pytest.approx(line["tflops_per_gpu"] / 0.5) and line["mfu"] > 0
        assert line["tokens_per_second_per_gpu"] == pytest.approx(line["tokens_per_second"] / 2)
    assert lines[-1]["communication_seconds"] > 0
    table = (tmp_path / "seen/profile/steps-2-2.txt").read_text()
    assert "communication, exposed" in table and "aten::" in table
