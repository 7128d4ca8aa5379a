"""Real ranks of real processes: what they print, how they end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tests.train.tiny import make_folder, make_text
from tpconvert.checkpoint import check_folder
from tpconvert.errors import TrainError
from tpconvert.train.__main__ import command
from tpconvert.train.launch import check_launchers
from tpconvert.train.saving import state

ROOT = Path(__file__).parents[2]


def config_file(tmp_path: Path, **training) -> Path:
    data = {
        "training": {"steps": 4, "micro_batch_size": 2, "seq_len": 16} | training,
        "data": {"path": str(make_text(tmp_path / "text.txt")), "tokenizer": "bytes"},
        "logging": {"every": 1, "tensorboard": False},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
    return tmp_path / "c.yaml"


def start(ranks: int, *arguments: object) -> subprocess.Popen[str]:
    code = f"import sys; from tpconvert.train.launch import launch; sys.exit(launch(sys.argv[1:], {ranks}))"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def launched(ranks: int, *arguments: object) -> tuple[int, str, str]:
    process = start(ranks, *arguments)
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def test_a_run_prints_its_configuration_and_its_steps_and_leaves_a_checkpoint(tmp_path: Path):
    folder, file = make_folder(tmp_path / "model", 2), config_file(tmp_path)
    (folder / "error-rank-1.txt").write_text("of a run before")
    code, out, error = launched(2, folder, "--config", file, "--resume", "training.steps=3")
    assert (code, error) == (0, "")
    begins = f"nothing to resume: no complete step in {folder}, so training begins at step 0\n"
    assert out.count(begins) == out.count("nothing to resume") == 1
    assert not (folder / "error-rank-1.txt").exists()
    assert "  steps: 3\n" in out and "  warmup_steps: 0\n" in out
    assert out.count("step 1/3  loss") == 1 and "step 3/3  loss" in out
    assert [p.name for p in state.complete_steps(folder)] == ["step-3"]
    assert check_folder(folder) == [] and (folder / "metrics.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.path=nowhere.txt"], "error: data.path: there is no file nowhere.txt (looked in "),
        (["training.seq_len=5000"], "error: data.path: the text has 4001 tokens, too few for one sequence"),
    ],
)
def test_a_mistake_of_the_user_is_one_line_from_all_ranks(tmp_path: Path, arguments: list[str], message: str):
    folder, output = make_folder(tmp_path / "model", 2), tmp_path / "run"
    code, _, error = launched(2, folder, "--config", config_file(tmp_path), "--output", output, *arguments)
    assert code == 2
    assert error.startswith(message) and error.count("\n") == 1
    assert not output.exists() or [p.name for p in output.iterdir()] == ["data"], "whole tokens, or nothing"


def test_a_world_that_tp_does_not_divide_is_one_line(tmp_path: Path):
    code, out, error = launched(3, make_folder(tmp_path / "model", 2), "--config", config_file(tmp_path))
    assert (code, out) == (2, "")
    assert error == (
        f"error: {tmp_path / 'model'} is cut for tp=2, which does not divide 3 ranks (3 % 2 = 1). "
        "Start 2 ranks or a multiple, or reshard the folder.\n"
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("lm_raises", "error: rank 1: ArithmeticError: this model cannot add (the traceback is in "),
        ("lm_killed", "error: rank 1 ("),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_one_line_and_no_hang(tmp_path: Path, function: str, message: str):
    folder = make_folder(tmp_path / "model", 2, function)
    code, _, error = launched(2, folder, "--config", config_file(tmp_path), "--output", tmp_path / "run")
    assert code == 1
    assert error.startswith(message) and error.count("\n") == 1
    assert function == "lm_raises" or "gave no sign of life any more" in error
    if function == "lm_raises":
        assert "this model cannot add" in (tmp_path / "run" / "error-rank-1.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run_cleanly(tmp_path: Path, number: int):
    folder, file = make_folder(tmp_path / "model", 2), config_file(tmp_path, steps=100_000, schedule="constant")
    process = start(2, folder, "--config", file, "--output", tmp_path / "run")
    assert process.stdout is not None
    line = ""
    while "3/100000" not in line:  # until some steps are done
        line = process.stdout.readline()
        assert line or process.poll() is None
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    (step,) = state.complete_steps(tmp_path / "run")
    assert f"told to stop after {step.name.replace('-', ' ')}" in out and f"saved {step}" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_training_began_is_no_success(tmp_path: Path, number: int):
    """Ranks that wait for a configuration to be written have nothing to save."""
    file, end, until = tmp_path / "config.yaml", None, time.monotonic() + 60
    os.mkfifo(file)
    process = start(2, make_folder(tmp_path / "model", 2), "--config", file, "--output", tmp_path / "run")
    while end is None:
        assert time.monotonic() < until and process.poll() is None
        with contextlib.suppress(OSError):  # nobody reads yet
            end = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.5)
    time.sleep(2)  # the other rank
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    os.close(end)
    told = "error: told to stop before the first step; nothing is saved.\n"
    assert (process.returncode, out, error) == (128 + number, "", told)
    assert not (tmp_path / "run").exists()


def test_a_signal_while_the_data_are_read_is_no_success(tmp_path: Path):
    """Ranks that have begun save after the step at hand, and there is none yet."""
    (tmp_path / "own.py").write_text(
        "import time, pathlib, torch\n"
        "def examples():\n"
        f"    pathlib.Path({str(tmp_path / 'reads')!r}).touch()\n"
        "    time.sleep(3)\n"
        "    return [{'ids': torch.tensor([i, 2, 3]), 'labels': torch.tensor([i, 2, 3])} for i in range(8)]\n"
    )
    file = config_file(tmp_path)
    data = yaml.safe_load(file.read_text()) | {"data": {"dataset": f"{tmp_path}/own.py:examples"}}
    file.write_text(yaml.safe_dump(data))
    process, until = start(2, make_folder(tmp_path / "model", 2), "--config", file, "--output", tmp_path / "run"), 0
    while not (tmp_path / "reads").exists():
        assert (until := until + 1) < 600 and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "error: told to stop before the first step; nothing is saved.\n")
    assert state.complete_steps(tmp_path / "run") == []


def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path: Path):
    folder, file = make_folder(tmp_path / "model", 2), config_file(tmp_path, steps=100_000, schedule="constant")
    process = start(2, folder, "--config", file, "--output", tmp_path / "run")
    assert process.stdout is not None
    while "3/100000" not in (line := process.stdout.readline()):
        assert line or process.poll() is None
    process.kill()
    out, error = process.communicate(timeout=60)  # which ends when the ranks have closed it
    (step,) = state.complete_steps(tmp_path / "run")
    assert f"told to stop after {step.name.replace('-', ' ')}" in out and f"saved {step}" in out
    lines = set(error.splitlines())  # nobody can say who of them is to say it: the store is gone too
    host = socket.gethostname()
    assert lines == {f"error: The process that started ranks 0, 1 ({host}) is gone; what the ranks had done is saved."}


def test_of_several_machines_the_one_whose_launcher_is_gone_is_named():
    check_launchers(["", "", "", ""])
    with pytest.raises(TrainError, match=r"started ranks 2, 3 \(node-b\) is gone; what the ranks had done is saved"):
        check_launchers(["", "", "node-b", "node-b"])


def test_outside_torchrun_the_command_says_how_to_start_it(tmp_path: Path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    folder, file = make_folder(tmp_path / "model", 2), config_file(tmp_path)
    result = CliRunner().invoke(command, [str(folder), "--config", str(file)])
    assert result.exit_code == 2
    assert "not started by torchrun" in result.output
    assert f"Use torchrun --nproc-per-node 2 -m tpconvert.train {folder}" in result.output


def test_a_folder_that_is_not_sharded_is_named(tmp_path: Path):
    (tmp_path / "other").mkdir()
    result = CliRunner().invoke(command, [str(tmp_path / "other"), "--config", str(config_file(tmp_path))])
    assert result.exit_code == 2 and "not a sharded folder" in result.output
