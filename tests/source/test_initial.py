"""Weights drawn from a seed are those of the vanilla model, and need no memory for all of them."""

import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

from tests.hf_models import build
from tpconvert.cli import main
from tpconvert.source.build import initial
from tpconvert.source.build.initial import on_files


@pytest.fixture(autouse=True)
def all_on_files(monkeypatch):
    monkeypatch.setattr(initial, "LEAST", 64)
    monkeypatch.setattr(initial, "RELEASE_EVERY", 4096)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5"])
def test_shard_init_draws_what_from_config_draws(name, tmp_path):
    module, _ = build(name)
    module.save_pretrained(tmp_path / "trained")
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(tmp_path / "config")
    torch.manual_seed(3)
    type(module)._from_config(module.config).save_pretrained(tmp_path / "wanted")
    for source in ("config", "trained") if name == "llama" else ("config",):
        out, back = tmp_path / f"{source}-cut", tmp_path / f"{source}-back"
        made = CliRunner().invoke(
            main, ["shard", str(tmp_path / source), "--init", "--seed", "3", "--tp", "2", "-o", str(out)]
        )
        assert made.exit_code == 0, made.output
        assert CliRunner().invoke(main, ["merge", str(out), "-o", str(back)]).exit_code == 0
        assert (back / "model.safetensors").read_bytes() == (tmp_path / "wanted/model.safetensors").read_bytes()


def test_a_function_is_drawn_anew_from_its_seed(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\ndef net():\n"
        "    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12)), (torch.randn(2, 12),)\n"
    )
    source, out = f"{tmp_path / 'net.py'}:net", tmp_path / "cut"
    made = CliRunner().invoke(main, ["shard", source, "--init", "--seed", "5", "--tp", "2", "-o", str(out)])
    assert made.exit_code == 0, made.output
    assert CliRunner().invoke(main, ["merge", str(out), "-o", str(tmp_path / "back")]).exit_code == 0
    torch.manual_seed(5)
    wanted = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12)).state_dict()
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_seed_without_init_is_refused(tmp_path):
    result = CliRunner().invoke(main, ["shard", "x", "--seed", "3", "--tp", "2", "-o", str(tmp_path / "out")])
    assert result.exit_code == 2 and "without --init there is nothing to draw" in result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factories_give_the_same_tensors_on_files(dtype):
    def make():
        torch.manual_seed(0)
        yield torch.randn(33, 7, dtype=dtype)
        yield torch.rand((40, 3), dtype=dtype, requires_grad=True)
        yield torch.ones(50, dtype=dtype)
        yield torch.full((9, 9), 2.5, dtype=dtype)
        yield torch.full((9, 9), fill_value=True)
        yield torch.zeros(64, dtype=torch.int32)
        yield torch.randn(70, generator=torch.Generator().manual_seed(1))
        yield nn.init.orthogonal_(torch.empty(16, 8))
        yield nn.Linear(16, 8).weight
        yield torch.ones(30, device="meta")

    plain = list(make())
    with on_files():
        filed = list(make())
    for ours, theirs in zip(filed, plain, strict=True):
        assert (ours.shape, ours.dtype, ours.device, ours.requires_grad) == (
            theirs.shape,
            theirs.dtype,
            theirs.device,
            theirs.requires_grad,
        )
        assert ours.is_meta or torch.equal(ours, theirs)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts private memory on Linux")
def test_memory_does_not_hold_the_module():
    code = (
        "import resource, sys, torch; from torch import nn; from tpconvert.source.build.initial import on_files\n"
        "nn.Linear(512, 512)\n"
        "held = int(open('/proc/self/status').read().split('VmData:')[1].split()[0]) << 10\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (held + (64 << 20),) * 2)\n"
        "build = lambda: [nn.Linear(2048, 2048, bias=False) for _ in range(8)]\n"
        "if sys.argv[1] == 'files':\n"
        "    with on_files(): build()\n"
        "else: build()\n"
    )
    done = {
        how: subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=False)
        for how in ("files", "memory")
    }
    assert done["files"].returncode == 0, done["files"].stderr
    assert done["memory"].returncode and "memory" in done["memory"].stderr
