import io
import json
from pathlib import Path

import pytest

from tpconvert.train.config import Logging
from tpconvert.train.metrics import Metrics


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
