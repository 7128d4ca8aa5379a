import errno
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tpconvert.cli import main
from tpconvert.errors import ConfigError
from tpconvert.train.shown.plot import plot, read_run

pytest.importorskip("matplotlib")


def write(folder: Path, *lines: object) -> Path:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 9, "lo')
    return folder


def step(number: int, **more: float) -> dict[str, float]:
    return {"step": number, "loss": 3.0 / number, "grad_norm": 1.0, "lr": 0.1, "memory_gib": 0.0, **more}


@pytest.fixture
def runs(tmp_path):
    first = write(tmp_path / "a", step(1), step(2, mfu=0.4), {"step": 2, "eval_loss": 2.0})
    return [first, write(tmp_path / "b", step(1))]


def test_a_run_is_read_up_to_where_it_was_cut_off(runs):
    curves = read_run(runs[0])
    assert curves["loss"] == [(1, 3.0), (2, 1.5)] and curves["mfu"] == [(2, 0.4)]
    assert curves["eval_loss"] == [(2, 2.0)] and "epoch" not in curves
    assert read_run(runs[0] / "metrics.jsonl") == curves


def test_what_no_run_has_is_not_drawn(runs, tmp_path):
    assert plot(runs, tmp_path / "c.png") == ["loss", "eval_loss", "grad_norm", "lr", "mfu"]
    assert plot(runs[1:], tmp_path / "d.png") == ["loss", "grad_norm", "lr"]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_draws_all_runs(runs, tmp_path):
    out = tmp_path / "curves.png"
    done = CliRunner().invoke(main, ["plot", *map(str, runs), "-o", str(out)])
    assert done.exit_code == 0 and done.stdout.startswith(f"{out}: loss, "), done.output
    again = CliRunner().invoke(main, ["plot", str(runs[0]), "-o", str(out)])
    assert again.exit_code == 2 and "exists already" in again.stderr
    assert CliRunner().invoke(main, ["plot", str(runs[0]), "-o", str(out), "--force"]).exit_code == 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: p / "none", r"none: cannot be read \(No such file or directory\)"),
        (lambda p: write(p / "empty"), "holds no steps"),
    ],
)
def test_a_folder_without_a_run_is_one_line(tmp_path, make, text):
    with pytest.raises(ConfigError, match=text):
        plot([make(tmp_path)], tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_a_picture_of_no_known_kind_is_one_line(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"c\.word: cannot be written"):
        plot(runs, tmp_path / "c.word")


def test_without_matplotlib_it_says_what_to_install(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"matplotlib, which is missing\. pip install 'tpconvert\[plot\]'"):
        plot(runs, tmp_path / "c.png")


def test_a_disk_that_is_full_leaves_no_half_of_a_picture(tmp_path: Path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')

    def full(self, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(ConfigError, match=r"c\.png: cannot be written: No space left on device\. Choose another"):
        plot([tmp_path], tmp_path / "c.png")
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
