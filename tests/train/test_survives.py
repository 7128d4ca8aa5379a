"""What a run outlives, and what it leaves behind where it does not."""

import os
import random
from pathlib import Path

import pytest
import torch

from benchmarks.kills import compare
from tests.train.test_loop import changed, run, settings
from tests.train.test_state import alone, contents, resuming
from tests.train.tiny import make_folder
from tpconvert.errors import CheckpointError, ConfigError, TrainError
from tpconvert.train.launch import configured, going_on
from tpconvert.train.loop import train
from tpconvert.train.model.memory import GIB, Held, ways_out
from tpconvert.train.saving import save, state
from tpconvert.train.together import watch
from tpconvert.train.together.watch import Beats


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow, id="20")])
def test_a_run_whose_ranks_are_killed_ends_with_the_bytes_of_one_left_alone(tmp_path: Path, kills: int):
    result = compare(tmp_path, kills=kills, steps=20 * kills, seed=random.Random(kills).randrange(1000))
    assert (result.code, result.kills, result.different) == (0, kills, ()), result.error


def full_at(mesh, folder: Path, config, output: Path, broken: list[str]) -> tuple[list[float], str]:
    """A run on whose last rank the disk is full while the steps of these names are written; what it prints."""
    import contextlib
    import io

    kept = save.write_rank

    def full(where: Path, *args):
        if mesh.rank == mesh.degree - 1 and any(f"{name}." in where.name + "." for name in broken):
            raise CheckpointError(f"{where.name}: cannot be written: the disk is full.")
        kept(where, *args)

    save.write_rank = full
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return train(folder, config, mesh, output=output), said.getvalue()
    finally:
        save.write_rank = kept


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_costs_a_step_and_not_the_run(run_ranks, tmp_path: Path, asynchronous: bool):
    config = changed(settings(tmp_path, steps=8), checkpoint={"every": 2, "keep": 9, "asynchronous": asynchronous})
    folder = make_folder(tmp_path / "model", 2)
    whole = run_ranks(run, 2, folder, config, tmp_path / "whole")
    every = run_ranks(full_at, 2, folder, config, tmp_path / "run", ["step-4"])
    assert every[0][0] == every[1][0] == whole[0]
    assert "the disk is full. Training goes on; the last good one is step-2.\n" in every[0][1] and every[1][1] == ""
    assert [p.name for p in state.complete_steps(tmp_path / "run")] == ["step-2", "step-6", "step-8"]
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
    for name in ("step-2", "step-8"):
        assert contents(tmp_path / "run" / name) == contents(tmp_path / "whole" / name)


def full_at_the_end(mesh, folder: Path, config, output: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        full_at(mesh, folder, config, output, ["step-2"])
    return error.value.message


def test_a_last_step_that_cannot_be_written_is_an_error(run_ranks, tmp_path: Path):
    config = changed(settings(tmp_path, steps=2), checkpoint={"every": 2})
    said = run_ranks(full_at_the_end, 2, make_folder(tmp_path / "model", 2), config, tmp_path / "run")
    assert len(set(said)) == 1 and "the disk is full" in said[0]


def test_what_is_written_is_what_was_there_when_the_save_began(tmp_path: Path, monkeypatch):
    import threading

    config = changed(settings(tmp_path, steps=4), checkpoint={"every": 2, "keep": 9})
    folder = make_folder(tmp_path / "model", 1)
    alone(folder, config, tmp_path / "whole")
    go, kept, updates = threading.Event(), save.write_rank, torch.optim.AdamW.step

    def late(where: Path, *args):
        assert go.wait(30)
        kept(where, *args)

    def counted(optimizer, *args):
        counted.calls += 1
        if counted.calls == 3:  # the step after the save has changed the weights
            updates(optimizer, *args)
            return go.set()
        return updates(optimizer, *args)

    counted.calls = 0
    monkeypatch.setattr(save, "write_rank", late)
    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    alone(folder, config, tmp_path / "run")
    assert contents(tmp_path / "run" / "step-2") == contents(tmp_path / "whole" / "step-2")


def test_torchrun_starting_again_goes_on_from_what_the_run_left(tmp_path: Path):
    config, file = settings(tmp_path, steps=1), tmp_path / "c.yaml"
    file.write_text(config.to_yaml())
    fresh = configured(file, [], None)
    assert going_on(fresh, tmp_path / "run").checkpoint.resume == fresh.checkpoint.resume == "none"  # nothing was left
    alone(make_folder(tmp_path / "model", 1), config, tmp_path / "run")
    assert going_on(fresh, tmp_path / "run").checkpoint.resume == "auto"
    assert going_on(configured(file, [], str(tmp_path / "run/step-1")), tmp_path / "run").checkpoint.resume == "auto"


def test_going_back_to_an_earlier_step_does_not_mix_two_runs(tmp_path: Path):
    config, folder = settings(tmp_path, steps=2), make_folder(tmp_path / "model", 1)
    alone(folder, changed(config, checkpoint={"every": 1}), tmp_path / "run")
    again = resuming(config, str(tmp_path / "run" / "step-1"))
    with pytest.raises(ConfigError, match=r"run: has step-2, which is later than the step-1 to go on from\. Remove it"):
        alone(folder, again, tmp_path / "run")
    assert len(alone(folder, again, tmp_path / "other")) == 1


def test_a_gpu_that_is_full_says_what_fills_it_and_what_to_try(tmp_path: Path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr("tpconvert.train.model.open.cross_entropy", full)
    monkeypatch.setattr("tpconvert.train.model.open.F.cross_entropy", full)
    with pytest.raises(TrainError) as error:
        alone(make_folder(tmp_path / "model", 1), settings(tmp_path, precision="fp32"), tmp_path / "run")
    assert error.value.message.startswith("Rank 0: cpu is out of memory (2.00 GiB more were asked for): ")
    assert error.value.hint.startswith(
        "Try, from the cheapest: training.micro_batch_size=1 training.global_batch_size=4 ("
    )


def test_each_way_out_has_its_number(tmp_path: Path):
    held = Held(total=80 * GIB, peak=70 * GIB, weights=8 * GIB, gradients=8 * GIB, optimizer=16 * GIB)
    config = settings(tmp_path, micro_batch_size=6, global_batch_size=48)
    assert list(ways_out(config, tp=2, dp=4, held=held)) == [
        "training.micro_batch_size=3 training.global_batch_size=48 (the same steps, 19.0 GiB less)",
        "parallelism.sequence_parallel=true",
        "parallelism.data_parallel=fsdp (24.0 GiB less)",
        "parallelism.activation_checkpointing=selective, or full",
        "tpconvert reshard to tp=4 and twice the GPUs (16.0 GiB less)",
        "parallelism.data_parallel=fsdp with parallelism.cpu_offload=true (slow)",
        "training.seq_len=8",
    ]


def test_ranks_without_a_sign_of_life_are_named_and_a_halt_of_all_is_not_taken_for_death():
    from torch.distributed import HashStore

    store = HashStore()
    first, second, third = (Beats(store, rank, 3) for rank in range(3))
    first.beat()
    assert first.silent(1, all_ranks=True) == {}  # the others have not begun
    for _ in range(5):
        first.beat(), second.beat(), third.beat()
        assert first.silent(3, all_ranks=True) == {}
    for _ in range(3):
        first.beat(), third.beat()
        late = first.silent(3, all_ranks=True)
    assert list(late) == [1] and f"process {os.getpid()}" in late[1]
    assert third.silent(3, all_ranks=False) == {}  # looks at rank 0 alone


class NoStore:
    """The store of a machine that is gone."""

    def check(self, keys: list[str]) -> bool:
        raise ConnectionResetError

    def add(self, key: str, by: int) -> int:
        raise ConnectionResetError


@pytest.mark.parametrize(("peer", "said"), [(True, "and with it the machine of rank 0."), (False, "error: own fault")])
def test_a_collective_that_broke_since_the_machine_of_rank_0_is_gone_says_that(monkeypatch, capsys, peer: bool, said):
    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(watch, "PATIENCE", 0.0)
    monkeypatch.setattr(os, "_exit", ended)
    here = object.__new__(watch.Watch)
    here._store = NoStore()
    with pytest.raises(SystemExit):
        here.fail("error: own fault", 1, peer=peer)
    assert capsys.readouterr().err.endswith(f"{said}\n")
