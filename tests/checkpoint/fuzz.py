"""``python -m tests.checkpoint.fuzz [-max_total_time=60 ...]``: headers guided by coverage; needs atheris beside torch.

Any bytes are a header that is read, all of it, or an error of one kind; anything else ends the run.
"""

import contextlib
import importlib
import sys
import tempfile
from pathlib import Path

from tpconvert.errors import CheckpointError

atheris = importlib.import_module("atheris")
with atheris.instrument_imports(include=["tpconvert.checkpoint.files.header", "tpconvert.checkpoint.files.tensorfile"]):
    from tpconvert.checkpoint.files.header import parse_header
    from tpconvert.checkpoint.files.tensorfile import TensorFile

FOLDER = tempfile.TemporaryDirectory()


def one(data: bytes) -> None:
    """A header, and a file that has it."""
    with contextlib.suppress(CheckpointError):
        parse_header(data.decode("utf-8", "replace"), None, "here")
    path = Path(FOLDER.name) / "m.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(len(data) % 64))
    try:
        file = TensorFile(path)
    except CheckpointError:
        return
    for name, stored in file.header.tensors.items():
        assert file.read(name, tuple((0, n) for n in stored.shape)).shape == file.tensor(name).shape


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
