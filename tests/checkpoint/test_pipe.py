"""What reading, hashing and writing in several threads must keep to: once each, one error, nothing left behind."""

import errno
import os
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.frame import cut_all, hashes, plan_of, rows
from tpconvert.checkpoint import check_folder, file_weights, merge, reshard, shard, tensor_weights
from tpconvert.checkpoint.files.tensorfile import TensorFile
from tpconvert.checkpoint.tensors.compose import full, run_around, split_of
from tpconvert.errors import CheckpointError

SHAPES = {"rows": (512, 96), "columns": (256, 192), "experts": (8, 48, 64), "whole": (96, 64), "norm": (64,)}


@pytest.fixture
def source(tmp_path):
    """A file of 400 kB, cut in every direction, in runs of 8 kB."""
    save_file({name: torch.rand(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def small_runs(monkeypatch):
    monkeypatch.setattr("tpconvert.checkpoint.write.RUN", 8192)
    monkeypatch.setattr("tpconvert.checkpoint.write.ROUND", 16384)


def cut(weights, tp):
    layouts = {"rows": rows((512, 96)), "columns": rows((256, 192), 1), "experts": rows((8, 48, 64), 2)}
    return plan_of(weights, tp, layouts)


@pytest.fixture
def read(monkeypatch):
    """The bytes read from files so far."""
    count, preadv = [0], os.preadv

    def counted(*args):
        got = preadv(*args)
        count[0] += got
        return got

    monkeypatch.setattr(os, "preadv", counted)
    return count


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_each_byte_is_read_once_at_any_degree(source, tmp_path, small_runs, read, tp):
    size = source.stat().st_size
    weights = file_weights(source)
    shard(weights, cut(weights, tp), tmp_path / "out")
    assert 0.9 * size < read[0] <= size
    read[0] = 0
    reshard(tmp_path / "out", tmp_path / "other", tp=3)
    assert read[0] <= size
    read[0] = 0
    merge(tmp_path / "other", tmp_path / "back")
    assert read[0] <= size
    assert hashes(tmp_path / "back")["model.safetensors"] == hashes(tmp_path)["model.safetensors"]


def test_what_lies_across_is_read_once_too(tmp_path, small_runs, read):
    from tpconvert.checkpoint.tensors.weights import Weights
    from tpconvert.spec.recipe import Permute, Take

    save_file({"x": torch.rand(96, 128)}, tmp_path / "m.safetensors")
    store = file_weights(tmp_path / "m.safetensors").store
    weights = Weights(store, {"x": Permute(Take("x", (96, 128)), (1, 0))})
    shard(weights, plan_of(weights, 2, {"x": rows((128, 96))}), tmp_path / "out")
    assert read[0] <= 96 * 128 * 4
    merge(tmp_path / "out", tmp_path / "back")
    assert hashes(tmp_path / "back")["m.safetensors"] == hashes(tmp_path)["m.safetensors"]


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (4, 6, 5), (0, 4), (3, 0), (2, 3, 4, 5)])
@pytest.mark.parametrize("limit", [1, 40, 1000])
def test_a_split_covers_a_tensor_in_order(shape, limit):
    whole = torch.arange(max(torch.Size(shape).numel(), 0)).reshape(shape)
    boxes = list(split_of([shape], 8, limit).boxes(shape))
    parts = [whole[tuple(slice(a, z) for a, z in box)].reshape(-1) for box in boxes]
    assert torch.equal(torch.cat([*parts, whole.new_empty(0)]), whole.reshape(-1))
    assert all(run_around(shape, box) == box for box in boxes)
    assert all(8 * part.numel() <= max(limit, 8) for part in parts)


def test_a_box_is_read_as_it_is_seen(source):
    file = TensorFile(source)
    boxes = [((0, 8), (0, 48), (3, 5)), ((2, 3), (7, 9), (0, 64)), ((1, 1), (0, 48), (0, 64)), full((8, 48, 64))]
    for box in boxes:
        seen = file.tensor("experts")[tuple(slice(a, z) for a, z in box)]
        assert torch.equal(file.read("experts", box), seen)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda path: os.truncate(path, 5000), "was cut short while it was read"),
        (lambda path: path.unlink(), "vanished while it was read"),
        (lambda path: path.write_bytes(path.read_bytes()), "(changed|was cut short) while it was read"),
    ],
)
@pytest.mark.parametrize("command", ["shard", "merge", "reshard"])
def test_what_is_read_may_be_harmed_at_any_time(source, tmp_path, small_runs, monkeypatch, harm, text, command):
    weights = file_weights(source)
    shard(weights, cut(weights, 2), tmp_path / "in")
    path = source if command == "shard" else tmp_path / "in" / "rank-00001-of-00002" / "model.safetensors"
    before, threads = hashes(tmp_path), threading.active_count()
    monkeypatch.setattr("tpconvert.checkpoint.files.pipe.AHEAD", 2)
    done = []

    def progress(now, total):
        if now > total // 4 and not done:
            done.append(harm(path))

    run = {
        "shard": lambda: shard(file_weights(source), cut(weights, 2), tmp_path / "out", progress=progress),
        "merge": lambda: merge(tmp_path / "in", tmp_path / "out", progress=progress),
        "reshard": lambda: reshard(tmp_path / "in", tmp_path / "out", tp=3, progress=progress),
    }[command]
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {text}\. Run the command again"):
        run()
    assert done and threading.active_count() == threads
    left = hashes(tmp_path)
    assert {name: left[name] for name in before if name in left and tmp_path / name != path} == {
        name: digest for name, digest in before.items() if tmp_path / name != path
    }
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("command", [merge, lambda a, b, check: reshard(a, b, tp=3, check=check)])
def test_a_check_goes_on_beside_and_still_comes_first(source, tmp_path, command):
    weights = file_weights(source)
    shard(weights, cut(weights, 2), tmp_path / "in")
    path = tmp_path / "in" / "rank-00001-of-00002" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00002/model\.safetensors: its blake3 is not the one"):
        command(tmp_path / "in", tmp_path / "out", check=True)
    assert not (tmp_path / "out").exists()
    command(tmp_path / "in", tmp_path / "out", check=False)
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_fails_ends_every_thread(source, tmp_path, small_runs, monkeypatch, number):
    from tpconvert.checkpoint.files import tensorfile

    def fail(*args):
        raise OSError(number, os.strerror(number))

    weights, threads = file_weights(source), threading.active_count()
    monkeypatch.setattr(tensorfile.os, "fsync", fail)
    with pytest.raises(CheckpointError, match=r"out: (not written: |the disk is full)"):
        shard(weights, cut(weights, 4), tmp_path / "out")
    assert threading.active_count() == threads
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]


def test_a_place_that_is_read_only_is_named(tmp_path, monkeypatch):
    from pathlib import Path

    def refuse(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    weights = tensor_weights({"a": torch.ones(4)})
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=r"out: cannot be written here \(Read-only file system\)"):
        shard(weights, plan_of(weights, 2), tmp_path / "out")


WRITER = """
import sys, time, torch
from tests.checkpoint.frame import plan_of
from tpconvert.checkpoint import shard, tensor_weights
from tpconvert.errors import CheckpointError
weights = tensor_weights({f"w{i}": torch.full((8, 8), float(i)) for i in range(20)})
print("ready", flush=True)
sys.stdin.readline()
try:
    shard(weights, plan_of(weights, 2), sys.argv[1], progress=lambda done, total: time.sleep(0.01))
    print("written")
except CheckpointError as error:
    print(error)
"""


def test_of_two_processes_on_one_target_one_writes(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "out")]
    two = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in two:
        assert process.stdout.readline() == "ready\n"
    for process in two:
        process.stdin.write("\n")
        process.stdin.flush()
    told = sorted(process.communicate(timeout=120)[0].strip() for process in two)
    other = (
        f"{tmp_path}/out: another process is writing it now. Wait for it to end.",
        f"{tmp_path}/out: exists already",
    )
    assert told[1] == "written" and told[0].startswith(other)
    assert check_folder(tmp_path / "out") == [] and list(tmp_path.iterdir()) == [tmp_path / "out"]


PEAK = """
import sys
from benchmarks.checkpoint import make_source
from pathlib import Path
from tpconvert.checkpoint import file_weights, merge, reshard, shard
here = Path(sys.argv[1])
plan = make_source(here / "source", 1.5, "float32", 4, holes=True)
shard(file_weights(here / "source"), plan, here / "out")
merge(here / "out", here / "back", check=True)
reshard(here / "out", here / "other", tp=3)
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    largest = 16 * 2816 * 2048 * 4
    assert int(done.stdout) * 1024 <= (512 << 20) + 3 * largest
    assert len(load_file(tmp_path / "back" / "model-00001-of-00004.safetensors")) > 1


def test_files_without_a_tensor_are_written(tmp_path):
    save_file({}, tmp_path / "model.safetensors", {"format": "pt"})
    weights = file_weights(tmp_path / "model.safetensors")
    shard(weights, plan_of(weights, 2, cut_all(weights)), tmp_path / "out")
    assert check_folder(tmp_path / "out") == []
    merge(tmp_path / "out", tmp_path / "back")
    assert hashes(tmp_path / "back")["model.safetensors"] == hashes(tmp_path)["model.safetensors"]


HELPERS = """
import os, sys, threading
from pathlib import Path
import torch
from safetensors.torch import save_file
from tests.checkpoint.frame import plan_of, rows
from tpconvert.checkpoint import file_weights, merge, reshard, shard

here = Path(sys.argv[1])
save_file({"w": torch.rand(2048, 1024)}, here / "model.safetensors")
weights = file_weights(here / "model.safetensors")
most = 0
def look(*_):
    global most
    most = max(most, len(os.listdir("/proc/self/task")) - threading.active_count())
look()
before, most = most, 0
shard(weights, plan_of(weights, 2, {"w": rows((2048, 1024), 1)}), here / "shards", progress=look)
reshard(here / "shards", here / "again", tp=3, progress=look)
merge(here / "again", here / "out", progress=look)
print(most - before)
other = threading.Thread(target=lambda: (torch.rand(2048, 1024)[:, :512].contiguous(), look()))
other.start()
other.join()
print(most - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_copying_wakes_no_threads_of_torch(tmp_path):
    """They wait by spinning: it took three times the processor time of all the rest."""
    (tmp_path / "run.py").write_text(HELPERS)
    env = {**os.environ, "OMP_NUM_THREADS": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, tmp_path / "run.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    ours, torchs = map(int, done.stdout.split())
    assert ours <= 0 < torchs
