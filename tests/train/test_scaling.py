"""fp16: gradients that overflow anywhere change no weight anywhere."""

import json
from pathlib import Path

import pytest
import torch

from tests.train.test_loop import changed, merged, run, settings, worst
from tests.train.test_state import contents, resuming, stop_after
from tests.train.tiny import make_folder
from tpconvert.errors import TrainError
from tpconvert.train import loop
from tpconvert.train.settings.config import Training
from tpconvert.train.steps.scaling import Scale, first_scale


def test_the_scale_halves_where_gradients_overflow_and_doubles_after_a_window_of_good_steps():
    training = Training(precision="fp16", loss_scale=8.0, loss_scale_window=2)
    scale = first_scale(training)
    seen = []
    for norm in (1.0, float("inf"), 1.0, 1.0, 1.0, float("nan")):
        scale = scale.after(norm, training)
        seen.append(scale.value)
    assert seen == [8.0, 4.0, 4.0, 8.0, 8.0, 4.0]


def test_a_scale_that_helps_nothing_ends_the_run():
    with pytest.raises(
        TrainError, match=r"overflow fp16 even at a loss scale of 6\.1\d*e-05\. Use training\.precision: bf16"
    ):
        Scale(2.0**-14).after(float("inf"), Training(precision="fp16"))


def test_other_precisions_have_no_scale():
    assert first_scale(Training(precision="bf16"), Scale(4.0)) == Scale() == Scale().after(1.0, Training())


def spoiled(mesh, folder: Path, config, output: Path) -> list[float]:
    """A run in whose second step one rank alone finds an infinite gradient, of a parameter that is cut."""
    usual = loop.sum_gradients

    def spoil(module, *rest):
        spoil.calls += 1
        usual(module, *rest)
        if spoil.calls == 2 and mesh.rank == 1:
            module.layers[0].up.weight.grad[0, 0] = float("inf")

    spoil.calls = 0
    loop.sum_gradients = spoil
    try:
        return run(mesh, folder, config, output)
    finally:
        loop.sum_gradients = usual


def test_an_overflow_on_one_rank_skips_the_step_on_all(run_ranks, tmp_path: Path):
    config = settings(tmp_path, steps=3, precision="fp16", micro_batch_size=1)
    config = changed(config, checkpoint={"every": 1, "keep": 3, "asynchronous": False})
    every = run_ranks(spoiled, 2, make_folder(tmp_path / "model", 2), config, tmp_path / "run", dp=2)
    assert every[1:] == every[:-1] and all(0 < loss < 10 for loss in every[0])
    weights = [merged(tmp_path / "run" / f"step-{n}", tmp_path / f"merged-{n}") for n in (1, 2, 3)]
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    assert not torch.equal(weights[1]["head.weight"], weights[2]["head.weight"])
    kept = [json.loads((tmp_path / "run" / f"step-{n}" / "trainer.json").read_text()) for n in (1, 2, 3)]
    assert [k["loss_scale"]["value"] for k in kept] == [65536.0, 32768.0, 32768.0]
    assert [k["updates"]["all"] for k in kept] == [1.0, 1.0, 2.0]


def test_fp16_follows_the_curve_of_fp64(run_ranks, tmp_path: Path):
    config, folder = settings(tmp_path), make_folder(tmp_path / "model", 2)
    exact = run_ranks(run, 2, folder, config, tmp_path / "a")
    low = run_ranks(run, 2, folder, changed(config, training={"precision": "fp16"}), tmp_path / "b")
    assert worst(low[0], exact[0]) < 0.002  # 2**-11 of a product


def test_a_run_of_sharded_fp16_that_is_stopped_and_resumed_is_bit_identical(run_ranks, tmp_path: Path):
    config = settings(tmp_path, steps=7, precision="fp16", micro_batch_size=1, loss_scale_window=3, loss_scale=2.0**24)
    config = changed(config, parallelism={"data_parallel": "fsdp"})
    folder = make_folder(tmp_path / "model", 2, "lm_dropout")
    whole = run_ranks(run, 2, folder, config, tmp_path / "whole", dp=2)
    first = run_ranks(stop_after, 2, folder, config, tmp_path / "parts", 4, dp=2)
    second = run_ranks(run, 2, folder, resuming(config), tmp_path / "parts", dp=2)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert contents(tmp_path / "whole" / "step-7") == contents(tmp_path / "parts" / "step-7")
