import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(sharded, tmp_path):
    """A sharded folder that may be damaged."""
    return Path(shutil.copytree(sharded, tmp_path / "sharded"))
