from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.frame import hashes, plan_of
from tpconvert.checkpoint import (
    NewFolder,
    carry,
    check_folder,
    entries_like,
    file_weights,
    finish,
    gather_pieces,
    load_rank,
    merge,
    partial_path,
    plain_weights,
    read_manifest,
    read_plan,
    reshard,
    shard,
    take_pieces,
    write_rank,
)
from tpconvert.checkpoint.tensors.store import Store
from tpconvert.errors import CheckpointError
from tpconvert.spec.layout import Block, Layout

LAYOUT = Layout(0, (Block(6, 2), Block(6)))
WHOLE = {"w": torch.rand(18, 3).bfloat16(), "norm": torch.rand(3), "pooler": torch.rand(2)}
MOMENTS = {"w": torch.rand(18, 3), "norm": torch.rand(3)}


@pytest.fixture
def base(tmp_path):
    """A shard of a source that has a tensor without use, and a config."""
    from safetensors.torch import save_file

    (tmp_path / "source").mkdir()
    save_file(WHOLE, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    (tmp_path / "source" / "config.json").write_text("{}")
    store = file_weights(tmp_path / "source").store
    weights = plain_weights(Store(store._files, root=store.root))
    del weights.recipes["pooler"]
    shard(weights, plan_of(weights, 2, {"w": LAYOUT}), tmp_path / "base")
    return tmp_path / "base"


def save_step(base, out, *, force=False):
    """What two live ranks do."""
    held, plan = read_manifest(base), read_plan(base)
    groups = {"optimizer.exp_avg": MOMENTS, "optimizer.step": {"w": torch.tensor(3.0)}}
    entries = {g: entries_like(held.tensors, tensors) for g, tensors in groups.items()}
    with NewFolder(out, force=force) as new:
        carry(base, held, new.path)
        (new.path / "progress.json").write_text('{"step": 3}')
        for rank in range(2):
            local = {n: t + 1 for n, t in load_rank(base, rank).items()}
            parts = {
                g: {n: take_pieces(t, entries[g][n].layout, rank, 2) for n, t in tensors.items()}
                for g, tensors in groups.items()
            }
            write_rank(partial_path(out), rank, 2, local, parts)
        return finish(new, replace(held, groups=entries), plan)


def test_a_step_is_a_folder_like_any_other(base, tmp_path):
    made = save_step(base, tmp_path / "step-3")
    assert check_folder(tmp_path / "step-3") == []
    assert read_manifest(tmp_path / "step-3") == made
    assert {"progress.json", "config.json", "plan.json"} <= set(made.files)
    parts = [load_rank(tmp_path / "step-3", r, group="optimizer.exp_avg")["w"] for r in range(2)]
    assert torch.equal(gather_pieces(parts, LAYOUT, (18, 3)), MOMENTS["w"])
    assert load_rank(tmp_path / "step-3", 1, group="optimizer.step")["w"].item() == 3


def test_a_trained_merge_keeps_names_dtypes_and_files_but_not_the_optimizer(base, tmp_path):
    save_step(base, tmp_path / "step-3")
    merge(tmp_path / "step-3", tmp_path / "back")
    assert sorted(hashes(tmp_path / "back")) == ["config.json", "model.safetensors"]
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back["w"], WHOLE["w"] + 1) and back["w"].dtype == torch.bfloat16
    assert torch.equal(back["pooler"], WHOLE["pooler"])
    size = (tmp_path / "source" / "model.safetensors").stat().st_size
    assert (tmp_path / "back" / "model.safetensors").stat().st_size == size


def test_master_weights_are_merged_in_the_sources_dtype(base, tmp_path):
    held, plan = read_manifest(base), read_plan(base)
    wide = {n: replace(e, dtype="float32") for n, e in held.tensors.items()}
    with NewFolder(tmp_path / "step") as new:
        carry(base, held, new.path)
        for rank in range(2):
            write_rank(new.path, rank, 2, {n: t.float() for n, t in load_rank(base, rank).items()})
        finish(new, replace(held, tensors=wide), plan)
    merge(tmp_path / "step", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(tmp_path / "source")


def test_the_optimizer_and_the_training_state_travel_to_another_degree(base, tmp_path):
    save_step(base, tmp_path / "two")
    reshard(tmp_path / "two", tmp_path / "three", tp=3)
    assert check_folder(tmp_path / "three") == []
    assert (tmp_path / "three" / "progress.json").read_text() == '{"step": 3}'
    parts = [load_rank(tmp_path / "three", r, group="optimizer.exp_avg")["w"] for r in range(3)]
    assert torch.equal(gather_pieces(parts, LAYOUT, (18, 3)), MOMENTS["w"])
    direct = [load_rank(tmp_path / "two", r, group="optimizer.exp_avg", tp=3)["w"] for r in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(parts, direct, strict=True))
    reshard(tmp_path / "three", tmp_path / "again", tp=2)
    assert hashes(tmp_path / "again") == hashes(tmp_path / "two")


def test_a_rank_that_wrote_nothing_leaves_no_folder(base, tmp_path):
    held, plan = read_manifest(base), read_plan(base)
    with pytest.raises(CheckpointError, match="rank 1 has written nothing"), NewFolder(tmp_path / "step") as new:
        write_rank(new.path, 0, 2, load_rank(base, 0))
        finish(new, held, plan)
    assert not (tmp_path / "step").exists() and not partial_path(tmp_path / "step").exists()


def test_state_for_a_tensor_that_is_not_there_is_refused(base):
    with pytest.raises(CheckpointError, match="state for other, which the manifest does not have"):
        entries_like(read_manifest(base).tensors, {"other": torch.ones(1)})


def test_a_group_that_is_not_there_is_named(base):
    with pytest.raises(CheckpointError, match=r"base: holds no optimizer\.exp_avg"):
        load_rank(base, 0, group="optimizer.exp_avg")
