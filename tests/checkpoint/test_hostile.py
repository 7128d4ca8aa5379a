"""Files that lie: refused with one line, whatever is in them, and nothing outside their folder is read or written."""

import json
import os
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tests.checkpoint.frame import cut_all, hashes, plan_of
from tpconvert.checkpoint import (
    check_folder,
    file_weights,
    inspect,
    load_rank,
    merge,
    open_store,
    reshard,
    shard,
    tensor_weights,
)
from tpconvert.checkpoint.files.header import parse_header
from tpconvert.checkpoint.files.tensorfile import TensorFile, load_pickle
from tpconvert.errors import CheckpointError

FINE = save({"a": torch.rand(4, 3), "b": torch.arange(5)}, {"format": "pt"})
HEADER = int.from_bytes(FINE[:8], "little")

names = st.text(max_size=6) | st.just("__metadata__")
leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
values = st.recursive(leaves, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4))
numbers = st.integers(-2, 2**66) | st.integers(0, 40)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "F8_E4M3", "F4", "I64"]) | values,
        "shape": st.lists(numbers, max_size=5) | values,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | values,
    }
)


def file_of(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def opened_or_refused(path):
    """Open a file and read all of it: it works or is one kind of error."""
    try:
        file = TensorFile(path)
        for name, stored in file.header.tensors.items():
            whole = tuple((0, n) for n in stored.shape)
            assert file.read(name, whole).shape == file.tensor(name).shape == torch.Size(stored.shape)
    except CheckpointError as error:
        assert str(path) in str(error) and "\n" not in error.message


@settings(max_examples=300)
@given(
    header=st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), entries | values, max_size=4), size=numbers
)
@example(header={"x": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}, size=0)
@example(header={"x": {"dtype": "F32", "shape": [0] * 70, "data_offsets": [0, 0]}}, size=0)
@example(header={"x": {"dtype": "U8", "shape": [2**70, 0], "data_offsets": [0, 0]}}, size=0)
@example(header={"x": {"dtype": "U8", "shape": "12", "data_offsets": [0, 0]}}, size=0)
def test_any_header_is_read_or_refused(header, size, tmp_path_factory):
    path = tmp_path_factory.mktemp("h") / "m.safetensors"
    path.write_bytes(file_of(json.dumps(header).encode("utf-8", "surrogatepass"), bytes(size % 64)))
    opened_or_refused(path)


@settings(max_examples=300)
@given(raw=st.binary(max_size=200) | st.builds(lambda at, b: FINE[:at] + b + FINE[at + len(b) :],
       st.integers(0, HEADER + 8), st.binary(min_size=1, max_size=6)))  # fmt: skip
def test_any_bytes_are_read_or_refused(raw, tmp_path_factory):
    path = tmp_path_factory.mktemp("h") / "m.safetensors"
    path.write_bytes(raw)
    opened_or_refused(path)


@given(st.text(max_size=60) | st.builds(json.dumps, values))
def test_any_text_of_a_header_is_parsed_or_refused(text):
    try:
        parse_header(text, None, "here")
    except CheckpointError as error:
        assert error.message.startswith("here: ")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=values | st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=5), values, max_size=3)}))
def test_any_index_is_read_or_refused(index, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        assert set(open_store(tmp_path).files()) <= {"m.safetensors"}
    except CheckpointError as error:
        assert str(tmp_path) in str(error)


def test_a_name_that_an_index_has_twice_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    text = '{"weight_map": {"a": "other.safetensors", "a": "m.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="a name occurs twice"):
        open_store(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "manifest.json"])
def test_a_text_of_a_size_that_none_has_is_not_read(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"bytes, which no .* has: refused"):
        (inspect if name == "manifest.json" else open_store)(tmp_path)


@pytest.mark.parametrize("target", ["file", "folder", "absolute", "missing", "fifo"])
def test_no_way_leads_out_of_a_source(tmp_path, target):
    outside, source = tmp_path / "outside", tmp_path / "s"
    outside.mkdir()
    source.mkdir()
    save_file({"a": torch.ones(2)}, outside / "m.safetensors")
    name = "m.safetensors"
    if target == "file":
        (source / name).symlink_to("../outside/m.safetensors")
    elif target == "folder":
        (source / "sub").symlink_to(outside)
        name = "sub/m.safetensors"
    elif target == "absolute":
        (source / name).symlink_to(outside / "m.safetensors")
    elif target == "missing":
        (source / name).symlink_to("nowhere")
    else:
        os.mkfifo(source / name)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"is a link out of its folder: refused|no such file"):
        open_store(source)


@pytest.fixture
def out(tmp_path):
    weights = tensor_weights({"a": torch.rand(6, 4), "b": torch.rand(5)})
    shard(weights, plan_of(weights, 2, cut_all(weights)), tmp_path / "out")
    return tmp_path / "out"


def changed(out, path, value):
    """Change one place of the manifest."""
    data = json.loads((out / "manifest.json").read_text())
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    (out / "manifest.json").write_text(json.dumps(data))


def commands(out, tmp_path):
    return (
        lambda: load_rank(out, 0),
        lambda: load_rank(out, 0, tp=3),
        lambda: merge(out, tmp_path / "merged"),
        lambda: reshard(out, tmp_path / "resharded", tp=3),
        lambda: inspect(out, check=True),
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["tensors", "a", "dtype"], "load"),
        (["tensors", "a", "dtype"], "float16"),
        (["tensors", "a", "shape"], [2**70, 4]),
        (["tensors", "a", "shape"], [6, 5]),
        (["tp"], 10**12),
        (["tp"], 1),
        (["files", "../../evil"], [1, "00"]),
        (["original", "copied"], {"../evil": "plan.json"}),
        (["original", "copied"], {"evil": "/etc/passwd"}),
        (["original", "copied"], {"evil": "rank-00000-of-00002/none"}),
        (["original", "copied"], {"model.safetensors": "plan.json"}),
        (["original", "files"], {"../evil.safetensors": "{}"}),
        (["original", "files"], {"model.safetensors": "{"}),
        (["original", "recipes", "a"], "b"),
        (["original", "recipes", "a"], ["narrow", "a", 0, 0, 10**9]),
        (["original", "recipes", "a"], ["permute", "a", [0, 0]]),
    ],
)
def test_a_manifest_that_lies_writes_nothing_anywhere(out, tmp_path, path, value):
    changed(out, path, value)
    before, refused = hashes(tmp_path), 0
    for command in commands(out, tmp_path):
        try:
            found = command()
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            refused += bool(getattr(found, "faults", ()))
    assert refused
    after = {n: h for n, h in hashes(tmp_path).items() if not n.startswith(("merged/", "resharded/"))}
    assert after == before and not any("evil" in p.name for p in tmp_path.rglob("*") if p.parent == tmp_path)


def test_a_name_that_a_manifest_has_twice_is_refused(out):
    text = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(text.replace('"tp": 2', '"tp": 2, "tp": 1'))
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged: .*a name occurs twice"):
        load_rank(out, 0)


def test_a_rank_file_that_is_a_link_out_is_refused(out, tmp_path):
    path = out / "rank-00001-of-00002" / "model.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    for command in (lambda: load_rank(out, 1), lambda: merge(out, tmp_path / "m")):
        with pytest.raises(CheckpointError, match="is a link out of its folder: refused"):
            command()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_byte_of_any_file_is_named(data, tmp_path):
    weights = tensor_weights({"a": torch.arange(24.0).reshape(6, 4), "b": torch.arange(5.0)})
    made = shard(weights, plan_of(weights, 2, cut_all(weights)), tmp_path / "out", force=True)
    name = data.draw(st.sampled_from(sorted(made.files)))
    path = tmp_path / "out" / name
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    assert check_folder(tmp_path / "out") == [f"{name}: its blake3 is not the one written: a byte has changed."]


def test_a_pickle_of_compressed_entries_is_refused(tmp_path):
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "fine.bin")
    with zipfile.ZipFile(tmp_path / "fine.bin") as fine, zipfile.ZipFile(tmp_path / "bomb.bin", "w") as bomb:
        for entry in fine.infolist():
            bomb.writestr(entry.filename, fine.read(entry), zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.bin").stat().st_size < 10_000
    with pytest.raises(CheckpointError, match=r"bomb\.bin: refused: .*a zip of compressed entries"):
        load_pickle(tmp_path / "bomb.bin")


@pytest.mark.parametrize("value", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_a_pickle_of_tensors_without_plain_values_is_refused(tmp_path, value):
    torch.save({"a": value}, tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=r"m\.bin: (not a dict of tensors|refused)"):
        file_weights(tmp_path / "m.bin")
