"""The built wheel, away from the repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.network  # the build back end comes from the package index
def test_the_wheel_brings_its_rules(tmp_path, llama):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path / "dist", ROOT], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)

    where = [sys.executable, "-c", "import tpconvert.analyze.ops.rules as r; print(r.rules_folder())"]
    plan = [sys.executable, "-m", "tpconvert", "plan", llama, "--tp", "2"]
    for command, wanted in ((where, str(tmp_path / "site/tpconvert/rules")), (plan, "gated-mlp: column")):
        env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
        assert wanted in done.stdout
    installed = tmp_path / "site/tpconvert"
    assert (installed / "py.typed").is_file()
    assert {"ops.toml", "patterns.toml", "README.md"} <= {p.name for p in (installed / "rules").iterdir()}
