"""What a user is told: one line, with the numbers and the way out, and never a traceback."""

import errno
import shutil

import pytest
from click.testing import CliRunner

from tpconvert.cli import main


def fails(*args, code=2):
    """The one line a failing command writes to stderr."""
    result = CliRunner().invoke(main, [str(a) for a in args], catch_exceptions=False)
    assert result.exit_code == code, result.output
    line = result.stderr
    assert line.count("\n") == 1, line
    assert line.startswith("error: ")
    return line.removeprefix("error: ").rstrip()


@pytest.fixture
def copy(sharded, tmp_path):
    """A sharded folder that may be damaged."""
    return shutil.copytree(sharded, tmp_path / "copy")


@pytest.fixture
def offline(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def write(path, text):
    path.write_text(text)
    return path


# -- sources ----------------------------------------------------------------------------------------------------


def test_a_hub_id_that_cannot_be_reached_is_named_with_the_ways_out(offline):
    line = fails("plan", "no-such-owner/no-such-model", "--tp", 2)
    assert line.startswith("no-such-owner/no-such-model is neither a folder nor in the Hugging Face cache")
    assert "hf download no-such-owner/no-such-model" in line
    assert "file.py:function" in line


def test_a_missing_folder_suggests_its_neighbour(tmp_path):
    (tmp_path / "llama-small").mkdir()
    line = fails("plan", tmp_path / "lama-small", "--tp", 2)
    assert line == f"There is no {tmp_path}/lama-small. Did you mean {tmp_path}/llama-small?"


def test_a_folder_without_config_suggests_the_one_below(tmp_path):
    (tmp_path / "model").mkdir()
    write(tmp_path / "model/config.json", "{}")
    assert fails("plan", tmp_path, "--tp", 2) == f"{tmp_path} has no config.json. Did you mean {tmp_path}/model?"


def test_a_config_that_is_not_json_is_named(tmp_path):
    write(tmp_path / "config.json", "{")
    assert "its config.json cannot be read" in fails("plan", tmp_path, "--tp", 2)


def test_a_config_without_architecture_asks_for_a_task(tmp_path):
    write(tmp_path / "config.json", '{"model_type": "bert"}')
    line = fails("plan", tmp_path, "--tp", 2)
    assert "names no architecture" in line
    assert "--task" in line


def test_an_unknown_task_suggests_the_nearest(llama):
    assert fails("plan", llama, "--tp", 2, "--task", "casual-lm").endswith("Did you mean causal-lm?")


def test_code_of_the_model_is_not_run_unasked(tmp_path):
    write(tmp_path / "config.json", '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}')
    write(tmp_path / "mine.py", f"open({str(tmp_path / 'ran')!r}, 'w')")
    line = fails("plan", tmp_path, "--tp", 2)
    assert "(mine.py), which is not run unasked" in line
    assert "--trust-remote-code" in line
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_of_a_function_suggests_its_neighbour(tmp_path):
    write(tmp_path / "models.py", "")
    line = fails("plan", f"{tmp_path}/model.py:build", "--tp", 2)
    assert line == f"There is no file {tmp_path}/model.py. Did you mean {tmp_path}/models.py?"


def test_a_missing_function_suggests_another(tmp_path):
    path = write(tmp_path / "own.py", "def build_model(): ...")
    assert fails("plan", f"{path}:build_modl", "--tp", 2) == (
        f"{path} has no function build_modl. Did you mean build_model?"
    )


def test_a_missing_package_is_named():
    assert fails("plan", "no_such_package.models:build", "--tp", 2) == (
        "no_such_package.models:build: there is no Python module no_such_package."
    )


def test_a_function_that_returns_something_else_is_told_what(tmp_path):
    path = write(tmp_path / "own.py", "def build(): return 3")
    assert "returned int, not (module, inputs)" in fails("plan", f"{path}:build", "--tp", 2)


def test_a_failing_function_is_told_with_its_own_line(tmp_path):
    path = write(tmp_path / "own.py", "def build():\n    sizes = []\n    return sizes[1]\n")
    line = fails("plan", f"{path}:build", "--tp", 2)
    assert line == f"{path}:build failed: {path}:3 in build: IndexError: list index out of range"


def test_a_forward_that_fails_while_traced_is_told_with_its_own_line(tmp_path):
    path = write(
        tmp_path / "own.py",
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.up = nn.Linear(4, 8)\n"
        "    def forward(self, x):\n        y = self.up(x)\n        return y @ x\n"
        "def build(): return Net(), {'x': torch.zeros(2, 4)}\n",
    )
    line = fails("plan", f"{path}:build", "--tp", 2)
    assert f"{path}:9 in forward" in line


def test_a_syntax_error_is_told_with_its_line(tmp_path):
    path = write(tmp_path / "own.py", "x = 1\ndef build(:\n")
    assert f"{path}:2" in fails("plan", f"{path}:build", "--tp", 2)


def test_weights_that_are_missing_are_named(tmp_path):
    path = write(tmp_path / "own.py", "def build(): ...")
    assert fails("plan", f"{path}:build", "--tp", 2, "--weights", tmp_path / "w") == (
        f"--weights: there is no file {tmp_path}/w."
    )


def test_a_sharded_folder_is_not_a_source(sharded, tmp_path):
    line = fails("shard", sharded, "--tp", 2, "-o", tmp_path / "out")
    assert line.endswith(
        "is a sharded folder, not a source. Merge it first, or use tpconvert reshard for another degree."
    )


# -- plans ------------------------------------------------------------------------------------------------------


def test_a_pattern_that_matches_nothing_is_an_error(llama):
    assert "model.layer.*" in fails("plan", llama, "--tp", 2, "--set", "model.layer.*=whole")


def test_a_degree_that_does_not_divide_says_which_do(sharded, tmp_path):
    line = fails("reshard", sharded, "--tp", 3, "-o", tmp_path / "out")
    assert "2 units cannot be shared by 3 ranks (3 % 2 is not 0)" in line
    assert "Use a degree up to 2, or a multiple of it." in line
    assert not (tmp_path / "out").exists()


def test_a_plan_for_another_degree_is_told_apart(llama, tmp_path):
    CliRunner().invoke(main, ["plan", str(llama), "--tp", "2", "-o", str(tmp_path / "plan.json")])
    line = fails("shard", llama, "--plan", tmp_path / "plan.json", "--tp", 4, "-o", tmp_path / "out")
    assert line == f"{tmp_path}/plan.json is a plan for tp=2, not 4. Leave --tp out, or use --tp 2."


def test_a_plan_that_is_no_plan_is_told_apart(llama, tmp_path):
    path = write(tmp_path / "plan.json", '{"tp": 2}')
    ways = "Make one with: tpconvert plan SOURCE --tp N -o plan.json."
    line = fails("shard", llama, "--plan", path, "-o", tmp_path / "out")
    assert line == f"{path}: not a plan of tpconvert. {ways}"
    line = fails("shard", llama, "--plan", tmp_path / "none.json", "-o", tmp_path / "out")
    assert line == f"There is no file {tmp_path}/none.json. {ways}"
    line = fails("shard", llama, "--plan", tmp_path, "-o", tmp_path / "out")
    assert line == f"{tmp_path}: cannot be read (Is a directory). {ways}"
    path.write_bytes(b'{"format": 1, "notes": ["\xff"]}')
    line = fails("shard", llama, "--plan", path, "-o", tmp_path / "out")
    assert line == f"{path}: not JSON (byte 25 is no UTF-8). {ways}"


def test_an_existing_plan_is_not_overwritten_unasked(llama, tmp_path):
    path = write(tmp_path / "plan.json", "mine")
    assert fails("plan", llama, "--tp", 2, "-o", path).startswith(f"{path}: exists already. Use --force")
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("pln", "No such command 'pln'. Did you mean 'plan'? See main --help."),
        ("plan", "Missing argument 'SOURCE'. See main plan --help."),
        ("plan x", "Missing option '--tp'. See main plan --help."),
        ("plan x --tp 0", "Invalid value for '--tp': 0 is not in the range x>=1. See main plan --help."),
        ("plan x --tp 2 --out-file y", "No such option '--out-file'"),
        ("plan x y --tp 2", "Got unexpected extra argument (y). See main plan --help."),
        ("shard x --tp 2 --seed 3 -o y", "--seed is what --init draws weights from"),
        ("train x --config y --outptu z", "No such option '--outptu'"),
        ("verify x --plan y --rules z", "--plan is a plan already made: to verify it, only --emulate takes --rules."),
        ("shard x --plan y --set a=whole -o z", "--plan is a plan already made: --set has no effect on it."),
        ("train x", "Missing option '--config'. See main train --help."),
    ],
)
def test_a_mistake_in_the_command_itself_is_one_line_too(arguments, told):
    assert fails(*arguments.split()).startswith(told)


def test_the_command_of_each_rank_tells_its_mistakes_alike(monkeypatch):
    from tpconvert.train.__main__ import command

    monkeypatch.setenv("LOCAL_RANK", "0")
    first = CliRunner().invoke(command, ["x"])
    assert (first.exit_code, first.stderr) == (2, "error: Missing option '--config'. See command --help.\n")
    monkeypatch.setenv("LOCAL_RANK", "1")
    other = CliRunner().invoke(command, ["x"])
    assert (other.exit_code, other.stderr) == (2, "")


def test_the_help_of_train_shows_what_its_ranks_take():
    from tpconvert.train.__main__ import command

    ours, theirs = (
        {o for p in c.params for o in p.opts if o.startswith("-")} for c in (main.commands["train"], command)
    )
    assert ours - theirs == {"--nproc-per-node"} and theirs - ours == set()
    shown = CliRunner().invoke(main, ["train", "--help"]).stdout
    assert all(option in shown for option in ("--output", "--resume", "--trust-remote-code", "--config"))


def test_what_is_given_to_train_reaches_its_ranks(sharded, tmp_path, monkeypatch):
    from tpconvert.train import launch
    from tpconvert.train.__main__ import command

    seen = []
    monkeypatch.setattr(launch, "launch", lambda arguments, ranks: seen.append((arguments, ranks)) or 0)
    config = write(tmp_path / "c.yaml", "data: {path: x.txt}\n")
    given = [str(sharded), "--config", str(config), "--output", "run", "--resume", "training.lr=0.1", "data.field=x"]
    assert CliRunner().invoke(main, ["train", *given, "--trust-remote-code", "--nproc-per-node", "4"]).exit_code == 0
    ((arguments, ranks),) = seen
    found = command.make_context("x", list(arguments)).params
    assert ranks == 4 and found["trust_remote_code"] and str(found["output"]) == "run" and found["folder"] == sharded
    assert (found["resume"], found["overrides"]) == ("training.lr=0.1", ("data.field=x",))


# -- folders ----------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_sharded_is_told_apart(llama):
    assert fails("inspect", llama) == (
        f"{llama}: not a sharded folder (no manifest.json). Make one with: tpconvert shard {llama} --tp N -o DIR."
    )


def test_a_half_written_folder_is_never_taken_for_a_whole_one(copy, tmp_path):
    (copy / "manifest.json").unlink()
    line = fails("merge", copy, "-o", tmp_path / "out")
    assert "half-written" in line
    assert not (tmp_path / "out").exists()


def test_a_missing_rank_file_is_named(copy, tmp_path):
    (copy / "rank-00001-of-00002/model.safetensors").unlink()
    line = fails("merge", copy, "-o", tmp_path / "out")
    assert "rank-00001-of-00002/model.safetensors" in line
    assert not (tmp_path / "out").exists()


def test_a_folder_without_one_of_its_files_is_told_by_all_who_open_it(copy, tmp_path):
    (copy / "rank-00001-of-00002/model.safetensors").unlink()
    missing = "rank-00001-of-00002/model.safetensors: missing. Restore the file, or make the folder again."
    config = write(tmp_path / "c.yaml", "data: {path: x.txt}\n")
    assert fails("train", copy, "--config", config) == f"{copy}: {missing}"
    assert fails("reshard", copy, "--tp", 4, "-o", tmp_path / "out") == f"{copy}: {missing}"
    shown = CliRunner().invoke(main, ["inspect", str(copy)])
    assert shown.exit_code == 2
    assert shown.stderr == f"error: {copy}: {missing}\n"
    assert shown.stdout.startswith(f"{copy}: 2 ranks")


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[" * 5000, '{"format": 2, "tp": "2"}', "\ud800"])
def test_a_manifest_that_is_damaged_is_named_with_the_way_out(copy, tmp_path, text):
    (copy / "manifest.json").write_text(text, errors="surrogatepass")
    line = fails("inspect", copy)
    assert line.startswith(f"{copy}/manifest.json: ")
    assert line.endswith("Copy it again from where it was made, or make the folder again.")
    assert fails("merge", copy, "-o", tmp_path / "out") == line


def test_a_flipped_byte_is_found(copy):
    path = copy / "rank-00001-of-00002/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    result = CliRunner().invoke(main, ["inspect", str(copy), "--check"])
    assert result.exit_code == 2
    assert "rank-00001-of-00002/model.safetensors: its blake3 is not the one written" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_existing_output_is_not_overwritten_unasked(sharded, llama, tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out/mine.txt", "mine")
    line = fails("merge", sharded, "-o", tmp_path / "out")
    assert line == f"{tmp_path}/out: exists already. Use --force to replace it, or choose another output."
    assert (tmp_path / "out/mine.txt").read_text() == "mine"


def test_a_full_disk_is_one_line_and_leaves_nothing(sharded, tmp_path, monkeypatch):
    from tpconvert.checkpoint.files import tensorfile

    def refuse(self, value):
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(tensorfile.TensorFileWriter, "_write", refuse)
    assert "the disk is full" in fails("merge", sharded, "-o", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "the disk is full. Make room, or choose another disk."),
        (errno.EACCES, "permission denied."),
        (errno.EROFS, "the disk is read-only."),
    ],
)
def test_a_disk_that_refuses_a_plan_is_one_line(llama, tmp_path, monkeypatch, number, told):
    def refuse(self, *_):
        raise OSError(number, "refused", ".plan.json.partial")

    monkeypatch.setattr(type(tmp_path), "replace", refuse)
    assert fails("plan", llama, "--tp", 2, "-o", tmp_path / "plan.json") == f"{tmp_path}/plan.json: {told}"
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_a_missing_folder_is_one_line(llama, tmp_path):
    line = fails("plan", llama, "--tp", 2, "-o", tmp_path / "none/plan.json")
    assert line == f"{tmp_path}/none/plan.json: there is no folder {tmp_path}/none."


# -- training ---------------------------------------------------------------------------------------------------


def test_an_unknown_key_in_a_config_suggests_the_nearest(sharded, tmp_path):
    path = write(tmp_path / "c.yaml", "training: {step: 3}\ndata: {path: x.txt}\n")
    line = fails("train", sharded, "--config", path)
    assert "training.step" in line
    assert "training.steps" in line or "Did you mean steps?" in line


def test_a_wrong_number_of_ranks_says_which_would_do(sharded, tmp_path):
    path = write(tmp_path / "c.yaml", "data: {path: x.txt}\n")
    line = fails("train", sharded, "--config", path, "--nproc-per-node", 3)
    assert line == f"{sharded} is cut for 2 ranks, which do not divide 3. Use a multiple of 2, or tpconvert reshard."


# -- the rest ---------------------------------------------------------------------------------------------------


def test_an_interrupt_exits_with_130(monkeypatch, sharded):
    from tpconvert import checkpoint

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "inspect", interrupt)
    assert fails("inspect", sharded, code=130) == "interrupted."


def test_traceback_shows_where_an_error_came_from(llama):
    from tpconvert.errors import CheckpointError

    with pytest.raises(CheckpointError):
        CliRunner().invoke(main, ["--traceback", "inspect", str(llama)], catch_exceptions=False)
