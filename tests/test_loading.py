"""A sharded folder as a module."""

import pytest
import torch

import tpconvert
from tests.hf_models import build


def test_loading_builds_the_module_and_runs_nothing(tmp_path, monkeypatch):
    module, inputs = build("llama_few")
    module.save_pretrained(tmp_path / "source")
    source = tpconvert.open_source(str(tmp_path / "source"))
    plan = tpconvert.make_plan(source.module, source.inputs, tp=1, source=source.description)
    tpconvert.shard(source.weights(), plan, tmp_path / "tp1")

    def runs(*_):
        pytest.fail("the forward was run, which takes longer than to load the weights")

    monkeypatch.setattr("tpconvert.source.huggingface.open.example_inputs", runs)
    loaded = tpconvert.load(tmp_path / "tp1", tpconvert.make_mesh(1))
    assert not loaded.training
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, module(**inputs).logits)
