"""A plan.json is there to be edited, so whoever reads one refuses the same things, with the same line."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.test_errors import fails
from tpconvert.cli import main

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def build():
    torch.manual_seed(0)
    return Net(), (torch.randn(3, 12),)
"""


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args], catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, its plan as ``tpconvert plan`` writes it, and the folder that is cut by it.  Not to be changed."""
    folder = tmp_path_factory.mktemp("edited")
    (folder / "own.py").write_text(OWN)
    run("plan", f"{folder}/own.py:build", "--tp", 2, "-o", folder / "plan.json")
    run("shard", f"{folder}/own.py:build", "--plan", folder / "plan.json", "-o", folder / "cut")
    return folder


@pytest.fixture
def edited(folder, tmp_path):
    """``edited(change)``: a plan that was changed by hand."""

    def edit(change):
        data = json.loads((folder / "plan.json").read_text())
        change(data)
        (tmp_path / "plan.json").write_text(json.dumps(data))
        return tmp_path / "plan.json"

    return edit


def put(*place, value):
    """A change of one value."""

    def change(data):
        for key in place[:-1]:
            data = data[key]
        data[place[-1]] = value

    return change


def verdict(name, **values):
    return lambda data: next(v for v in data["verdicts"] if v["name"] == name).update(values)


def layout(*blocks, dim=0):
    return {"dim": dim, "blocks": [*blocks]}


def without(kind, at):
    return lambda data: data[kind].pop(at)


EDITS = {
    "no such module": (put("boundaries", 0, "module", value="dow"), "(dow): the module has no part dow; did you"),
    "no such parameter": (put("verdicts", 0, "name", value="up.wait"), "no such parameter or buffer; did you mean up."),
    "an axis of what is not there": (put("axes", 0, "parameters", value=["up.wait"]), "did you mean up.weight?"),
    "no such dtype": (verdict("up.weight", dtype="float99"), "verdicts[0] (up.weight): torch has no dtype 'float99'."),
    "no verdict": (without("verdicts", 3), "there is no verdict for down.bias."),
    "another degree": (put("tp", value=25), "24 units cannot be shared by 25 ranks"),
    "another shape": (
        verdict("up.weight", shape=[26, 12], layout=layout([26, 1])),
        "(up.weight): it is for shape [26, 12], the module has [24, 12].",
    ),
    "another dim": (verdict("up.weight", layout=layout([24, 1], dim=1)), "24 rows of 12"),
    "parts that are too few": (verdict("up.weight", layout=layout([23, 1])), "23 rows of 24"),
    "a size below none": (verdict("up.weight", shape=[-24, 12]), "shape is [-24, 12], with a size below 0"),
    "no such kind": (put("boundaries", 0, "kind", value="add"), '"add" is not one of reduce, reduce_scatter, gather'),
    "no such switch": (
        put("switches", value=[{"module": "drop", "side": "input", "cut": True}]),
        "switches[0] (drop): the module has no part drop.",
    ),
}  # fmt: skip


TRIED = {
    "an edit of what is not there": (
        put("edits", value=[{"module": "up", "attribute": "heads", "value": 24, "blocks": [[24, 1]]}]),
        "up: heads is not there to be edited.",
    ),
    "an op that nobody knows": (
        put("rewrites", value=[{"module": "up", "reason": "", "signature": {"args.0": "tensor"}, "output": {"$": "n"},
                                "nodes": [{"name": "n", "op": "call", "target": "os.system", "args": ["x"]}]}]),
        "os.system",
    ),
    "one half of a pair": (verdict("up.weight", layout={}, axis=""), "with it, rank 0 cannot run the model"),
    "an output that stays cut": (
        lambda data: [verdict(name, layout=layout([12, 1]))(data) for name in ("down.weight", "down.bias")]
        and [verdict(name, layout={})(data) for name in ("up.weight", "up.bias")]
        and put("boundaries", value=[])(data),
        "rank 0 returns [3, 6] where the whole model returns [3, 12].",
    ),
}  # fmt: skip


def refused(folder, path, out, told):
    line = fails("shard", f"{folder}/own.py:build", "--plan", path, "-o", out)
    assert line.startswith(f"{path}: ")
    assert told in line
    assert "plan again" in line.lower() or "Plan this module again" in line, "the way out"
    assert not out.exists()
    return line


@pytest.mark.parametrize("name", TRIED)
def test_an_edit_that_does_not_run_is_refused(folder, edited, tmp_path, name):
    refused(folder, edited(TRIED[name][0]), tmp_path / "out", TRIED[name][1])


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_that_cannot_be_is_refused_by_all_alike(folder, edited, tmp_path, name):
    source, path = f"{folder}/own.py:build", edited(EDITS[name][0])
    line = refused(folder, path, tmp_path / "out", EDITS[name][1])
    assert fails("verify", source, "--plan", path, "--emulate") == line
    assert fails("verify", source, "--plan", path) == line


def test_an_edit_that_fits_is_used_and_told(folder, edited, tmp_path):
    def whole(data):
        for name in ("up.weight", "up.bias", "down.weight"):
            verdict(name, layout={}, axis="", reason="by hand")(data)
        verdict("down.bias", once=False)(data)
        data.update(boundaries=[], axes=[], slices={"reason": "by hand"})

    path = edited(whole)
    result = run("shard", f"{folder}/own.py:build", "--plan", path, "-o", tmp_path / "cut")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == (
        f"note: {path} was edited, or not written by tpconvert plan. It has what the model asks for; "
        "tpconvert verify shows whether the numbers are right.\n"
    )
    untouched = run("shard", f"{folder}/own.py:build", "--plan", folder / "plan.json", "-o", tmp_path / "two")
    assert untouched.stderr == ""


ASKED = {
    "a sum left out": (
        lambda data: data.update(boundaries=[b for b in data["boundaries"] if b["kind"] != "reduce"]),
        "down: only one of them needs a reduce at its output.",
    ),
    "a copy left out": (
        lambda data: data.update(boundaries=[b for b in data["boundaries"] if b["kind"] != "copy"]),
        "up: only one of them needs a copy at its input.",
    ),
    "a bias added on each rank": (verdict("down.bias", once=False), "down.bias: it must count on one rank only"),
    "a gradient summed twice": (verdict("down.bias", sum_grad=True), "down.bias: it must not have its gradient summed"),
    "other rows": (verdict("up.weight", layout=layout([12, 1], [12, 1])), "up.weight: the plan cuts it as"),
}


@pytest.mark.parametrize("name", ASKED)
def test_an_edit_that_runs_and_is_wrong_is_refused(folder, edited, tmp_path, name):
    change, told = ASKED[name]
    source, path = f"{folder}/own.py:build", edited(change)
    line = fails("shard", source, "--plan", path, "-o", tmp_path / "out")
    assert line.startswith(f"{path}: the model asks for something else: {told}")
    assert not (tmp_path / "out").exists()


def test_verify_judges_an_edit_that_runs_and_is_wrong(folder, edited):
    path = edited(ASKED["a bias added on each rank"][0])
    done = run("verify", f"{folder}/own.py:build", "--plan", path, "--emulate")
    assert done.exit_code == 1, "it is what verify is for"


def test_a_plan_that_needs_rules_is_held_to_the_model_with_them(tmp_path):
    examples = Path(__file__).parents[1] / "examples"
    own, rules, path = (
        f"{examples / 'own_op.py'}:build",
        ("--rules", examples / "own_rule.toml"),
        tmp_path / "plan.json",
    )
    run("plan", own, "--tp", 2, *rules, "-o", path)
    data = json.loads(path.read_text()) | {"notes": ["edited"]}
    path.write_text(json.dumps(data))
    assert "One that was made with --rules needs them here too." in fails(
        "shard", own, "--plan", path, "-o", tmp_path / "cut"
    )
    done = run("shard", own, "--plan", path, *rules, "-o", tmp_path / "cut")
    assert done.exit_code == 0, done.stderr


def test_a_plan_of_another_model_of_the_same_shapes_is_held_to_this_one(llama, tmp_path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 12, "num_key_value_heads": 4,
                                                               "head_dim": 4}))  # fmt: skip
    run("plan", copy, "--tp", 4, "-o", tmp_path / "plan.json")
    line = fails("shard", llama, "--plan", tmp_path / "plan.json", "-o", tmp_path / "out")
    assert line.startswith(f"{tmp_path}/plan.json: ")


@pytest.mark.parametrize(
    "change",
    [put("boundaries", 0, "module", value="uo"), put("notes", value=["mine"]), put("tp", value=4)],
    ids=["module", "note", "degree"],
)
def test_the_plan_of_a_folder_is_what_its_files_were_cut_by(folder, tmp_path, change):
    copy = shutil.copytree(folder / "cut", tmp_path / "cut")
    data = json.loads((copy / "plan.json").read_text())
    change(data)
    (copy / "plan.json").write_text(json.dumps(data))
    (tmp_path / "c.yaml").write_text("data: {path: x.txt}\n")
    line = fails("inspect", copy)
    assert line.startswith(f"{copy}/plan.json: ")
    assert "shard the source again" in line
    assert fails("verify", f"{folder}/own.py:build", copy, "--emulate") == line
    assert fails("train", copy, "--config", tmp_path / "c.yaml") == line
    assert fails("reshard", copy, "--tp", 4, "-o", tmp_path / "out") == line


def test_a_plan_cut_short_is_named_in_every_command(folder, tmp_path):
    copy = shutil.copytree(folder / "cut", tmp_path / "cut")
    text = (copy / "plan.json").read_text()
    (copy / "plan.json").write_text(text[: len(text) // 2])
    line = fails("inspect", copy)
    assert line.startswith(f"{copy}/plan.json: not JSON (")
    assert "Restore" in line
    assert fails("verify", f"{folder}/own.py:build", copy) == line


def test_slices_of_the_sequence_are_tried_out_too(llama, tmp_path):
    run("plan", llama, "--tp", 2, "-o", tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["slices"]["boundaries"][0]["kind"] == "scatter"
    data["notes"] = ["by hand"]
    (tmp_path / "same.json").write_text(json.dumps(data))
    assert run("shard", llama, "--plan", tmp_path / "same.json", "-o", tmp_path / "cut").exit_code == 0
    del data["slices"]["boundaries"][0]
    (tmp_path / "less.json").write_text(json.dumps(data))
    line = fails("shard", llama, "--plan", tmp_path / "less.json", "-o", tmp_path / "out")
    assert line.startswith(f"{tmp_path}/less.json: with it, rank 0 cannot run the model with slices of the sequence: ")
    assert not (tmp_path / "out").exists()
