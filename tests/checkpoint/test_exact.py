"""Every way in which checkpoints are stored comes back byte for byte from an untrained shard, at any degree between."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.checkpoint.frame import cut_all, fits, hashes, plan_of, rows
from tests.checkpoint.test_store import split
from tpconvert.checkpoint import (
    NewFolder,
    carry,
    check_folder,
    entries_like,
    file_weights,
    finish,
    load_rank,
    merge,
    open_store,
    read_manifest,
    read_plan,
    reshard,
    shard,
    take_pieces,
    write_rank,
)
from tpconvert.checkpoint.tensors.pieces import same_bytes
from tpconvert.errors import CheckpointError
from tpconvert.spec.layout import Block, Layout


def there_and_back(source, tmp_path, tied=None):
    """Through degrees 3 and 2 to one checkpoint, which must be the source."""
    weights = file_weights(source, tied=tied)
    shard(weights, plan_of(weights, 3, cut_all(weights, 3)), tmp_path / "three")
    reshard(tmp_path / "three", tmp_path / "two", tp=2)
    assert check_folder(tmp_path / "two") == []
    merge(tmp_path / "two", tmp_path / "back", check=True)
    assert hashes(tmp_path / "back") == hashes(source)


def test_a_model_of_several_dtypes_comes_back(tmp_path):
    (tmp_path / "s").mkdir()
    tensors = {
        "proj.weight": torch.randn(256, 128).to(torch.float8_e4m3fn),
        "proj.weight_scale_inv": torch.rand(2, 1),
        "quant.weight": torch.randn(64, 32).to(torch.float8_e5m2),
        "quant.scale": torch.tensor(0.25),
        "norm.weight": torch.rand(128),
        "attn.weight": torch.rand(12, 7).bfloat16(),
        "half": torch.rand(5).half(),
        "mask": torch.rand(9, 9) > 0.5,
        "position_ids": torch.arange(77)[None],
        "num_batches_tracked": torch.tensor(12),
        "packed": torch.randint(-100, 100, (16, 6), dtype=torch.int32),
        "zero_points": torch.randint(0, 255, (6,), dtype=torch.uint8),
        "none": torch.empty(0),
        "no_rows": torch.empty(0, 7, dtype=torch.bfloat16),
        "no_columns": torch.empty(7, 0, dtype=torch.int8),
    }
    save_file(tensors, tmp_path / "s" / "model.safetensors", {"format": "pt"})
    there_and_back(tmp_path / "s", tmp_path)


@pytest.mark.parametrize("stored", [("emb",), ("head",), ("emb", "head")])
def test_tied_weights_in_one_of_many_files_come_back(tmp_path, stored):
    value = torch.rand(12, 5)
    tensors = {name: value.clone() for name in stored} | {f"w{i}": torch.rand(6, 3) for i in range(4)}
    names = sorted(tensors)
    files = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(names)}
    split(tmp_path / "s", files, tensors)
    there_and_back(tmp_path / "s", tmp_path, tied={"head": "emb"})


@pytest.mark.parametrize(
    "header",
    [
        '{"b":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]},"a":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}',
        '{ "__metadata__": {"format": "pt", "é": "日本", "n": "1"},\n "b": {"shape":[3,2], "data_offsets":[0, 24],'
        ' "dtype":"F32"}, "a":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}   ',
        '{"a":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"b":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}}',
        '{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},'
        '"b":{"dtype":"F32","shape":[3,2],"data_offsets":[8,32]}} ',
        '{"__metadata__":{},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[3,2],'
        '"data_offsets":[1,25]}}',
    ],
)
def test_a_header_of_another_writer_comes_back(tmp_path, header):
    (tmp_path / "s").mkdir()
    raw = header.encode()
    data = bytes(range(32 if "BF16" in header else 25))
    (tmp_path / "s" / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    there_and_back(tmp_path / "s", tmp_path)


def test_all_that_belongs_to_a_model_comes_back_and_is_not_run(tmp_path):
    source = tmp_path / "s"
    split(source, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    beside = {
        "config.json": '{"auto_map": {"AutoModel": "modeling_own.Own"}}',
        "generation_config.json": '{"eos_token_id": [1, 2]}\n',
        "preprocessor_config.json": "{}",
        "chat_template.jinja": "{{ '\u00e9' }}\r\n",
        "tokenizer.json": "{}",
        "tokenizer.model": "\0\1\2",
        "modeling_own.py": "raise SystemExit('this code was run')",
        "helpers/__init__.py": "raise SystemExit('this code was run')",
        ".gitattributes": "*.safetensors filter=lfs",
        "README.md": "# A model",
    }
    for name, text in beside.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text, newline="")
    there_and_back(source, tmp_path)


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_says_what_it_becomes(tmp_path, old):
    (tmp_path / "s").mkdir()
    tensors = {"a": torch.rand(6, 4).t(), "n": torch.tensor(3), "e": torch.empty(0, 2), "h": torch.rand(9).bfloat16()}
    torch.save(tensors, tmp_path / "s" / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    weights = file_weights(tmp_path / "s")
    assert weights.store.becomes() == {"pytorch_model.bin": "model.safetensors"}
    made = shard(weights, plan_of(weights, 2, cut_all(weights, 4)), tmp_path / "out")
    assert [file.name for file in made.original.files] == ["model.safetensors"]
    merge(tmp_path / "out", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert sorted(back) == sorted(tensors) and all(same_bytes(back[n], t.contiguous()) for n, t in tensors.items())
    assert open_store(tmp_path / "back").becomes() == {}


def test_a_pickle_that_changes_during_the_run_is_noticed(tmp_path):
    torch.save({"a": torch.rand(4)}, tmp_path / "m.pt")
    weights = file_weights(tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"m\.pt: vanished while it was read"):
        shard(weights, plan_of(weights, 2), tmp_path / "out", progress=lambda d, t: (tmp_path / "m.pt").unlink(True))
    assert not (tmp_path / "out").exists()


def step(base, out, tp, change):
    """A training run's save: every tensor changed, and an optimizer's moments and step counts beside it."""
    held = read_manifest(base)
    entries = {}
    with NewFolder(out) as new:
        carry(base, held, new.path)
        (new.path / "progress.json").write_text('{"step": 7}')
        for rank in range(tp):
            local = {n: change(t) for n, t in load_rank(base, rank).items() if n not in held.tied}
            floats = {n: t for n, t in local.items() if t.is_floating_point()}
            groups = {
                "optimizer.exp_avg": {n: t.float() * 2 for n, t in floats.items()},
                "optimizer.step": {n: torch.tensor(7.0) for n in floats},
                "master": {n: t.float() for n, t in floats.items() if t.dtype != torch.float32},
            }
            entries = {g: entries_like(held.tensors, held_of) for g, held_of in groups.items()}
            write_rank(new.path, rank, tp, local, groups)
        finish(new, type(held)(**{f: getattr(held, f) for f in held.__slots__} | {"groups": entries}), read_plan(base))


def test_a_trained_merge_keeps_names_dtypes_and_the_split_into_files(tmp_path):
    tensors = {"a": torch.rand(12, 4).bfloat16(), "b": torch.rand(7), "head": torch.rand(12, 4), "ids": torch.arange(5)}
    files = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    split(tmp_path / "s", files, tensors)
    weights = file_weights(tmp_path / "s")
    shard(weights, plan_of(weights, 4, cut_all(weights, 4)), tmp_path / "base")
    step(tmp_path / "base", tmp_path / "step", 4, lambda t: t + 1)
    reshard(tmp_path / "step", tmp_path / "three", tp=3)
    merge(tmp_path / "three", tmp_path / "back", check=True)
    index = "model.safetensors.index.json"
    assert json.loads((tmp_path / "back" / index).read_text()) == json.loads((tmp_path / "s" / index).read_text())
    for name, file in files.items():
        back = load_file(tmp_path / "back" / file)
        assert same_bytes(back[name], tensors[name] + 1)
        assert sorted(back) == sorted(n for n, f in files.items() if f == file)


KINDS = {
    "rows": Layout(0, (Block(16),)),
    "columns": Layout(1, (Block(24),)),
    "uneven": Layout(0, (Block(9, 2),)),
    "fused": Layout(0, (Block(8, 3), Block(8), Block(8))),
    "grouped": Layout(0, (Block(2, (Block(4, 3),)),)),
    "falcon": Layout(0, (Block(8, (Block(2), Block(1), Block(1))),)),
    "shared": Layout(0, (Block(1, 5),)),
    "experts": Layout(2, (Block(8), Block(8))),
}
SIZES = {"rows": (16, 3), "columns": (5, 24), "uneven": (18, 2), "fused": (40, 3), "grouped": (24, 2)}
SIZES |= {"falcon": (32, 3), "shared": (5, 4), "experts": (3, 4, 16), "whole": (7,)}


@pytest.mark.parametrize("degree", range(1, 9))
def test_every_kind_of_layout_travels_between_all_degrees_with_its_optimizer(tmp_path, degree):
    """``reshard(reshard(x, a), b) == reshard(x, b)``, every file of it, for this a and every b that can be dealt."""
    kinds = {k: layout for k, layout in KINDS.items() if fits(layout, degree)}
    save_file({k: torch.rand(SIZES[k]).bfloat16() for k in (*kinds, "whole")}, tmp_path / "m.safetensors")
    weights = file_weights(tmp_path / "m.safetensors")
    shard(weights, plan_of(weights, degree, kinds), tmp_path / "base")
    step(tmp_path / "base", tmp_path / "x", degree, lambda t: t + 1)
    for other in range(1, 9):
        if not all(fits(layout, other) for layout in kinds.values()):
            with pytest.raises(CheckpointError, match="cannot be shared by"):
                reshard(tmp_path / "x", tmp_path / "none", tp=other)
            continue
        reshard(tmp_path / "x", tmp_path / "y", tp=other, force=True)
        held = read_manifest(tmp_path / "y")
        assert set(held.groups) == {"optimizer.exp_avg", "optimizer.step", "master"}
        assert (tmp_path / "y" / "progress.json").read_text() == '{"step": 7}'
        for rank in range(other):
            local = load_rank(tmp_path / "y", rank)
            moments = load_rank(tmp_path / "y", rank, group="optimizer.exp_avg")
            for name, layout in (*kinds.items(), ("whole", Layout())):
                want = take_pieces(weights.read(name) + 1, layout, rank, other)
                assert same_bytes(local[name], want) and torch.equal(moments[name], want.float() * 2), (name, rank)
        reshard(tmp_path / "y", tmp_path / "z", tp=degree, force=True)
        assert hashes(tmp_path / "z") == hashes(tmp_path / "x")


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(a=st.integers(1, 8), b=st.integers(1, 8), shape=st.tuples(st.integers(8, 20), st.integers(8, 20)))
def test_any_shape_travels_between_any_degrees(tmp_path, a, b, shape):
    save_file({"x": torch.rand(shape), "y": torch.rand(shape).half()}, tmp_path / "m.safetensors")
    weights = file_weights(tmp_path / "m.safetensors")
    plan = plan_of(weights, a, {"x": rows(shape), "y": rows(shape, 1)})
    shard(weights, plan, tmp_path / "a", force=True)
    reshard(tmp_path / "a", tmp_path / "b", tp=b, force=True)
    merge(tmp_path / "b", tmp_path / "back", force=True)
    assert hashes(tmp_path / "back")["m.safetensors"] == hashes(tmp_path)["m.safetensors"]
