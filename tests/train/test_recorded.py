"""Micro-batches as CUDA graphs: what is refused, and how batches reach a graph. That the numbers are those of a run
that is not recorded is shown on GPUs, by ``benchmarks/graphs.py --prove``."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.train.test_loop import changed, settings
from tests.train.tiny import make_folder
from tpconvert.errors import ConfigError
from tpconvert.parallel import make_mesh
from tpconvert.train.data.batch import OwnBatch, collate
from tpconvert.train.loop import train
from tpconvert.train.settings.config import make_config
from tpconvert.train.steps.recorded import Recorded, _tensors


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallelism": {"data_parallel": "fsdp"}}, r"cuda_graphs needs data_parallel: ddp"),
        (
            {"data": {"pad_to": "longest", "pack": False}},
            r"cuda_graphs needs sequences of one length; use data\.pad_to",
        ),
        ({"data": {"pad_to": "longest", "objective": "seq2seq"}}, r"cuda_graphs needs sequences of one length"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_the_configuration(sections: dict, message: str):
    given = {"parallelism": {"cuda_graphs": True} | sections.get("parallelism", {})}
    with pytest.raises(ConfigError, match=message):
        make_config(given | {"data": {"path": "x"} | sections.get("data", {})})
    make_config({"data": {"path": "x", "pad_to": "longest"}, "parallelism": {"cuda_graphs": True}})  # packed: all full


def test_a_cpu_records_nothing_and_says_so_before_anything_is_written(tmp_path: Path):
    config = changed(settings(tmp_path), parallelism={"cuda_graphs": True})
    with pytest.raises(ConfigError, match=r"cuda_graphs needs CUDA, and this run is on cpu\. Set .*: false"):
        train(make_folder(tmp_path / "model", 1), config, make_mesh(1), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_is_filled_with_other_tensors_in_their_order():
    rows = [{"ids": np.arange(4), "labels": np.arange(4), "used": 3, "documents": np.zeros(4, np.int64)}] * 2
    batch = collate(rows)
    assert batch.types is None and len(_tensors(batch)) == 4
    other = batch.filled([t + 1 for t in _tensors(batch)])
    assert torch.equal(other.ids, batch.ids + 1) and torch.equal(other.documents, batch.documents + 1)
    assert other.types is None
    own_batch = OwnBatch({"x": torch.zeros(2), "more": [torch.ones(2), (torch.ones(3),)]}, 2)
    other = own_batch.filled([t + 1 for t in _tensors(own_batch)])
    assert other.content["x"].tolist() == [1, 1] and other.content["more"][1][0].tolist() == [2, 2, 2]


def test_batches_that_a_graph_cannot_take_are_one_line():
    with pytest.raises(ConfigError, match=r"data\.dataset: its batches hold str beside tensors"):
        _tensors(OwnBatch({"x": torch.zeros(2), "name": ["a", "b"]}, 2))
    recorded = Recorded(None, several=False)
    recorded._step.append(SimpleNamespace(batch=[torch.zeros(2, 4), torch.zeros(()), torch.zeros(())]))
    with pytest.raises(ConfigError, match=r"different sizes \(\[2, 4\], then \[2, 5\]\), and parallelism\.cuda_graphs"):
        recorded(OwnBatch({"x": torch.zeros(2, 5)}, 2), torch.ones(()), torch.ones(()), first=True, last=True)
