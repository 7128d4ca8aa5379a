import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.frame import cut_all, hashes, plan_of
from tpconvert.checkpoint import (
    NewFolder,
    check_folder,
    file_weights,
    finish,
    inspect,
    load_rank,
    merge,
    read_manifest,
    reshard,
    shard,
    tensor_weights,
    write_rank,
)
from tpconvert.errors import CheckpointError
from tpconvert.spec.manifest import Entry, Manifest
from tpconvert.spec.plan import Plan

WEIGHTS = tensor_weights({"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5.0)})
PLAN = plan_of(WEIGHTS, 2, cut_all(WEIGHTS))
RANK = "rank-00001-of-00002/model.safetensors"


@pytest.fixture
def out(tmp_path):
    shard(WEIGHTS, PLAN, tmp_path / "out")
    return tmp_path / "out"


def test_an_existing_output_is_not_overwritten_unasked(out):
    before = hashes(out)
    with pytest.raises(CheckpointError, match=r"out: exists already\. Use --force"):
        shard(WEIGHTS, PLAN, out)
    assert hashes(out) == before
    shard(WEIGHTS, PLAN, out, force=True)
    assert hashes(out) == before
    assert list(out.parent.iterdir()) == [out]


def test_an_empty_output_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    shard(WEIGHTS, PLAN, tmp_path / "out")
    assert check_folder(tmp_path / "out") == []


def test_force_replaces_only_checkpoints(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="home: is no checkpoint, so it is not replaced"):
        shard(WEIGHTS, PLAN, home, force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file: exists and is a file"):
        shard(WEIGHTS, PLAN, tmp_path / "file", force=True)
    assert (home / "letter.txt").read_text() == "dear"


def test_what_is_being_read_is_not_replaced(out):
    for target in (out, out.parent):
        (out.parent / "config.json").write_text("{}")
        for command in (lambda t: merge(out, t, force=True), lambda t: reshard(out, t, tp=1, force=True)):
            with pytest.raises(CheckpointError, match="is being read, so it cannot be written to"):
                command(target)
    assert check_folder(out) == []


def test_two_writers_of_one_target_do_not_meet(tmp_path):
    with (
        NewFolder(tmp_path / "out"),
        pytest.raises(CheckpointError, match="another process is writing it now"),
        NewFolder(tmp_path / "out"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_appears_meanwhile_is_kept(tmp_path):
    with (
        pytest.raises(CheckpointError, match="another process has written it meanwhile"),
        NewFolder(tmp_path / "o") as new,
    ):
        (tmp_path / "o").mkdir()
        (tmp_path / "o" / "x").write_text("x")
        new.commit()
    assert hashes(tmp_path).keys() == {"o/x"}


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"file/out: cannot be written here \(Not a directory\)"):
        shard(WEIGHTS, PLAN, tmp_path / "file" / "out")


def test_too_small_a_disk_is_refused_at_once(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 5, 5))
    with pytest.raises(CheckpointError, match=r"bytes are to be written, but the disk has 5 left\. Free some space"):
        shard(WEIGHTS, PLAN, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(out, tmp_path, monkeypatch):
    from tpconvert.checkpoint.files import tensorfile

    before, write = hashes(out), tensorfile.TensorFileWriter._write

    def fail(self, data):
        if self._done > 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    monkeypatch.setattr(tensorfile.TensorFileWriter, "_write", fail)
    for command in (
        lambda: shard(WEIGHTS, PLAN, out, force=True),
        lambda: merge(out, tmp_path / "whole"),
        lambda: reshard(out, tmp_path / "three", tp=3),
    ):
        with pytest.raises(CheckpointError, match=r"the disk is full\. Nothing was written\. Free some space"):
            command()
    assert hashes(out) == before
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupt_leaves_nothing(tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shard(WEIGHTS, PLAN, tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_is_there_whole_or_not_at_all(out, tmp_path, monkeypatch):
    held, write = read_manifest(out), os.fsync

    def stop(descriptor):
        if "manifest" in Path(f"/proc/self/fd/{descriptor}").readlink().name:
            raise KeyboardInterrupt
        write(descriptor)

    monkeypatch.setattr(os, "fsync", stop)
    with NewFolder(tmp_path / "new") as new:
        for rank in range(2):
            write_rank(new.path, rank, 2, load_rank(out, rank))
        with pytest.raises(KeyboardInterrupt):
            finish(new, held, PLAN)
        with pytest.raises(CheckpointError, match="half-written"):
            read_manifest(new.path)


def test_folders_that_are_not_ours_say_what_they_are(out, tmp_path):
    with pytest.raises(CheckpointError, match="none: no such folder"):
        read_manifest(tmp_path / "none")
    with pytest.raises(
        CheckpointError, match=r"not a sharded folder \(no manifest\.json\)\. Make one with: tpconvert shard"
    ):
        read_manifest(out / "rank-00000-of-00002")
    with pytest.raises(CheckpointError, match=rf"\(no manifest\.json\)\. Did you mean {out}\?"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=rf"is a file, not a folder\. Did you mean {out}\?"):
        read_manifest(out / "manifest.json")
    (tmp_path / ".new.partial").mkdir()
    with pytest.raises(CheckpointError, match=r"new: half-written: .* was stopped\. Run the command again"):
        read_manifest(tmp_path / "new")
    for step in (40, 100, 60):
        shutil.copytree(out, tmp_path / f"run/step-{step}")
    with pytest.raises(CheckpointError, match=rf"did you mean its newest step, {tmp_path}/run/step-100\?"):
        merge(tmp_path / "run", tmp_path / "back")
    (out / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"half-written: it has rank folders but no manifest\.json"):
        merge(out, tmp_path / "back")


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_flipped_byte_is_named(out):
    flip(out / RANK, -1)
    assert check_folder(out) == [f"{RANK}: its blake3 is not the one written: a byte has changed."]
    with pytest.raises(CheckpointError, match=f"{RANK}: its blake3 is not the one written"):
        load_rank(out, 1, check=True)
    for command in (lambda o: merge(out, o, check=True), lambda o: reshard(out, o, tp=4, check=True)):
        with pytest.raises(CheckpointError, match=f"{RANK}: its blake3 is not the one written"):
            command(out.parent / "other")


def test_a_truncated_file_is_named(out):
    os.truncate(out / RANK, (out / RANK).stat().st_size - 4)
    size = (out / RANK).stat().st_size
    assert check_folder(out) == [f"{RANK}: {size} bytes, but {size + 4} were written: cut short or replaced."]
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*cut short or damaged"):
        load_rank(out, 1)


def test_missing_and_foreign_files_are_named(out):
    (out / RANK).unlink()
    (out / "rank-00000-of-00002" / "left.safetensors").write_text("x")
    assert check_folder(out) == [f"{RANK}: missing.", "rank-00000-of-00002/left.safetensors: not in the manifest."]
    with pytest.raises(CheckpointError, match="no such file, though the checkpoint needs it"):
        load_rank(out, 1)


def test_swapped_rank_files_are_noticed_without_hashing(out):
    other = out / "rank-00000-of-00002/model.safetensors"
    (out / RANK).rename(out / "aside")
    other.rename(out / RANK)
    (out / "aside").rename(other)
    with pytest.raises(CheckpointError, match="holds rank 1 of 2, not 0 of 2: swapped"):
        load_rank(out, 0)


def test_a_foreign_manifest_is_noticed_without_hashing(out, tmp_path):
    weights = tensor_weights({"a": torch.zeros(3, 4), "b": torch.zeros(5)})
    shard(weights, plan_of(weights, 2, cut_all(weights)), tmp_path / "foreign")
    (tmp_path / "foreign" / "manifest.json").replace(out / "manifest.json")
    with pytest.raises(
        CheckpointError, match=r"a is float32 \[2, 3\], but the manifest says float32 \[3, 2\]: from another"
    ):
        load_rank(out, 0)


def test_a_file_linked_out_of_the_folder_is_not_copied(tmp_path):
    (tmp_path / "secret").write_text("secret")
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a": torch.ones(4)}, source / "model.safetensors")
    (source / "config.json").symlink_to(tmp_path / "secret")
    weights = file_weights(source)
    with pytest.raises(CheckpointError, match=r"'config\.json' is a link out of its folder: refused"):
        shard(weights, plan_of(weights, 2), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_during_the_run_is_noticed(tmp_path):
    save_file({"a": torch.ones(4)}, tmp_path / "m.safetensors")
    weights = file_weights(tmp_path / "m.safetensors")

    def change(done, total):
        save_file({"a": torch.zeros(4)}, tmp_path / "m.safetensors")

    with pytest.raises(CheckpointError, match=r"m\.safetensors: changed while it was read\. Run the command again"):
        shard(weights, plan_of(weights, 2), tmp_path / "out", progress=change)
    assert not (tmp_path / "out").exists()


def test_a_source_that_vanishes_before_the_run_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        file_weights(tmp_path / "gone.safetensors")


def test_unequal_replicas_are_named(tmp_path):
    with NewFolder(tmp_path / "out") as new:
        for rank in range(2):
            write_rank(new.path, rank, 2, {"norm": torch.full((3,), float(rank))})
        finish(new, Manifest(2, {"norm": Entry((3,), "float32")}), Plan(2, ()))
    assert check_folder(tmp_path / "out") == []
    found = inspect(tmp_path / "out", check=True)
    assert found.faults == ("norm: ranks 0 and 1 share rows of it, but hold other values.",)


def kill(kind, folder, times):
    """Kill as many runs at random moments; :mod:`tests.checkpoint.kills` says what must hold after each."""
    command = [sys.executable, "-m", "tests.checkpoint.kills", kind, str(folder), str(times)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    killed, finished = map(int, done.stdout.split())
    assert killed > 0 and killed + finished == times


@pytest.mark.parametrize("kind", ["shard", "merge", "reshard", "save"])
def test_a_kill_leaves_the_previous_folder_or_the_new_one(kind, tmp_path):
    kill(kind, tmp_path, 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shard", "merge", "reshard", "save"])
def test_many_kills_leave_the_previous_folder_or_the_new_one(kind, tmp_path):
    kill(kind, tmp_path, 100)
