"""Where tokens are kept: what others left there, and what is left where it is full."""

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from tests.train.test_text import tokens_of
from tpconvert.errors import ConfigError
from tpconvert.train.examples.text import tokenize
from tpconvert.train.examples.tokenizer import ByteTokenizer
from tpconvert.train.settings.data import Data


def test_what_a_killed_run_left_half_made_is_removed_and_what_somebody_makes_is_not(tmp_path: Path):
    (tmp_path / "a.txt").write_text("ab")
    left, held, new = (tmp_path / "cache" / f".making-{name}" for name in ("left", "held", "new"))
    for folder in (left, held, new):
        folder.mkdir(parents=True)
        (folder / "ids.bin").write_bytes(b"x")
    for folder in (left, held):
        os.utime(folder, (1, 1))
    owner = os.open(held, os.O_RDONLY)
    fcntl.flock(owner, fcntl.LOCK_EX)
    made = tokenize(Data(path=str(tmp_path / "a.txt")), ByteTokenizer(), tmp_path / "cache")
    os.close(owner)
    assert {p.name for p in (tmp_path / "cache").iterdir()} == {".making-held", ".making-new", made.name}


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch):
    (tmp_path / "a.txt").write_text("ab")

    def full(*_, **__):
        raise OSError("3 requested and 0 written")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ConfigError, match=r"cache: the tokens cannot be stored there \(3 requested and 0 written\)"):
        tokens_of(tmp_path, path=str(tmp_path / "a.txt"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
