"""``tpconvert verify`` in this process, what it is given, and what it leaves."""

import json
import os
from pathlib import Path

from click.testing import CliRunner

from tests.verify import sources
from tpconvert.cli import main

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "GLOO_SOCKET_IFNAME": "lo"}


def verify(*args):
    """The command in this process."""
    return CliRunner().invoke(main, ["verify", *map(str, args)], catch_exceptions=False)


def name_of(function):
    """One of our models, as SOURCE."""
    return f"{sources.__file__}:{function}"


def children(pid):
    """The living children of a process."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def tampered(tmp_path, source, change, *args):
    """The plan of a source, with ``change`` made to its JSON."""
    path = tmp_path / "plan.json"
    made = CliRunner().invoke(main, ["plan", str(source), "--tp", "2", "-o", str(path), *args], catch_exceptions=False)
    assert made.exit_code == 0, made.stderr
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def without(kind):
    """A change: without the boundaries of that kind."""

    def change(data):
        kept = [b for b in data["boundaries"] if b["kind"] != kind]
        assert len(kept) < len(data["boundaries"])
        data["boundaries"] = kept

    return change


WITH_GPUS = "import sys, torch; torch.cuda.device_count = lambda: 8; from tpconvert.cli import main; main(sys.argv[1:])"
