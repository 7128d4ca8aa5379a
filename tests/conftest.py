"""A pool of gloo ranks that lives as long as the test run, so that a test with ranks costs milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(pool: Pool) -> Callable[..., list[Any]]:
    """``run_ranks(fn, degree, *args, dp=1, timeout=60)``: what ``fn(mesh, *args)`` returns on each rank.

    ``fn`` is a module-level function.  A failing or hanging rank fails the test with that rank's traceback.
    """
    return pool.run


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that save_pretrained wrote: two layers, six heads, two kv heads, 59 words.  Not to be changed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": 48, "intermediate_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=59, num_hidden_layers=2, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sharded(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model, cut for two ranks.  Not to be changed."""
    from tpconvert.checkpoint import shard
    from tpconvert.planning import make_plan
    from tpconvert.source import open_source

    folder = tmp_path_factory.mktemp("models") / "llama-tp2"
    source = open_source(str(llama))
    plan = make_plan(source.module, source.inputs, tp=2, source=source.description)
    shard(source.weights(), plan, folder)
    return folder
