import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from tests.checkpoint.frame import menagerie
from tpconvert.checkpoint.files.digest import hash_file
from tpconvert.checkpoint.files.header import DTYPES, make_header, parse_header, read_header
from tpconvert.checkpoint.files.tensorfile import Buffers, TensorFile, TensorFileWriter, flat_bytes, load_pickle
from tpconvert.checkpoint.tensors.pieces import same_bytes
from tpconvert.errors import CheckpointError


def write(path, tensors, metadata=None):
    header = make_header({n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}, metadata)
    with TensorFileWriter(path, header) as writer:
        for name in header.tensors:
            writer.write(tensors[name])
        return writer.close()


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"é": '"\\ü'}])
def test_files_are_the_bytes_that_safetensors_writes(tmp_path, metadata):
    tensors = menagerie()
    file = write(tmp_path / "ours", tensors, metadata)
    save_file(tensors, tmp_path / "theirs", metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert file == hash_file(tmp_path / "theirs")


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    )
)
def test_headers_are_the_bytes_that_safetensors_writes(kinds):
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    ours = make_header({name: (tuple(shape), dtype) for name, (dtype, shape) in kinds.items()}).encoded
    assert save(tensors)[: len(ours)] == ours


def test_tensors_are_read_as_they_were_written(tmp_path):
    write(tmp_path / "f", menagerie())
    file, theirs = TensorFile(tmp_path / "f"), load_file(tmp_path / "f")
    for name, tensor in menagerie().items():
        assert same_bytes(file.tensor(name), tensor), name
        if tensor.dtype != torch.float8_e8m0fnu:  # which the library writes but does not read
            assert same_bytes(theirs[name], tensor), name
    file.release()
    assert same_bytes(file.tensor("bool"), menagerie()["bool"])


def test_a_header_padded_oddly_by_another_writer_is_read(tmp_path):
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    text += " " * ((3 - len(text)) % 8)
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text.encode() + torch.ones(2).numpy().tobytes())
    assert TensorFile(tmp_path / "f").tensor("a").tolist() == [1, 1]


def entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (entry(dtype="F31"), "unknown dtype 'F31'"),
        (entry(shape=[3]), r"8 bytes for a float32 tensor of \[3\]"),
        (entry(shape=[-2]), "no number of rows"),
        (entry(shape=[2.0]), "no number of rows"),
        (entry(shape=[10**30]), "8 bytes for"),
        (entry(data_offsets=[8, 0]), "-8 bytes"),
        (entry(data_offsets=[8, 16]), "begin at 8, not at 0"),
        (entry() | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "begin at 4, not at 8"),
        (entry() | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "cut short or damaged"),
        ({"a": {"dtype": "F32"}}, "KeyError"),
        ({"a": 3}, "damaged"),
        ([1], "damaged"),
        (entry() | {"__metadata__": {"x": 3}}, "metadata are not text"),
    ],
)
def test_a_header_that_lies_is_refused(data, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        parse_header(json.dumps(data), 8 + len(json.dumps(data)) + 8, "DIR/f")
    assert str(caught.value).startswith("DIR/f: ")


def test_a_name_that_occurs_twice_is_refused():
    one = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    with pytest.raises(CheckpointError, match="a name occurs twice"):
        parse_header(f"{{{one},{one}}}", None, "f")


@given(data=st.data())
def test_any_flipped_byte_of_a_header_is_one_kind_of_error(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "flipped"
    raw = bytearray(save({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int8)}, {"format": "pt"}))
    at = data.draw(st.integers(0, len(raw) - 14 - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:  # a letter of a name, of the metadata, or of a dtype of the same width
        assert header.size == len(raw)


@pytest.mark.parametrize("size", [0, 7, 8, 20, 100])
def test_a_file_cut_short_is_refused(tmp_path, size):
    (tmp_path / "f").write_bytes(save({"a": torch.ones(30)})[:size])
    with pytest.raises(CheckpointError, match="cut short"):
        TensorFile(tmp_path / "f")


def test_a_huge_header_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "f").open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(tmp_path / "f")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"none: cannot be read \(No such file"):
        read_header(tmp_path / "none")


class Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_of_tensors_is_read(tmp_path, old):
    torch.save({"a": torch.ones(3)}, tmp_path / "f.bin", _use_new_zipfile_serialization=not old)
    assert load_pickle(tmp_path / "f.bin")["a"].tolist() == [1, 1, 1]


def test_a_pickle_that_runs_code_is_refused(tmp_path, capsys):
    torch.save({"a": Evil()}, tmp_path / "f.bin")
    with pytest.raises(CheckpointError, match=r"f\.bin: refused: it is damaged, or holds more than tensors"):
        load_pickle(tmp_path / "f.bin")
    assert capsys.readouterr().out == ""


def test_a_pickle_of_something_else_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "f.bin")
    with pytest.raises(CheckpointError, match="not a dict of tensors"):
        load_pickle(tmp_path / "f.bin")


def test_memory_is_used_again_only_when_nothing_refers_to_it():
    buffers = Buffers()
    first = buffers.take(8000)
    at, view = first.data_ptr(), flat_bytes(first.view(torch.int32)[5:])
    del first
    assert buffers.take(8000).data_ptr() != at
    del view
    assert at in {tensor.data_ptr() for tensor in [buffers.take(7000) for _ in range(3)]}


def test_what_lies_apart_is_packed():
    whole = torch.arange(10_000).reshape(100, 100)
    packed = Buffers().packed(whole[:, 10:90])
    assert packed.is_contiguous() and torch.equal(packed, whole[:, 10:90])
