"""The best step by what was held out stays, is named, and is the best."""

import json
from pathlib import Path

import pytest

from tests.train.test_loop import changed, merged, run, settings
from tests.train.test_state import alone, contents, resuming, stop_after
from tests.train.test_survives import full_at
from tests.train.tiny import make_folder
from tpconvert.checkpoint import merge
from tpconvert.errors import ConfigError
from tpconvert.parallel import make_mesh
from tpconvert.train import loop
from tpconvert.train.saving import state
from tpconvert.train.saving.best import Best, best_of
from tpconvert.train.settings.config import Checkpoint, make_config

JUDGED = {2: 3.0, 4: 1.0, 6: 2.0, 8: float("nan"), 10: 1.0, 12: 1.5}
"""Step -> what is measured after it."""


def judging(tmp_path: Path, **checkpoint):
    return changed(
        settings(tmp_path, steps=12),
        data={"eval": {"fraction": 0.1, "every": 2}},
        checkpoint={"every": 3, "keep": 1, "keep_best": True, **checkpoint},
    )


@pytest.fixture
def script(monkeypatch):
    """Let evaluations find what the test says; each is given the number of its step."""

    def use(values: dict[int, float], first: int = 2) -> None:
        steps = iter(range(first, 99, 2))
        monkeypatch.setattr(loop, "evaluate", lambda *_: {"eval_loss": values[next(steps)]})

    return use


def names(output: Path) -> list[str]:
    return [p.name for p in state.complete_steps(output)]


def test_the_best_step_is_saved_when_it_is_found_and_stays_and_is_named(script, tmp_path: Path, capsys):
    folder, output = make_folder(tmp_path / "model", 1), tmp_path / "run"
    script(JUDGED)
    alone(folder, judging(tmp_path), output)
    assert names(output) == ["step-4", "step-12"]
    assert (output / "best").is_symlink() and (output / "best").readlink() == Path("step-4")
    said = capsys.readouterr().out
    assert "step-4, the best so far: eval loss 1.0000" in said and said.endswith("best: step-4 (eval loss 1.0000)\n")
    for step in ("step-4", "step-12"):
        kept = json.loads((output / step / "trainer.json").read_text())
        assert kept["best"] == {"step": 4, "metric": "eval_loss", "value": 1.0}
    best = merged(output / "best", tmp_path / "merged")
    last = merged(output / "step-12", tmp_path / "last")
    merge(output / "step-4", tmp_path / "same")
    assert not best["head.weight"].equal(last["head.weight"])
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (tmp_path / "same/model.safetensors").read_bytes()


def test_the_best_step_outlives_a_stop_and_what_comes_after(script, tmp_path: Path):
    folder, output, config = make_folder(tmp_path / "model", 1), tmp_path / "run", judging(tmp_path)
    script(JUDGED)
    alone(folder, config, tmp_path / "whole")
    script(JUDGED)
    stop_after(make_mesh(1), folder, config, output, 7)
    assert names(output) == ["step-4", "step-7"]
    (output / "best").unlink()  # as where the run was killed before it was made
    script(JUDGED, first=8)
    alone(folder, resuming(config), output)
    assert names(output) == ["step-4", "step-12"] and (output / "best").readlink() == Path("step-4")
    assert contents(output / "step-12").keys() == contents(tmp_path / "whole" / "step-12").keys()
    assert json.loads((output / "step-12" / "trainer.json").read_text())["best"]["step"] == 4
    longer = changed(resuming(config), training={"steps": 16})
    script({14: 0.5, 16: 0.75}, first=14)
    alone(folder, longer, output)
    assert names(output) == ["step-14", "step-16"] and (output / "best").readlink() == Path("step-14")


def test_a_best_step_that_is_gone_is_not_held_against_the_next(script, tmp_path: Path):
    folder, output, config = make_folder(tmp_path / "model", 1), tmp_path / "run", judging(tmp_path)
    script(JUDGED)
    stop_after(make_mesh(1), folder, config, output, 7)
    (output / "step-4" / "manifest.json").unlink()
    script(JUDGED, first=8)
    alone(folder, resuming(config), output)
    assert (output / "best").readlink() == Path("step-10")


def test_without_keep_best_what_was_the_best_still_stays(script, tmp_path: Path):
    folder, output, config = make_folder(tmp_path / "model", 1), tmp_path / "run", judging(tmp_path)
    script(JUDGED)
    stop_after(make_mesh(1), folder, config, output, 7)
    script(JUDGED, first=8)
    alone(folder, changed(config, checkpoint={"resume": "auto", "keep_best": False}), output)
    assert names(output) == ["step-4", "step-12"] and (output / "best").readlink() == Path("step-4")


def full_while(mesh, folder: Path, config, output: Path) -> str:
    """What a run says that cannot write its best step."""
    steps, kept = iter(range(2, 99, 2)), loop.evaluate
    loop.evaluate = lambda *_: {"eval_loss": JUDGED[next(steps)]}
    try:
        return full_at(mesh, folder, config, output, ["step-4"])[1]
    finally:
        loop.evaluate = kept


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_best_step_that_could_not_be_written_is_none(run_ranks, tmp_path: Path, asynchronous: bool):
    config, output = judging(tmp_path, asynchronous=asynchronous), tmp_path / "run"
    said, _ = run_ranks(full_while, 2, make_folder(tmp_path / "model", 2), config, output)
    assert "NOT SAVED" in said and said.endswith("best: step-10 (eval loss 1.0000)\n")
    assert names(output) == ["step-10", "step-12"] and (output / "best").readlink() == Path("step-10")


def test_ranks_agree_on_the_best(run_ranks, tmp_path: Path):
    config, output = changed(judging(tmp_path), logging={"jsonl": True}), tmp_path / "run"
    run_ranks(run, 2, make_folder(tmp_path / "model", 2), config, output, dp=2)
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval_loss"] for line in log if "eval_loss" in line}
    assert (output / "best").readlink() == Path(f"step-{min(losses, key=losses.__getitem__)}")


def test_what_is_better():
    loss, accuracy = Checkpoint(keep_best=True), Checkpoint(keep_best=True, best_metric="eval_accuracy")
    found = {"eval_loss": 1.0, "eval_accuracy": 0.5}
    assert best_of(3, found, loss, None) == Best(3, "eval_loss", 1.0)
    assert best_of(3, found, loss, Best(1, "eval_loss", 1.0)) is None
    assert best_of(3, found, loss, Best(1, "eval_loss", 1.1)) == Best(3, "eval_loss", 1.0)
    assert best_of(3, found, accuracy, Best(1, "eval_accuracy", 0.4)) == Best(3, "eval_accuracy", 0.5)
    assert best_of(3, found, accuracy, Best(1, "eval_accuracy", 0.6)) is None
    assert best_of(3, found, accuracy, Best(1, "eval_loss", 0.6)) == Best(3, "eval_accuracy", 0.5)
    assert best_of(3, {"eval_loss": float("nan")}, loss, None) is None
    less = Checkpoint(keep_best=True, best_metric="eval_accuracy", greater_is_better=False)
    assert best_of(3, found, less, Best(1, "eval_accuracy", 0.6)) == Best(3, "eval_accuracy", 0.5)


def test_a_best_that_nothing_measures_is_refused():
    held = {"path": "x", "eval": {"fraction": 0.1}}
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best needs a held-out set; set data\.eval"):
        make_config({"data": {"path": "x"}, "checkpoint": {"keep_best": True}})
    with pytest.raises(ConfigError, match="eval_accuracy is for objective classification or tagging"):
        make_config({"data": held, "checkpoint": {"keep_best": True, "best_metric": "eval_accuracy"}})
    with pytest.raises(ConfigError, match=r"That is checkpoint\.keep_best here"):
        make_config({"data": held, "checkpoint": {"load_best_model_at_end": True}})


def test_the_name_of_the_link_has_to_be_free_and_is_a_step_to_resume_from(script, tmp_path: Path):
    folder, output, config = make_folder(tmp_path / "model", 1), tmp_path / "run", judging(tmp_path)
    (output / "best").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"best: is no link to a step"):
        alone(folder, config, output)
    (output / "best").rmdir()
    script(JUDGED)
    alone(folder, config, output)
    with pytest.raises(ConfigError, match=r"has step-12, which is later than the step-4 to go on from"):
        state.find_start(folder, output, str(output / "best"))
    assert state.find_start(folder, tmp_path / "other", str(output / "best")) == output / "step-4"
