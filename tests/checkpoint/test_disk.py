"""Real file systems that are full or may not be written: one line each, and nothing lost or left."""

import subprocess

import pytest
import torch

from tests.checkpoint.frame import cut_all, hashes, plan_of
from tpconvert.checkpoint import check_folder, merge, reshard, shard, tensor_weights
from tpconvert.errors import CheckpointError

WEIGHTS = tensor_weights({f"w{i}": torch.rand(64, 512, generator=torch.Generator().manual_seed(i)) for i in range(4)})
"""512 KiB."""
PLAN = plan_of(WEIGHTS, 2, cut_all(WEIGHTS))


@pytest.fixture
def disk(tmp_path):
    """A disk of 1.5 MiB, and what mounts it anew with other options."""
    where = tmp_path / "disk"
    where.mkdir()

    def mount(*options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", where]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no file system may be mounted here")

    mount("size=1536k")
    yield where, mount
    subprocess.run(["umount", "-l", where], check=True)


def filling(where):
    """A file, and a call that makes it take all the room left."""
    filler = where / "filler"

    def fill(done, total):
        with filler.open("ab", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    return filler, fill


def commands(held, to):
    return {
        "shard": lambda progress: shard(WEIGHTS, PLAN, to, progress=progress),
        "merge": lambda progress: merge(held, to, progress=progress),
        "reshard": lambda progress: reshard(held, to, tp=3, progress=progress),
    }


@pytest.mark.parametrize("command", ["shard", "reshard"])
def test_a_disk_that_others_fill_meanwhile_leaves_nothing(disk, tmp_path, command):
    where, _ = disk
    filler, fill = filling(where)
    shard(WEIGHTS, PLAN, tmp_path / "held")
    with pytest.raises(CheckpointError, match=r"the disk is full\. Nothing was written\. Free some space"):
        commands(tmp_path / "held", where / "out")[command](fill)
    assert [path.name for path in where.iterdir()] == ["filler"]
    filler.unlink()
    commands(tmp_path / "held", where / "out")[command](None)
    assert check_folder(where / "out") == []


def test_the_room_of_a_file_is_set_aside_when_it_is_begun(disk, tmp_path):
    where, _ = disk
    _, fill = filling(where)
    shard(WEIGHTS, PLAN, tmp_path / "held")
    merge(tmp_path / "held", where / "out", progress=fill)
    merge(tmp_path / "held", tmp_path / "other")
    assert hashes(where / "out") == hashes(tmp_path / "other")


@pytest.mark.parametrize("command", ["shard", "merge", "reshard"])
def test_a_disk_that_is_too_small_is_refused_with_the_numbers(disk, tmp_path, command):
    where, _ = disk
    shard(WEIGHTS, PLAN, where / "first")
    before = hashes(where)
    (where / "filler").write_bytes(bytes(700 << 10))
    with pytest.raises(CheckpointError, match=r"bytes are to be written, but the disk has [\d,]+ left\. Free some"):
        commands(where / "first", where / "out")[command](None)
    (where / "filler").unlink()
    assert hashes(where) == before


@pytest.mark.parametrize("command", ["shard", "merge", "reshard"])
def test_a_disk_that_may_only_be_read_is_named(disk, tmp_path, command):
    where, mount = disk
    shard(WEIGHTS, PLAN, where / "held")
    before = hashes(where)
    mount("remount", "ro")
    with pytest.raises(CheckpointError, match=r"out: cannot be written here \(Read-only file system\)"):
        commands(where / "held", where / "out")[command](None)
    assert hashes(where) == before
    commands(where / "held", tmp_path / "elsewhere")[command](None)  # to be read it is good enough
    assert [path.name for path in where.iterdir()] == ["held"]
