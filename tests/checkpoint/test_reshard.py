import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.checkpoint.frame import cut_all, hashes, layouts, menagerie, plan_of, rows
from tests.checkpoint.test_store import split
from tpconvert.checkpoint import (
    check_folder,
    file_weights,
    gather_pieces,
    inspect,
    load_rank,
    merge,
    plain_weights,
    read_manifest,
    read_plan,
    reshard,
    shard,
    take_pieces,
    tensor_weights,
)
from tpconvert.checkpoint.tensors.pieces import same_bytes
from tpconvert.checkpoint.tensors.store import Store
from tpconvert.errors import CheckpointError
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.plan import Verdict

HEADS = Layout(0, (Block(8, 3),))


@pytest.fixture
def source(tmp_path):
    """Two files with an index, other files beside them, all kinds of tensors."""
    folder = tmp_path / "source"
    tensors = menagerie()
    files = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    split(folder, files, tensors)
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "manifest.json.txt").write_text("not ours")
    (folder / "plan.json").write_text("a file that happens to have our name")
    (folder / "sub").mkdir()
    (folder / "sub" / "vocab.txt").write_text("a\r\nb")
    return folder


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_an_untrained_merge_gives_every_file_back(source, tmp_path, tp):
    weights = file_weights(source)
    shard(weights, plan_of(weights, tp, cut_all(weights, 8)), tmp_path / "out")
    assert check_folder(tmp_path / "out") == []
    merge(tmp_path / "out", tmp_path / "back", check=True)
    assert hashes(tmp_path / "back") == hashes(source)


def test_a_lone_file_comes_back_under_its_name(tmp_path):
    save_file({"a": torch.rand(4)}, tmp_path / "mine.safetensors")
    weights = file_weights(tmp_path / "mine.safetensors")
    shard(weights, plan_of(weights, 2), tmp_path / "out")
    merge(tmp_path / "out", tmp_path / "back")
    assert hashes(tmp_path / "back") == {"mine.safetensors": hashes(tmp_path)["mine.safetensors"]}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), a=st.integers(1, 8), b=st.integers(1, 8))
def test_resharding_twice_is_resharding_once(data, a, b, tmp_path):
    layout, shape = data.draw(layouts((a, b)))
    weights = tensor_weights({"x": torch.rand(shape), "y": torch.rand(5)})
    try:
        plan = plan_of(weights, a, {"x": layout, "y": rows((5,))} if max(a, b) <= 5 else {"x": layout})
        shard(weights, plan, tmp_path / "a", force=True)
        shard(weights, replace(plan, tp=b), tmp_path / "b", force=True)
    except CheckpointError as error:
        assert "units cannot be shared by" in str(error)
        return
    reshard(tmp_path / "a", tmp_path / "ab", tp=b, force=True)
    assert hashes(tmp_path / "ab") == hashes(tmp_path / "b")
    for rank in range(b):
        direct = load_rank(tmp_path / "a", rank, tp=b)
        assert all(same_bytes(direct[n], t) for n, t in load_rank(tmp_path / "b", rank).items())


@pytest.mark.parametrize(
    "layout", [HEADS, Layout(0, (Block(8), Block(8), Block(8))), Layout(0, (Block(2, (Block(4, 3),)),))]
)
def test_every_pair_of_degrees_reshards_to_the_same_files(tmp_path, layout):
    weights = tensor_weights({"x": torch.rand(24, 3)})
    degrees = [d for d in range(1, 9) if _dealt(layout, d)]
    for degree in degrees:
        shard(weights, plan_of(weights, degree, {"x": layout}), tmp_path / str(degree))
    for a in degrees:
        for b in degrees:
            reshard(tmp_path / str(a), tmp_path / "got", tp=b, force=True)
            assert hashes(tmp_path / "got") == hashes(tmp_path / str(b)), (a, b)


def _dealt(layout, degree):
    from tests.checkpoint.frame import fits

    return fits(layout, degree)


def test_a_rank_holds_its_pieces_and_tied_names(tmp_path):
    value = torch.rand(24, 3)
    weights = tensor_weights({"emb": value, "norm": torch.ones(3)}, tied={"head": "emb"})
    shard(weights, plan_of(weights, 4, {"emb": HEADS}), tmp_path / "out")
    for rank in range(4):
        local = load_rank(tmp_path / "out", rank, check=True)
        assert same_bytes(local["emb"], take_pieces(value, HEADS, rank, 4))
        assert local["head"] is local["emb"]
        assert set(local) == {"emb", "norm", "head"}
    parts = [load_rank(tmp_path / "out", r)["emb"] for r in range(4)]
    assert same_bytes(gather_pieces(parts, HEADS, (24, 3)), value)


def test_a_rank_is_loaded_in_another_dtype_when_asked(tmp_path):
    weights = tensor_weights({"a": torch.rand(3), "ids": torch.arange(3)})
    shard(weights, plan_of(weights, 1), tmp_path / "out")
    local = load_rank(tmp_path / "out", 0, dtype=torch.bfloat16)
    assert (local["a"].dtype, local["ids"].dtype) == (torch.bfloat16, torch.int64)


def test_rank_files_are_what_safetensors_reads(tmp_path):
    weights = tensor_weights({"x": torch.rand(24, 3)})
    shard(weights, plan_of(weights, 2, {"x": HEADS}), tmp_path / "out")
    file = load_file(tmp_path / "out" / "rank-00001-of-00002" / "model.safetensors")
    assert same_bytes(file["x"], weights.read("x", 12))


def test_large_ranks_are_split_with_an_index(tmp_path):
    weights = tensor_weights({f"w{i}": torch.rand(10, 10) for i in range(5)})
    shard(weights, plan_of(weights, 2), tmp_path / "out", max_file=900)
    folder = tmp_path / "out" / "rank-00001-of-00002"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    assert index["weight_map"]["w2"] == "model-00002-of-00003.safetensors"
    assert len(load_rank(tmp_path / "out", 1)) == 5
    assert check_folder(tmp_path / "out") == []
    reshard(tmp_path / "out", tmp_path / "three", tp=3)
    merge(tmp_path / "three", tmp_path / "back")
    assert len(load_file(tmp_path / "back" / "model.safetensors")) == 5


def test_tensors_larger_than_one_run_are_exact(tmp_path, monkeypatch):
    monkeypatch.setattr("tpconvert.checkpoint.write.RUN", 256)
    monkeypatch.setattr("tpconvert.checkpoint.files.pipe.RELEASE_EVERY", 300)
    weights = tensor_weights({"x": torch.rand(24, 30), "y": torch.rand(7, 40, 3)})
    plan = plan_of(weights, 3, {"x": rows((24, 30), 1), "y": rows((7, 40, 3), 1)})
    shard(weights, plan, tmp_path / "out")
    merge(tmp_path / "out", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(same_bytes(back[n], weights.read(n)) for n in ("x", "y"))


def test_what_the_module_has_no_use_for_is_kept(tmp_path):
    save_file({"m.a": torch.rand(4), "pooler": torch.rand(3)}, tmp_path / "model.safetensors")
    weights = plain_weights(file_weights(tmp_path / "model.safetensors").store, prefix="m.")
    assert weights.names() == ["a"]
    shard(weights, plan_of(weights, 2, cut_all(weights)), tmp_path / "two")
    assert read_manifest(tmp_path / "two").original.extra == ("pooler",)
    assert check_folder(tmp_path / "two") == []
    reshard(tmp_path / "two", tmp_path / "three", tp=3)
    merge(tmp_path / "three", tmp_path / "back")
    assert hashes(tmp_path / "back")["model.safetensors"] == hashes(tmp_path)["model.safetensors"]


def test_progress_ends_at_the_total(source, tmp_path):
    seen = []
    weights = file_weights(source)
    shard(weights, plan_of(weights, 2), tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert seen[-1][0] == seen[-1][1] == sum(p.stat().st_size for p in (tmp_path / "out").rglob("rank-*/*.safetensors"))


def test_a_folder_is_inspected(source, tmp_path):
    weights = file_weights(source)
    shard(weights, plan_of(weights, 2, cut_all(weights, 8)), tmp_path / "out")
    found = inspect(tmp_path / "out", check=True)
    assert found.faults == ()
    assert len(found.rank_bytes) == found.manifest.tp == found.plan.tp == 2
    assert inspect(tmp_path / "out").faults == ()


def test_the_plan_goes_along_with_its_degree_changed(source, tmp_path):
    weights = file_weights(source)
    plan = plan_of(weights, 2, cut_all(weights, 8))
    shard(weights, plan, tmp_path / "out")
    reshard(tmp_path / "out", tmp_path / "other", tp=5)
    assert read_plan(tmp_path / "out") == plan
    assert read_plan(tmp_path / "other") == replace(plan, tp=5)


def test_a_degree_that_cannot_be_names_the_tensor(tmp_path):
    weights = tensor_weights({"layers.0.k_proj": torch.rand(24, 3)})
    shard(weights, plan_of(weights, 2, {"layers.0.k_proj": Layout(0, (Block(6, 4),))}), tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"^layers\.0\.k_proj: 6 units cannot be shared by 8 ranks .* Use a degree up"
    ):
        reshard(tmp_path / "out", tmp_path / "other", tp=8)
    assert not (tmp_path / "other").exists()


def test_the_plan_of_another_model_is_refused(tmp_path):
    weights = tensor_weights({"a": torch.rand(4), "b": torch.rand(4)})
    plan = plan_of(weights, 2)
    other = Verdict("c", (4,), "float32", Layout(), "x")
    for verdicts, text in (
        ((*plan.verdicts, other), "The source lacks c, which the plan names"),
        (plan.verdicts[:1], "no verdict for b of the source"),
        ((plan.verdicts[0], replace(plan.verdicts[1], shape=(5,))), r"b: \[4\] in the source, but \[5\] in the plan"),
    ):
        with pytest.raises(CheckpointError, match=text):
            shard(weights, replace(plan, verdicts=verdicts), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_buffers_that_are_not_stored_need_no_tensor(tmp_path):
    weights = tensor_weights({"a": torch.rand(4)})
    plan = plan_of(weights, 2)
    buffer = Verdict("rope", (4,), "float32", Layout(), "x", kind="buffer", persistent=False)
    shard(weights, replace(plan, verdicts=(*plan.verdicts, buffer)), tmp_path / "out")
    assert set(load_rank(tmp_path / "out", 0)) == {"a"}


def test_a_rank_that_is_not_there_says_how_many_are(tmp_path):
    weights = tensor_weights({"a": torch.rand(4)})
    shard(weights, plan_of(weights, 2), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"is cut for 2 ranks, so there is no rank 2\. Start 2 ranks"):
        load_rank(tmp_path / "out", 2)


def test_tensors_of_several_dtypes_are_not_joined_into_one():
    from tpconvert.checkpoint.tensors.weights import Weights
    from tpconvert.spec.recipe import Join, Take

    store = Store({"f": {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float64)}})
    with pytest.raises(CheckpointError, match="m is made of tensors of several dtypes: float32, float64"):
        Weights(store, {"m": Join(0, (Take("a", (2,)), Take("b", (2,))))})
