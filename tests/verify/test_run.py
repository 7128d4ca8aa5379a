"""``tpconvert verify`` as a user runs it: what it prints and how it ends."""

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.verify import sources
from tests.verify.command import ENVIRONMENT, ROOT, WITH_GPUS, children, name_of, tampered, verify, without
from tpconvert.errors import NotRunError
from tpconvert.planning import make_plan
from tpconvert.source import Source
from tpconvert.verify import verify as prove

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize("function", ["mlp", "many", "normed", "whole"])
def test_an_equal_model_ends_with_0_and_its_table(function):
    result = verify(name_of(function), "--tp", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["check", "mode", "name", "error", "bound"]
    assert lines[-1].startswith("Equal: ")
    assert "\nBound: 1e-09 (float64: " in result.stdout
    assert "not equal" not in result.stdout


def test_a_hugging_face_folder_is_equal(llama):
    result = verify(llama, "--tp", 2)
    assert result.exit_code == 0, result.output
    assert "Equal: 16 outputs, 3 losses, " in result.stdout


def test_all_prints_every_check():
    text = verify(name_of("mlp"), "--tp", 2, "--all").stdout
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert text.count(name) == 3  # its gradient in two modes, and after two steps
    assert "more, all no worse" not in text


def test_json_has_every_check_worst_first():
    data = json.loads(verify(name_of("many"), "--tp", 2, "--json").stdout)
    assert data["equal"] is True and data["bound"] == 1e-9 and data["parted"] == ""
    kinds = {c["kind"] for c in data["checks"]}
    assert kinds == {"output", "loss", "gradient", "gradient norm", "after 2 steps"}
    excess = [c["error"] / c["bound"] for c in data["checks"]]
    assert excess == sorted(excess, reverse=True)
    assert {"logits", "detached", "best", "mask", "masked"} <= {c["name"] for c in data["checks"]}


def test_a_plan_without_its_sum_is_not_equal_and_the_first_module_is_named(tmp_path):
    plan = tampered(tmp_path, name_of("mlp"), without("reduce"))
    result = verify(name_of("mlp"), "--plan", plan)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("Not equal: ")
    assert result.stdout.splitlines()[-1].endswith(" Values first part in 2 (output).")


@pytest.mark.parametrize(("dtype", "bound"), [("float32", "2e-03"), ("bfloat16", "6e-02")])
def test_a_narrower_dtype_has_a_bound_of_its_own_and_still_finds_a_missing_sum(tmp_path, dtype, bound):
    result = verify(name_of("mlp"), "--tp", 2, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].endswith(f", bound {bound}.")
    error = float(result.stdout.split("largest error ")[1].split(",")[0])
    assert error > {"float32": 1e-9, "bfloat16": 1e-5}[dtype]  # it was rounded so
    plan = tampered(tmp_path, name_of("mlp"), without("reduce"))
    assert verify(name_of("mlp"), "--plan", plan, "--dtype", dtype).exit_code == 1


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_what_rounding_alone_decides_is_decided_as_in_the_whole_model(dtype):
    result = verify(name_of("routed"), "--tp", 2, "--dtype", dtype)
    assert result.exit_code == 0, result.output


def test_a_router_that_is_wrong_still_decides_for_itself(tmp_path):
    plan = tampered(tmp_path, name_of("routed"), without("reduce"))
    assert verify(name_of("routed"), "--plan", plan, "--dtype", "bfloat16").exit_code == 1


def test_lockstep_knows_no_other_dtype():
    result = verify(name_of("mlp"), "--tp", 2, "--emulate", "--dtype", "bfloat16")
    assert result.exit_code == 2 and "it takes neither --device nor --dtype" in result.stderr


def test_ranks_on_gpus_are_refused_where_there_are_too_few(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    result = verify(name_of("mlp"), "--tp", 2, "--device", "cuda")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: 2 ranks need a GPU each, and torch finds 1 on this machine. Verify on CPUs."
    ]


TOUCHED = """
import os, torch
from torch import nn
forked = []
os.register_at_fork(after_in_child=lambda: forked.append(True))  # as CUDA is of no use there, once it was begun

class Model(nn.Sequential):
    def forward(self, x):
        if forked:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        return super().forward(x)

def model():
    return Model(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)), (torch.randn(3, 12),)
"""


def test_ranks_on_a_machine_with_gpus_run_whatever_an_import_has_begun(tmp_path):
    (tmp_path / "touched.py").write_text(TOUCHED)
    done = subprocess.run(
        [sys.executable, "-c", WITH_GPUS, "verify", f"{tmp_path}/touched.py:model", "--tp", "2"],
        env=ENVIRONMENT, text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Equal: " in done.stdout


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("mlp", ["--device", "cuda"], "error: A rank failed: "),  # as there is no GPU for it
        ("raising", [], f"error: The model fails where it is run: {sources.__file__}:"),
        ("dying", [], "error: A rank died (process 1 terminated with signal SIGKILL). Is there enough memory?"),
    ],
)
def test_fresh_ranks_that_fail_end_with_2_one_line_and_no_process(function, args, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    before = children(os.getpid())
    result = verify(name_of(function), "--tp", 2, *args)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(message) and "fork" not in result.stderr
    assert len(result.stderr.splitlines()) == 1 and result.stdout == ""
    assert children(os.getpid()) == before


def in_memory(module, inputs):
    """A source that no other process can be given, and its plan."""
    source = Source(name="", module=module, inputs=inputs, build=lambda: module, weights=lambda: None)
    return source, make_plan(module, inputs, tp=2)


def test_what_cannot_be_pickled_is_forked_and_where_that_fails_it_says_the_way_out(monkeypatch):
    def broken(y):
        if dist.is_initialized():
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        return y

    source, plan = in_memory(*sources.mlp())
    failing, its_plan = in_memory(*sources.after(broken))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert prove(source, plan).equal
    with pytest.raises(NotRunError, match=r"CUDA in forked .* was forked, because .* with tpconvert\.open_source"):
        prove(failing, its_plan)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(NotRunError, match=r"CUDA is in use, and .*local object.* with tpconvert\.open_source"):
        prove(source, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("function", ["llama", "gpt2", "t5", "mixtral"])
def test_models_are_equal_on_gpus(function, dtype):
    source = ROOT / "benchmarks" / "compare" / "small.py"
    arguments = ["verify", f"{source}:{function}", "--tp", "2", "--device", "cuda", "--dtype", dtype]
    done = subprocess.run(
        [sys.executable, "-m", "tpconvert", *arguments], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_module_is_named_in_a_deep_model_too(llama, tmp_path):
    def change(data):
        norm = "model.layers.1.self_attn.o_proj"
        data["boundaries"] = [b for b in data["boundaries"] if (b["kind"], b["module"]) != ("reduce", norm)]

    result = verify(llama, "--plan", tampered(tmp_path, llama, change))
    assert result.exit_code == 1
    assert "Values first part in model.layers.1.self_attn.o_proj (output)." in result.stdout


def test_a_plan_with_a_wrong_gradient_is_not_equal_and_the_parameter_is_named(llama, tmp_path):
    def change(data):
        (norm,) = (v for v in data["verdicts"] if v["name"] == "model.layers.1.input_layernorm.weight")
        norm["sum_grad"] = True

    result = verify(llama, "--plan", tampered(tmp_path, llama, change))
    assert result.exit_code == 1
    assert "worst gradient model.layers.1.input_layernorm.weight" in result.stdout
    assert "part in" not in result.stdout


def test_a_converted_model_that_fails_is_not_equal(tmp_path):
    def change(data):
        for verdict in data["verdicts"]:
            if verdict["name"] == "2.weight":
                del verdict["layout"]
                verdict["layout"] = {}

    result = verify(name_of("mlp"), "--plan", tampered(tmp_path, name_of("mlp"), change))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: The converted model fails where the whole one runs: RuntimeError: mat1 ")
    assert len(result.stderr.splitlines()) == 1


def test_a_plan_of_another_model_could_not_be_run(tmp_path):
    plan = tampered(tmp_path, name_of("mlp"), lambda data: None)
    result = verify(name_of("many"), "--plan", plan)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "the module has no such parameter or buffer" in result.stderr


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("integers", "error: The model has no output to take a gradient of, so gradients cannot be compared."),
        ("detached", "error: The model has no output to take a gradient of, so gradients cannot be compared."),
        ("one_way", "error: The whole model has no gradients in train mode (NotImplementedError: "),
        ("raising", f"error: The model fails where it is run: {sources.__file__}:"),
        ("neither", f"error: The model runs neither in float64 nor in float32: {sources.__file__}:"),
        ("dying", "error: A rank died (process 1 terminated with signal SIGKILL). Is there enough memory?"),
        ("nothing", f"error: {sources.__file__} has no function nothing."),
    ],
)
def test_what_cannot_be_run_ends_with_2_one_line_and_no_process(function, message):
    before = children(os.getpid())
    result = verify(name_of(function), "--tp", 2)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1 and result.stdout == ""
    assert children(os.getpid()) == before


def test_what_runs_in_eval_mode_alone_is_compared_in_it():
    result = verify(name_of("for_evaluation"), "--tp", 2)
    assert result.exit_code == 0, result.output
    assert "Train mode was not compared: the whole model does not run in it (ValueError: no labels)." in result.stdout
    assert "gradients" in result.stdout


def test_a_whole_model_that_gives_no_number_is_not_equal_and_says_why():
    result = verify(name_of("not_a_number"), "--tp", 2)
    assert result.exit_code == 1
    assert "Note: The whole model itself gives an output that is not a number (output)." in result.stdout


# -- folders ------------------------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Tensors of rank 1 changed."""
    (path,) = (folder / "rank-00001-of-00002").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def test_a_folder_is_equal_byte_for_byte(llama, folder):
    result = verify(llama, folder, "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and data["equal"]
    stored = {c["name"] for c in data["checks"] if c["kind"] == "bytes"}
    assert {"model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"} <= stored


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_a_stored_byte_that_differs_is_not_equal_and_names_the_tensor(llama, folder, name):
    def change(tensors):
        tensors[name].view(-1)[-1] += 1e-3

    rewrite(folder, change)
    result = verify(llama, folder)
    assert result.exit_code == 1, result.output
    assert name in result.output.splitlines()[-1]


def test_a_folder_of_another_degree_could_not_be_run(llama, folder):
    result = verify(llama, folder, "--tp", 4)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is cut for 2 ranks, not 4" in result.stderr
