"""Stopping and going on is not stopping."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.test_loop import changed, merged, run, settings, worst
from tests.train.tiny import lm_bf16, make_folder
from tpconvert.checkpoint import check_folder, read_manifest, reshard
from tpconvert.errors import CheckpointError, ConfigError
from tpconvert.parallel import make_mesh
from tpconvert.train.loop import train
from tpconvert.train.saving import state
from tpconvert.train.saving.state import Progress


def stop_after(mesh, folder: Path, config, output: Path, steps: int) -> list[float]:
    """A run one of whose ranks, the last, is told to stop."""
    asked = iter(range(1000))
    last = mesh.rank == mesh.degree - 1 and mesh.dp_rank == mesh.dp_degree - 1
    return train(folder, config, mesh, output=output, stopped=lambda: next(asked) >= steps and last)


def contents(step: Path) -> dict[str, bytes]:
    """Every file of a step, by name; what the configuration said is not compared."""
    files = {p.relative_to(step).as_posix(): p.read_bytes() for p in sorted(step.rglob("*")) if p.is_file()}
    files["trainer.json"] = json.dumps(json.loads(files["trainer.json"]) | {"config": None}).encode()
    del files["manifest.json"]  # holds the hash of trainer.json
    return files


def resuming(config, where: str = "auto", **sections):
    return changed(config, checkpoint={"resume": where}, **sections)


@pytest.mark.parametrize("function", ["lm_dropout", "lm_bf16"])
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2)])
def test_a_run_that_is_stopped_and_resumed_is_bit_identical(run_ranks, tmp_path: Path, tp: int, dp: int, function: str):
    config = settings(tmp_path, steps=9, precision="fp32")  # 250 sequences of 4 a step: within an epoch
    config = changed(config, training={"micro_batch_size": 1})
    folder = make_folder(tmp_path / "model", tp, function)
    whole = run_ranks(run, tp, folder, config, tmp_path / "whole", dp=dp, timeout=180)  # imports all at first
    first = run_ranks(stop_after, tp, folder, config, tmp_path / "parts", 4, dp=dp)
    assert [p.name for p in state.complete_steps(tmp_path / "parts")] == ["step-4"]
    second = run_ranks(run, tp, folder, resuming(config), tmp_path / "parts", dp=dp)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert contents(tmp_path / "whole" / "step-9") == contents(tmp_path / "parts" / "step-9")


def test_a_run_can_be_resumed_across_epochs(run_ranks, tmp_path: Path):
    config = changed(settings(tmp_path, steps=9, precision="fp32"), training={"seq_len": 250})
    folder = make_folder(tmp_path / "model", 1)
    whole = run_ranks(run, 1, folder, config, tmp_path / "whole", dp=2)
    first = run_ranks(stop_after, 1, folder, config, tmp_path / "parts", 5, dp=2)
    second = run_ranks(run, 1, folder, resuming(config), tmp_path / "parts", dp=2)
    assert first[0] + second[0] == whole[0]
    assert json.loads((tmp_path / "whole/step-9/trainer.json").read_text())["position"]["epoch"] == 2


def test_a_step_goes_on_at_another_tp_and_dp(run_ranks, tmp_path: Path):
    config = changed(settings(tmp_path, steps=8), checkpoint={"every": 4, "keep": 5})
    whole = run_ranks(run, 2, make_folder(tmp_path / "model", 2), config, tmp_path / "whole", dp=1)
    step = tmp_path / "whole" / "step-4"
    other = make_folder(tmp_path / "model3", 3)
    direct = run_ranks(run, 3, other, resuming(config, str(step)), tmp_path / "direct")
    reshard(step, tmp_path / "resharded", tp=3)
    through = run_ranks(run, 3, tmp_path / "resharded", resuming(config), tmp_path / "through")
    on_dp = run_ranks(run, 1, make_folder(tmp_path / "model1", 1), resuming(config, str(step)), tmp_path / "dp", dp=2)
    shared = changed(resuming(config, str(step)), parallelism={"data_parallel": "fsdp"})
    shared = changed(shared, checkpoint={"every": 2})
    on_fsdp = run_ranks(run, 2, tmp_path / "model", shared, tmp_path / "fsdp", dp=2)
    after = run_ranks(run, 2, tmp_path / "model", resuming(config, str(tmp_path / "fsdp/step-6")), tmp_path / "after")
    assert worst(after[0], whole[0][6:]) < 1e-11
    for losses in (direct, through, on_dp, on_fsdp):
        assert worst(losses[0], whole[0][4:]) < 1e-11


def test_a_step_is_a_sharded_folder_like_any_other(run_ranks, tmp_path: Path):
    config = settings(tmp_path, steps=2, precision="fp32")
    folder = make_folder(tmp_path / "model", 2, "lm_bf16")
    run_ranks(run, 2, folder, config, tmp_path / "run", dp=2)
    step = tmp_path / "run" / "step-2"
    assert check_folder(step) == []
    held = read_manifest(step)
    assert set(held.groups) == {"master", "optimizer.exp_avg", "optimizer.exp_avg_sq"}
    assert held.tensors == read_manifest(folder).tensors
    weights = merged(step, tmp_path / "merged")
    vanilla = lm_bf16()[0].state_dict()
    assert {n: (t.shape, t.dtype) for n, t in weights.items()} == {n: (t.shape, t.dtype) for n, t in vanilla.items()}
    assert not torch.equal(weights["head.weight"], vanilla["head.weight"])
    assert torch.equal(weights["unused.weight"], vanilla["unused.weight"])


def test_only_the_newest_steps_are_kept(run_ranks, tmp_path: Path):
    config = changed(settings(tmp_path, steps=12), checkpoint={"every": 3, "keep": 2})
    run_ranks(run, 1, make_folder(tmp_path / "model", 1), config, tmp_path / "run")
    assert [p.name for p in state.complete_steps(tmp_path / "run")] == ["step-9", "step-12"]
    assert [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".")] == []


def alone(folder: Path, config, output: Path) -> list[float]:
    return train(folder, config, make_mesh(1), output=output)


def test_a_second_run_does_not_write_over_the_first(tmp_path: Path):
    config, folder = settings(tmp_path, steps=1), make_folder(tmp_path / "model", 1)
    alone(folder, config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"has step-1 of an earlier run\. Add --resume, or choose another --output"):
        alone(folder, config, tmp_path / "run")


def test_resuming_a_finished_run_does_nothing(tmp_path: Path):
    config, folder = settings(tmp_path, steps=1), make_folder(tmp_path / "model", 1)
    alone(folder, config, tmp_path / "run")
    assert alone(folder, resuming(config), tmp_path / "run") == []


def test_resuming_with_nothing_there_begins_anew(tmp_path: Path):
    config, folder = settings(tmp_path, steps=1), make_folder(tmp_path / "model", 1)
    assert len(alone(folder, resuming(config), tmp_path / "run")) == 1


def test_resuming_from_what_is_no_step_is_an_error(tmp_path: Path):
    config, folder = settings(tmp_path, steps=1), make_folder(tmp_path / "model", 1)
    with pytest.raises(ConfigError, match="there is no complete step of a training run"):
        alone(folder, resuming(config, str(folder)), tmp_path / "run")


def test_a_half_written_step_is_passed_over(tmp_path: Path):
    config, folder = settings(tmp_path, steps=2), make_folder(tmp_path / "model", 1)
    alone(folder, changed(config, checkpoint={"every": 1, "keep": 5}), tmp_path / "run")
    (tmp_path / "run" / "step-2" / "manifest.json").unlink()
    assert state.find_start(folder, tmp_path / "run", "auto").name == "step-1"


def test_a_step_of_another_model_is_refused(tmp_path: Path):
    config = settings(tmp_path, steps=1)
    alone(make_folder(tmp_path / "one", 1), config, tmp_path / "run")
    other = make_folder(tmp_path / "two", 1, "lm_bf16")
    with pytest.raises(ConfigError, match="step-1: is a step of another model"):
        alone(other, resuming(config, str(tmp_path / "run" / "step-1")), tmp_path / "run2")


def fail_to_write(mesh, folder: Path, config, output: Path) -> str:
    from tpconvert.train.saving import save as module

    kept = module.write_rank

    def full(*args, **kwargs):
        if mesh.rank == 1:
            raise CheckpointError("the disk is full.")
        return kept(*args, **kwargs)

    module.write_rank = full
    try:
        train(folder, config, mesh, output=output)
    except CheckpointError as error:
        return str(error)
    finally:
        module.write_rank = kept
    return "nothing failed"


def test_a_rank_that_cannot_write_ends_the_save_on_all_and_leaves_nothing(run_ranks, tmp_path: Path):
    config = settings(tmp_path, steps=1)
    said = run_ranks(fail_to_write, 2, make_folder(tmp_path / "model", 2), config, tmp_path / "run")
    assert said == ["the disk is full."] * 2
    assert [p.name for p in (tmp_path / "run").iterdir() if "step" in p.name] == []


def test_updates_are_kept_for_each_parameter_that_had_another_number(tmp_path: Path):
    config, folder = settings(tmp_path, steps=2), make_folder(tmp_path / "model", 1)
    alone(folder, config, tmp_path / "run")
    progress = state.read_progress(tmp_path / "run" / "step-2", "auto")
    names = load_file(tmp_path / "run/step-2/rank-00000-of-00001/optimizer.exp_avg.safetensors").keys()
    assert progress.updates == dict.fromkeys(names, 2.0) and "unused.weight" not in names


KEEPS = "4 -> 8 sequences a step on dp 1 -> 2 (training.global_batch_size=4 keeps them)"


@pytest.mark.parametrize(("given", "told"), [(None, KEEPS), (8, "")])
def test_a_step_that_another_dp_makes_larger_is_told(tmp_path: Path, given, told):
    sizes = {"micro_batch_size": 4, "global_batch_size": given, "steps": 2}
    config, folder = settings(tmp_path, **sizes), make_folder(tmp_path / "model", 1)
    alone(folder, config, tmp_path / "run")
    assert state.changes(tmp_path / "run" / "step-2", config, 1) == ""
    assert state.changes(tmp_path / "run" / "step-2", config, 2) == (told and f"changed since step-2: {told}")


def test_what_is_not_as_it_was_when_a_step_was_saved_is_told(tmp_path: Path, capsys):
    config, folder = settings(tmp_path, steps=2), make_folder(tmp_path / "model", 1)
    alone(folder, config, tmp_path / "run")
    again = changed(resuming(config), training={"steps": 3, "lr": 0.5, "seed": 7})
    alone(folder, again, tmp_path / "run")
    said = capsys.readouterr().out
    assert "changed since step-2: training.steps 2 -> 3, training.lr 0.02 -> 0.5, training.seed 0 -> 7\n" in said
    alone(folder, again, tmp_path / "run")
    said = capsys.readouterr().out
    assert "changed since" not in said and "all 3 steps were done before; set training.steps to more" in said
    with pytest.raises(ConfigError, match=r"step-3 was trained with training\.optimizer adamw, whose state sgd cannot"):
        alone(folder, changed(again, training={"optimizer": "sgd", "steps": 4}), tmp_path / "run")


def test_a_step_whose_bytes_have_changed_is_not_gone_on_from(tmp_path: Path):
    config, folder = settings(tmp_path, steps=1), make_folder(tmp_path / "model", 1)
    alone(folder, config, tmp_path / "run")
    (file,) = (tmp_path / "run" / "step-1").rglob("optimizer.exp_avg.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-8] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"optimizer\.exp_avg\.safetensors: its blake3 is not the one written"):
        alone(folder, changed(resuming(config), training={"steps": 2}), tmp_path / "run")


@pytest.mark.parametrize(
    "harm", [{"step": 0}, {"step": "3"}, {"position": {"used": [-1]}}, {"updates": {"all": "a", "but": {}}}], ids=str
)
def test_a_position_that_is_none_is_one_line(tmp_path: Path, harm: dict):
    config, folder = settings(tmp_path, steps=1), make_folder(tmp_path / "model", 1)
    alone(folder, config, tmp_path / "run")
    file = tmp_path / "run" / "step-1" / state.TRAINER
    file.write_text(json.dumps(json.loads(file.read_text()) | harm))
    with pytest.raises(CheckpointError, match=r"step-1/trainer\.json: cannot be read"):
        state.read_progress(tmp_path / "run" / "step-1", "auto")


def test_the_folder_of_a_run_is_no_step_but_has_some(tmp_path: Path):
    config, folder = settings(tmp_path, steps=1), make_folder(tmp_path / "model", 1)
    alone(folder, config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"Did you mean .*run/step-1\?"):
        alone(folder, resuming(config, str(tmp_path / "run")), tmp_path / "other")


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path):
    import os

    first = state.claim(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run: another run is writing there\. Wait for its end, or choose another"):
        state.claim(tmp_path / "run", patience=0.3)
    os.close(first)
    os.close(state.claim(tmp_path / "run"))


def test_a_run_that_has_nothing_to_go_on_from_says_so(tmp_path: Path):
    assert state.not_resumed(tmp_path, "none", Progress()) == ""
    assert state.not_resumed(tmp_path, "auto", Progress(3)) == ""
    told = f"nothing to resume: no complete step in {tmp_path}, so training begins at step 0"
    assert state.not_resumed(tmp_path, "auto", Progress()) == told
    for name in ("step-8", "step-20"):
        (tmp_path / name).mkdir()
    told = f"nothing to resume: no complete step in {tmp_path} (step-20 is half-written), so training begins at step 0"
    assert state.not_resumed(tmp_path, "auto", Progress()) == told


@pytest.mark.parametrize("again", [False, True])
def test_a_run_clears_its_folder_of_what_one_that_failed_left(tmp_path: Path, again: bool):
    (tmp_path / ".step-8.partial/rank-00000-of-00002").mkdir(parents=True)
    (tmp_path / "step-4").mkdir()
    told = {"error-rank-1.txt", "bad-step-3-dp-0.safetensors"}
    for name in (*told, "notes.txt"):
        (tmp_path / name).write_text("x")
    state.begin_in(tmp_path, again)
    assert {p.name for p in tmp_path.iterdir()} == {"step-4", "notes.txt"} | (told if again else set())


def test_what_is_no_step_to_resume_from_says_what_would_be(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"atuo: there is no complete step .* Give auto, none, or a folder step-N\."):
        state.find_start(tmp_path, tmp_path, "atuo")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3/trainer.json").write_text("x")
    with pytest.raises(CheckpointError, match=r"step-3/trainer.json: cannot be read .* Remove .*step-3 and --resume"):
        state.read_progress(tmp_path / "step-3", "auto")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file: is a file, not a folder\. Choose another --output\."):
        state.check_output(tmp_path / "file")
