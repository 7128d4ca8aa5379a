"""Hashes of files: the kind is written with them, and folders of before are read."""

import hashlib
import json
import sys

import pytest
import torch
from blake3 import blake3

from tests.checkpoint.frame import cut_all, hashes, plan_of
from tpconvert.checkpoint import check_folder, load_rank, merge, reshard, shard, tensor_weights
from tpconvert.checkpoint.files.digest import hash_file
from tpconvert.errors import CheckpointError

WEIGHTS = tensor_weights({"a": torch.arange(24.0).reshape(6, 4), "b": torch.arange(5.0)})
RANK = "rank-00001-of-00002/model.safetensors"


@pytest.fixture
def out(tmp_path):
    shard(WEIGHTS, plan_of(WEIGHTS, 2, cut_all(WEIGHTS)), tmp_path / "out")
    return tmp_path / "out"


def test_the_hashes_are_those_of_the_files(out):
    listed = json.loads((out / "manifest.json").read_text())["files"]
    assert listed
    for name, (size, digest) in listed.items():
        data = (out / name).read_bytes()
        assert (size, digest) == (len(data), f"blake3:{blake3(data).hexdigest()}")
    data = (out / RANK).read_bytes()
    assert hash_file(out / RANK, "sha256").digest == f"sha256:{hashlib.sha256(data).hexdigest()}"


def as_format_1(folder):
    data = json.loads((folder / "manifest.json").read_text())
    files = {
        name: [size, hashlib.sha256((folder / name).read_bytes()).hexdigest()]
        for name, (size, _) in data["files"].items()
    }
    (folder / "manifest.json").write_text(json.dumps(data | {"format": 1, "files": files}))


def test_a_folder_of_format_1_is_read_and_checked(out, tmp_path):
    as_format_1(out)
    assert check_folder(out) == []
    assert load_rank(out, 1, check=True).keys() == {"a", "b"}
    reshard(out, tmp_path / "three", tp=3, check=True)
    assert json.loads((tmp_path / "three/manifest.json").read_text())["format"] == 2
    merge(out, tmp_path / "back", check=True)
    merge(tmp_path / "three", tmp_path / "again", check=True)
    assert hashes(tmp_path / "back") == hashes(tmp_path / "again")
    raw = bytearray((out / RANK).read_bytes())
    raw[-1] ^= 1
    (out / RANK).write_bytes(raw)
    assert check_folder(out) == [f"{RANK}: its sha256 is not the one written: a byte has changed."]


def test_without_the_package_files_get_sha256(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "blake3", None)
    made = shard(WEIGHTS, plan_of(WEIGHTS, 2, cut_all(WEIGHTS)), tmp_path / "out")
    assert {file.kind for file in made.files.values()} == {"sha256"}
    assert check_folder(tmp_path / "out") == []
    monkeypatch.undo()
    assert check_folder(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("missing", "kind", "text"),
    [(True, "blake3", r"BLAKE3, whose package is missing\. pip install blake3"), (False, "md5", "of the kind 'md5'")],
)
def test_a_hash_that_cannot_be_made_is_one_line(out, monkeypatch, missing, kind, text):
    path = out / "manifest.json"
    path.write_text(path.read_text().replace("blake3:", f"{kind}:"))
    if missing:
        monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(CheckpointError, match=text):
        check_folder(out)
    assert load_rank(out, 0).keys() == {"a", "b"}
