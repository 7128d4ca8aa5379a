"""One test a command, as a user types it."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tpconvert.cli import main
from tpconvert.spec.plan import Plan

OWN = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
    return net, (torch.randn(3, 12),)
"""


def run(*args):
    """The result of a command that must succeed."""
    result = CliRunner().invoke(main, [str(a) for a in args], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return f"{path}:build"


def test_plan_prints_what_is_cut_folded_over_layers(llama):
    lines = run("plan", llama, "--tp", 2).stdout.splitlines()
    assert lines[0] == f"{llama} (LlamaForCausalLM), tp=2"
    assert any(line.split()[:2] == ["model.layers.*.mlp.up_proj.weight", "x2"] and "dim 0" in line for line in lines)
    assert any(line.split() == ["model.layers.*", "x2", "forward", "2", "all-reduces", "9.98", "kB"] for line in lines)


def test_plan_all_prints_every_tensor(llama):
    text = run("plan", llama, "--tp", 2, "--all").stdout
    assert "model.layers.0.mlp.up_proj.weight" in text
    assert "model.layers.1.mlp.up_proj.weight" in text


def test_plan_json_can_be_read_as_a_plan(llama):
    data = json.loads(run("plan", llama, "--tp", 2, "--json").stdout)
    plan = Plan.from_json(data)
    assert plan["lm_head.weight"].layout.cut
    assert data["report"]["whole"]["parameters"] > 0


def test_plan_out_writes_the_plan(llama, tmp_path):
    run("plan", llama, "--tp", 2, "-o", tmp_path / "plan.json")
    assert Plan.loads((tmp_path / "plan.json").read_text()).source["class"] == "LlamaForCausalLM"


def test_set_leaves_whole_what_it_names(llama):
    data = json.loads(run("plan", llama, "--tp", 2, "--json", "--set", "model.layers.0.mlp=whole").stdout)
    plan = Plan.from_json(data)
    assert not plan["model.layers.0.mlp.up_proj.weight"].layout.cut
    assert plan["model.layers.1.mlp.up_proj.weight"].layout.cut


def test_shard_and_merge_give_back_every_byte(llama, tmp_path):
    out = run("shard", llama, "--tp", 2, "-o", tmp_path / "cut")
    assert out.stdout == f"{tmp_path / 'cut'}: 21 tensors for 2 ranks.\n"
    run("merge", tmp_path / "cut", "-o", tmp_path / "whole")
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()
    assert (tmp_path / "whole/config.json").read_bytes() == (llama / "config.json").read_bytes()


def test_shard_follows_a_given_plan(llama, tmp_path):
    run("plan", llama, "--tp", 2, "--set", "lm_head=whole", "-o", tmp_path / "plan.json")
    run("shard", llama, "--plan", tmp_path / "plan.json", "-o", tmp_path / "cut")
    text = run("inspect", tmp_path / "cut").stdout
    assert any(line.split()[0] == "lm_head.weight" and "whole" in line for line in text.splitlines() if line.strip())


def test_a_function_is_sharded_with_its_weights(own, tmp_path):
    stored = {f"{i}.{n}": t for i, o, k in ((0, 24, 12), (2, 12, 24)) for n, t in (("weight", (o, k)), ("bias", (o,)))}
    import torch

    save_file({name: torch.randn(shape) for name, shape in stored.items()}, tmp_path / "w.safetensors")
    run("shard", own, "--weights", tmp_path / "w.safetensors", "--tp", 2, "-o", tmp_path / "cut")
    run("merge", tmp_path / "cut", "-o", tmp_path / "whole")
    merged, given = load_file(tmp_path / "whole/w.safetensors"), load_file(tmp_path / "w.safetensors")
    assert merged.keys() == given.keys()
    assert all(torch.equal(merged[n], given[n]) for n in given)


def test_verify_proves_a_function_by_emulation(own):
    result = run("verify", own, "--tp", 2, "--emulate")
    assert result.stdout.splitlines()[-1].startswith("Equal:")


def test_verify_emulates_with_the_rules_the_plan_was_made_with(tmp_path):
    examples = Path(__file__).parents[1] / "examples"
    own, rules = f"{examples / 'own_op.py'}:build", ("--rules", examples / "own_rule.toml")
    run("plan", own, "--tp", 2, *rules, "-o", tmp_path / "plan.json")
    assert any(v.layout.cut for v in Plan.loads((tmp_path / "plan.json").read_text()).verdicts)
    for planned in (("--tp", 2), ("--plan", tmp_path / "plan.json")):
        assert run("verify", own, *planned, *rules, "--emulate").stdout.splitlines()[-1].startswith("Equal:")
    without = CliRunner().invoke(main, ["verify", own, "--plan", str(tmp_path / "plan.json"), "--emulate"])
    assert without.exit_code == 1, "the rules are not read"


def test_verify_compares_the_bytes_of_a_folder(llama, sharded):
    data = json.loads(run("verify", llama, sharded, "--emulate", "--json").stdout)
    assert data["equal"]
    assert {c["kind"] for c in data["checks"]} >= {"op", "gradient", "bytes"}


def test_verify_of_other_weights_exits_with_one(llama, sharded, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    (other / "config.json").write_bytes((llama / "config.json").read_bytes())
    result = CliRunner().invoke(main, ["verify", str(other), str(sharded), "--emulate"])
    assert result.exit_code == 1
    assert "Not equal" in result.stdout
    assert "model.norm.weight" in result.stdout


def test_reshard_changes_the_degree(sharded, llama, tmp_path):
    run("reshard", sharded, "--tp", 4, "-o", tmp_path / "four")
    run("merge", tmp_path / "four", "-o", tmp_path / "whole")
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()


def test_inspect_shows_and_checks_a_folder(sharded):
    result = run("inspect", sharded, "--check")
    assert result.stdout.splitlines()[0].startswith(f"{sharded}: 2 ranks, 21 tensors, ")
    assert result.stderr == "Every byte is as it was written.\n"


def test_inspect_json_is_the_manifest(sharded):
    data = json.loads(run("inspect", sharded, "--json").stdout)
    assert data["tp"] == 2
    assert "lm_head.weight" in data["tensors"]


def test_train_starts_torchrun_and_the_loss_falls(sharded, tmp_path):
    (tmp_path / "text.txt").write_text("abcdefgh " * 200)
    (tmp_path / "train.yaml").write_text(
        f"training: {{steps: 8, micro_batch_size: 4, seq_len: 16, precision: fp32, lr: 0.02}}\n"
        f"data: {{path: {tmp_path / 'text.txt'}, tokenizer: {tmp_path / 'letters'}}}\n"
        "logging: {every: 1, tensorboard: false}\n"
    )
    write_letters(tmp_path / "letters")
    command = [sys.executable, "-m", "tpconvert", "train", sharded, "--config", tmp_path / "train.yaml"]
    done = subprocess.run([*command, "--output", tmp_path / "run"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 1.5


def write_letters(folder):
    """A tokenizer of single letters that fits 59 words."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "</s>", *"abcdefghijklmnopqrstuvwxyz "])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    fast.save_pretrained(folder)


def computed_by_children() -> float:
    """Seconds of processors: what else a machine does makes them no more, as it does those of a clock."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_answers_at_once():
    times = []
    for _ in range(3):
        start = computed_by_children()
        done = subprocess.run([sys.executable, "-m", "tpconvert", "--help"], capture_output=True, text=True, check=True)
        times.append(computed_by_children() - start)
    assert "reshard" in done.stdout
    assert min(times) < 0.3


def test_no_bar_is_drawn_in_a_pipe(llama, tmp_path):
    assert run("shard", llama, "--tp", 2, "-o", tmp_path / "cut").stderr == ""


def test_the_bar_shows_bytes_and_rate_on_a_terminal(monkeypatch):
    import io

    from rich import console

    from tpconvert.terminal.progress import progress_bar

    out = io.StringIO()
    real = console.Console
    monkeypatch.setattr(console, "Console", lambda **_: real(file=out, force_terminal=True, width=100))
    with progress_bar("sharding") as progress:
        progress(1_000_000, 4_000_000)
        progress(4_000_000, 4_000_000)
    assert "sharding" in out.getvalue()
    assert "4.0/4.0 MB" in out.getvalue()


def test_plan_format_transformers_prints_a_tp_plan(llama):
    plan = json.loads(run("plan", llama, "--tp", 2, "--format", "transformers").stdout)
    assert plan["model.layers.*.mlp.up_proj"] == "colwise"
    assert plan["lm_head"] == "replicate"  # 59 words on 2 ranks


def test_plan_format_tells_what_it_leaves_whole(llama):
    told = run("plan", llama, "--tp", 2, "--format", "transformers").stderr
    assert "note: left whole: lm_head.weight: lm_head.weight is dealt unevenly (59 on 2 ranks).\n" in told


def test_plan_format_dtensor_writes_python(llama, tmp_path):
    out = run("plan", llama, "--tp", 2, "--format", "dtensor", "-o", tmp_path / "parallel.py")
    assert out.stdout == ""
    compile((tmp_path / "parallel.py").read_text(), "parallel.py", "exec")


def test_plan_format_transformers_refuses_a_function(own):
    result = CliRunner().invoke(main, ["plan", own, "--tp", "2", "--format", "transformers"])
    assert result.exit_code == 2
    assert result.stderr == "error: Sequential is no model of transformers, so it takes no tp_plan.\n"


def test_plan_check_against_exits_with_the_answer(llama, tmp_path):
    differ = CliRunner().invoke(main, ["plan", str(llama), "--tp", "2", "--check-against", "own", "--json"])
    assert differ.exit_code == 0, differ.stdout  # uneven, but the same rows
    (tmp_path / "theirs.json").write_text('{"model.layers.*.mlp.up_proj": "rowwise"}')
    differ = CliRunner().invoke(main, ["plan", str(llama), "--tp", "2", "--check-against", f"{tmp_path}/theirs.json"])
    assert differ.exit_code == 1
    assert "! model.layers.*.mlp.up_proj.weight x2 dim 1 dim 0" in " ".join(differ.stdout.split())


def test_plan_format_and_check_against_exclude_each_other(llama):
    result = CliRunner().invoke(
        main, ["plan", str(llama), "--tp", "2", "--format", "dtensor", "--check-against", "own"]
    )
    assert result.exit_code == 2
    assert "--format prints the plan as others write it" in result.stderr
