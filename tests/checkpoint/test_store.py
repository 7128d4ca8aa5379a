import json

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.frame import hashes, menagerie, plan_of
from tpconvert.checkpoint import file_weights, merge, module_weights, open_store, shard, tensor_weights
from tpconvert.checkpoint.tensors.pieces import same_bytes
from tpconvert.checkpoint.tensors.store import other_files
from tpconvert.errors import CheckpointError


def split(folder, weight_map, tensors=None):
    folder.mkdir(exist_ok=True)
    tensors = tensors or {name: torch.rand(4, 3) for name in weight_map}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n, f in weight_map.items() if f == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_a_folder_with_an_index_is_one_mapping(tmp_path):
    tensors = split(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    store = open_store(tmp_path)
    assert store.names() == ["a", "b"]
    assert store.info("a") == ((4, 3), torch.float32)
    assert same_bytes(store.tensor("b"), tensors["b"])
    assert torch.equal(store.read("a", 1, 3), tensors["a"][1:3])
    assert torch.equal(store.read("a", 1, dim=1), tensors["a"][:, 1:])


@pytest.mark.parametrize("file", ["../evil.safetensors", "/etc/passwd", "a/../../b.safetensors", ""])
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="outside its folder: refused"):
        open_store(tmp_path)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(CheckpointError, match="is a link out of its folder: refused"):
        open_store(tmp_path / "model")


def test_the_links_of_the_hubs_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "hash")
    (snapshot / "model.safetensors").symlink_to("../../blobs/hash")
    assert open_store(snapshot).names() == ["a"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": []}', "[" * 5000])
def test_a_damaged_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: not an index of weights"):
        open_store(tmp_path)


def test_a_file_the_index_needs_but_lacks_is_named(tmp_path):
    split(tmp_path, {"a": "m1.safetensors", "b": "m2.safetensors"})
    (tmp_path / "m2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"m2\.safetensors: no such file"):
        open_store(tmp_path)


def test_an_index_that_promises_a_tensor_too_much_is_named(tmp_path):
    split(tmp_path, {"a": "m1.safetensors", "b": "m2.safetensors"})
    save_file({"c": torch.ones(1)}, tmp_path / "m2.safetensors")
    with pytest.raises(CheckpointError, match=r"the index says that m2\.safetensors holds b, which it does not"):
        open_store(tmp_path)


def test_a_name_stored_in_two_files_is_refused(tmp_path):
    split(tmp_path, {"a": "m1.safetensors", "b": "m2.safetensors"})
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "m2.safetensors")
    with pytest.raises(CheckpointError, match="a is stored twice"):
        open_store(tmp_path)


def test_places_without_weights_say_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_store(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_store(tmp_path / "none")


def test_a_sharded_folder_is_no_source(tmp_path):
    weights = tensor_weights({"a": torch.ones(4)})
    shard(weights, plan_of(weights, 2), tmp_path / "out")
    with pytest.raises(CheckpointError, match="a folder of rank files, not a source"):
        open_store(tmp_path / "out")


def test_the_same_weights_in_other_formats_are_left_out(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    names = ["pytorch_model.bin", "tf_model.h5", "config.json", "code.py", "1_Dense/model.safetensors", "onnx/m.onnx"]
    for name in (*names, ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    kept, left = other_files(open_store(tmp_path))
    assert kept == ["1_Dense/model.safetensors", "code.py", "config.json"]
    assert left == ["onnx/m.onnx", "pytorch_model.bin", "tf_model.h5"]


def test_pickled_sources_come_back_as_safetensors(tmp_path):
    source, out, back = tmp_path / "source", tmp_path / "out", tmp_path / "back"
    source.mkdir()
    shared = torch.rand(4, 3)
    for i, held in enumerate(({"a": torch.rand(4, 3).t(), "emb": shared, "head": shared}, {"b": torch.rand(2)}), 1):
        torch.save(held, source / f"pytorch_model-{i:05d}-of-00002.bin")
    files = {n: f"pytorch_model-{i:05d}-of-00002.bin" for i, ns in ((1, ("a", "emb", "head")), (2, "b")) for n in ns}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    weights = file_weights(source, tied={"head": "emb"})
    shard(weights, plan_of(weights, 2), out)
    merge(out, back)
    assert sorted(hashes(back)) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert open_store(back).names() == ["a", "emb", "b"]
    assert same_bytes(open_store(back).tensor("a"), weights.read("a"))


def test_a_module_is_its_own_source():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    module[2].weight = module[0].weight
    module.register_buffer("cache", torch.ones(2), persistent=False)
    weights = module_weights(module)
    assert weights.tied == {"2.weight": "0.weight"}
    assert set(weights.names()) == set(module.state_dict()) - {"2.weight"}
    assert same_bytes(weights.read("2.weight"), module[0].weight)


@pytest.mark.parametrize("stored", [("emb", "head"), ("emb",), ("head",)])
def test_tied_weights_are_kept_once_whichever_names_are_stored(tmp_path, stored):
    value = torch.rand(6, 2)
    (tmp_path / "s").mkdir()
    save_file({name: value.clone() for name in stored} | {"x": torch.ones(1)}, tmp_path / "s" / "model.safetensors")
    weights = file_weights(tmp_path / "s", tied={"head": "emb"})
    assert sorted(weights.names()) == ["emb", "x"]
    shard(weights, plan_of(weights, 3), tmp_path / "out")
    merge(tmp_path / "out", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(tmp_path / "s")


def test_tied_weights_stored_with_other_values_are_refused(tmp_path):
    save_file({"emb": torch.ones(2), "head": torch.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="head and emb are one tensor in the module, but the source stores two"):
        file_weights(tmp_path / "m.safetensors", tied={"head": "emb"})


def test_every_kind_of_tensor_is_listed(tmp_path):
    save_file(menagerie(), tmp_path / "m.safetensors")
    weights = file_weights(tmp_path / "m.safetensors")
    for name, tensor in menagerie().items():
        assert weights.info(name) == (tuple(tensor.shape), tensor.dtype)
        assert same_bytes(weights.read(name), tensor)


def test_a_plan_may_name_tied_tensors_the_other_way_round(tmp_path):
    weights = tensor_weights({"emb": torch.rand(6, 2)}, tied={"head": "emb"})
    plan = plan_of(tensor_weights({"head": torch.rand(6, 2)}, tied={"emb": "head"}), 2)
    assert plan["emb"].tied_to == "head"
    made = shard(weights, plan, tmp_path / "out")
    assert set(made.tensors) | set(made.tied) == {"emb", "head"}
