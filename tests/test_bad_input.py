"""What a newcomer may hand to a command by mistake, each one line with the way out and nothing written."""

import errno
import json
import shutil

import pytest
from click.testing import CliRunner

from tests.test_errors import fails
from tpconvert.cli import main


@pytest.fixture
def copy(llama, tmp_path):
    """A source that may be damaged."""
    return shutil.copytree(llama, tmp_path / "source")


def config(copy, **values):
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["plan", "", "--tp", "2"], "an argument"),
        (["shard", "x", "--tp", "2", "-o", ""], "-o"),
        (["shard", "x", "--plan=", "-o", "y"], "--plan"),
        (["train", "x", "--config", "c.yaml", "--output", ""], "--output"),
    ],
)
def test_an_empty_argument_is_told_and_not_taken_for_none(arguments, what):
    told = f"{what} is empty; is a variable of the shell not set? See main {arguments[0]} --help."
    assert fails(*arguments) == told


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"architectures": 3}, "architectures is 3, not a list of names."),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"dtype": "float99"}, "float99"),
    ],
)
def test_a_config_that_cannot_be_is_one_line(copy, values, told):
    config(copy, **values)
    line = fails("plan", copy, "--tp", 2)
    assert line.startswith(f"{copy}: ")
    assert told in line


def test_a_file_in_the_place_of_a_model_is_told_apart(llama, tmp_path):
    weights = llama / "model.safetensors"
    assert fails("plan", weights, "--tp", 2).startswith(f"{weights} is a file. SOURCE is a Hugging Face id, a folder")
    (tmp_path / "own.py").touch()
    assert fails("plan", tmp_path / "own.py", "--tp", 2).endswith(f"Name a function in it: {tmp_path}/own.py:FUNCTION.")
    assert "File name too long" in fails("plan", "a" * 300, "--tp", 2)


def test_a_function_that_needs_arguments_is_told_apart():
    line = fails("plan", "torch.nn:Linear", "--tp", 2)
    assert line.startswith(
        "torch.nn:Linear takes arguments (in_features, out_features), and a SOURCE is called without"
    )


def test_a_folder_without_weights_is_sharded_only_when_new_ones_are_asked_for(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    line = fails("shard", copy, "--tp", 2, "-o", tmp_path / "out")
    assert line == f"{copy} holds no weights. Fetch them, or draw new ones with --init."
    done = CliRunner().invoke(main, ["shard", str(copy), "--tp", "2", "--init", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr


def test_tensors_that_the_model_has_no_use_for_are_told(copy, tmp_path):
    config(copy, num_hidden_layers=1)
    done = CliRunner().invoke(main, ["shard", str(copy), "--tp", "2", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert done.stderr.startswith("note: the model has no use for 9 tensors of ")
    assert "(model.layers.1." in done.stderr


def test_a_pointer_of_git_lfs_is_told_apart_from_a_damaged_file(copy, tmp_path):
    path = copy / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n")
    line = fails("shard", copy, "--tp", 2, "-o", tmp_path / "out")
    assert line == f"{path}: only a pointer of Git LFS, not the file itself. Run: git lfs pull."
    path.write_bytes(b"<html>" * 30)
    assert fails("shard", copy, "--tp", 2, "-o", tmp_path / "out").endswith("Copy or download it again.")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"", b"[op", b"x = 1"], ids=["bytes", "empty", "cut short", "a key"])
def test_rules_that_are_none_are_named(llama, tmp_path, data):
    (tmp_path / "r.toml").write_bytes(data)
    assert fails("plan", llama, "--tp", 2, "--rules", tmp_path / "r.toml").startswith(f"{tmp_path}/r.toml")


@pytest.mark.parametrize("out", ["/", "x" * 300])
def test_an_output_that_cannot_be_is_one_line(sharded, out):
    assert fails("merge", sharded, "-o", out)


def test_a_link_to_nothing_is_not_replaced_unasked(llama, tmp_path):
    (tmp_path / "plan.json").symlink_to(tmp_path / "none")
    assert "exists already" in fails("plan", llama, "--tp", 2, "-o", tmp_path / "plan.json")
    assert (tmp_path / "plan.json").readlink() == tmp_path / "none"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(tied={"lm_head.weight": "model.embed_tokens.weight"}),
        lambda m: m["original"].update(files={}),
        lambda m: m.update(teid={}),
    ],
    ids=["tied and stored", "no files", "an unknown key"],
)
def test_a_manifest_that_would_lose_tensors_is_refused(sharded, tmp_path, change):
    copy = shutil.copytree(sharded, tmp_path / "cut")
    data = json.loads((copy / "manifest.json").read_text())
    change(data)
    (copy / "manifest.json").write_text(json.dumps(data))
    assert fails("merge", copy, "-o", tmp_path / "out").startswith(f"{copy}/manifest.json: ")
    assert not (tmp_path / "out").exists()


def test_new_weights_that_find_no_room_say_where_they_need_it(llama, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    def full(self, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    line = fails("shard", llama, "--tp", 2, "--init", "-o", tmp_path / "out")
    assert line.startswith(f"{llama}: new weights cannot be put into ")
    assert line.endswith("Set TMPDIR to a folder with room for twice the model.")
    assert not (tmp_path / "out").exists()
