import contextlib
import io
import json
from pathlib import Path

import pytest

from tpconvert.train.model.flops import Work
from tpconvert.train.settings.config import Logging, Profile
from tpconvert.train.shown.metrics import Metrics
from tpconvert.train.shown.profile import Watch


def log(metrics: Metrics, step: int, loss: float = 2.5) -> None:
    metrics.count(100)
    metrics.log(step, loss=loss, lr=1e-3, grad_norm=0.5, epoch=0)


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def test_a_line_says_loss_rate_norm_and_speed(tmp_path: Path, out: io.StringIO):
    metrics = Metrics(tmp_path, Logging(tensorboard=False), steps=60, active=True, out=out)
    metrics._clock = iter([metrics._since + 2.0]).__next__
    metrics.count(3000)
    log(metrics, 10)
    metrics.close()
    assert out.getvalue() == "step 10/60  loss 2.5000  lr 1.00e-03  grad norm 0.500  1,550 tokens/s  1.000 s/step\n"
    entry = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert entry["step"] == 10 and entry["loss"] == 2.5 and entry["tokens_per_second"] == pytest.approx(1550)


def test_a_line_says_what_else_a_step_spends_its_time_on(tmp_path: Path, out: io.StringIO):
    metrics = Metrics(tmp_path, Logging(tensorboard=False), steps=60, active=True, out=out)
    start = metrics._since
    metrics._clock = iter([start + 1.0, start + 1.5, start + 2.0]).__next__
    metrics.work = Work(gpus=4, flops=8 * 10**12, peak=2e12)
    metrics.watch = Watch(tmp_path, Profile(), None, gpu=False)
    metrics.watch.share = 0.125
    with metrics.waiting():
        pass
    log(metrics, 10)
    metrics.close()
    assert out.getvalue().endswith("  50 tokens/s  2.000 s/step (communication 12%, data 25%)  1 TFLOP/s  MFU 50.0%\n")
    entry = json.loads((tmp_path / "metrics.jsonl").read_text())
    wanted = {"data": 0.5, "communication": 0.25, "compute": 1.25, "step": 2.0}
    assert {name: entry[f"{name}_seconds"] for name in wanted} == pytest.approx(wanted)
    rates = {"tokens_per_second_per_gpu": 12.5, "tflops_per_gpu": 1.0, "mfu": 0.5}
    assert {name: entry[name] for name in rates} == pytest.approx(rates)


def test_what_is_not_known_is_not_written(tmp_path: Path, out: io.StringIO):
    metrics = Metrics(tmp_path, Logging(tensorboard=False), steps=60, active=True, out=out)
    log(metrics, 10)
    metrics.close()
    entry = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert not {"mfu", "tflops_per_gpu", "communication_seconds"} & entry.keys()
    assert not any(word in out.getvalue() for word in ("MFU", "TFLOP", "communication"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_a_bar_below_the_lines_and_a_file_lines_alone(tmp_path: Path, monkeypatch, terminal: bool):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal() if terminal else io.StringIO()
    metrics = Metrics(tmp_path, Logging(tensorboard=False, jsonl=False), steps=60, active=True, out=out, resumed=9)
    log(metrics, 10)
    metrics.say("saved [step-10]")
    metrics.close()
    assert "step 10/60  loss 2.5000" in out.getvalue() and "saved [step-10]" in out.getvalue()
    assert (out.getvalue().count("10/60") > 1) == terminal
    assert ("\x1b[" in out.getvalue()) == terminal


def test_other_ranks_write_nothing(tmp_path: Path, out: io.StringIO):
    log(Metrics(tmp_path / "run", Logging(), steps=60, active=False, out=out), 10)
    assert not (tmp_path / "run").exists() and out.getvalue() == ""


def test_a_resumed_run_writes_its_steps_once(tmp_path: Path, out: io.StringIO):
    first = Metrics(tmp_path, Logging(tensorboard=False), steps=60, active=True, out=out)
    for step in (1, 2, 3):
        log(first, step)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    second = Metrics(tmp_path, Logging(tensorboard=False), steps=60, active=True, out=out, resumed=2)
    log(second, 3, loss=7.0)
    second.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(e["step"], e["loss"]) for e in lines] == [(1, 2.5), (2, 2.5), (3, 7.0)]


def test_the_time_of_a_save_is_not_counted(tmp_path: Path, out: io.StringIO):
    metrics = Metrics(tmp_path, Logging(jsonl=False, tensorboard=False), steps=60, active=True, out=out)
    start = metrics._since
    metrics._clock = iter([start + 1.0, start + 9.0, start + 10.0]).__next__
    metrics.pause()()
    log(metrics, 1)
    assert "2.000 s/step" in out.getvalue()


def test_tensorboard_gets_the_same_numbers(tmp_path: Path, out: io.StringIO):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, Logging(jsonl=False), steps=60, active=True, out=out)
    log(metrics, 10)
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(10, 2.5)]


def test_a_full_disk_or_a_closed_console_costs_lines_and_not_the_run(tmp_path: Path):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            if "eval" in text:
                raise BrokenPipeError
            return super().write(text)

    out = Closed()
    metrics = Metrics(tmp_path, Logging(tensorboard=False, jsonl=False), steps=60, active=True, out=out)
    with Path("/dev/full").open("w") as metrics._file:
        for step in (1, 2):
            metrics.count(10)
            metrics.log(step, loss=2.0, lr=0.1, grad_norm=1.0, epoch=0)
        metrics.evaluated(2, {"eval_loss": 1.0})
        with contextlib.suppress(OSError):
            metrics._file.close()
        metrics.close()
    assert out.getvalue().count("METRICS NOT WRITTEN: No space left on device. Training goes on.\n") == 1
    assert out.getvalue().count("loss 2.0000") == 2
