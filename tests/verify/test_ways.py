"""``tpconvert verify`` with slices, in lockstep, of a twin, by the ranks of torchrun; and no rank outlives it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.verify.command import ENVIRONMENT, WITH_GPUS, children, name_of, tampered, verify, without

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize("emulate", [False, True])
def test_a_model_with_slices_of_the_sequence_is_equal(llama, emulate):
    result = verify(llama, "--tp", 2, "--sequence-parallel", *(["--emulate"] if emulate else []))
    assert result.exit_code == 0, result.output


def test_a_model_that_cannot_have_slices_could_not_be_run():
    result = verify(name_of("mlp"), "--tp", 2, "--sequence-parallel")
    assert result.exit_code == 2 and "cannot be sequence parallel" in result.stderr


def test_emulation_compares_every_op_in_this_process(llama):
    data = json.loads(verify(llama, "--tp", 2, "--emulate", "--json").stdout)
    kinds = [c["kind"] for c in data["checks"]]
    assert data["equal"] and kinds.count("op") > 50 and "output" in kinds and "gradient" in kinds


def test_emulation_finds_a_plan_that_its_graph_does_not_ask_for(llama, tmp_path):
    def change(data):
        (norm,) = (v for v in data["verdicts"] if v["name"] == "model.layers.1.input_layernorm.weight")
        norm["sum_grad"] = True

    result = verify(llama, "--plan", tampered(tmp_path, llama, change), "--emulate")
    assert result.exit_code == 1
    assert "model.layers.1.input_layernorm.weight: " in result.stderr and "summed over ranks" in result.stderr


@pytest.mark.parametrize("kind", ["reduce", "copy", "gather"])
def test_emulation_finds_a_collective_that_is_missing(llama, tmp_path, kind):
    result = verify(llama, "--plan", tampered(tmp_path, llama, without(kind)), "--emulate")
    assert result.exit_code == 1
    assert f"worst boundary {kind} at the " in result.stdout.splitlines()[-1]


def test_emulation_finds_an_edit_that_is_missing(tmp_path):
    def change(data):
        data["edits"] = data["edits"][1:]

    plan = tampered(tmp_path, name_of("grouped"), change)
    result = verify(name_of("grouped"), "--plan", plan, "--emulate")
    assert result.exit_code == 1 and "worst edit groups of core," in result.stdout


def test_a_twin_is_verified_and_said_to_be_one(llama):
    result = verify(llama, "--tp", 2, "--twin")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("Equal: ")
    assert "twin" in result.stderr


def test_a_twin_has_neither_folder_nor_plan(llama, folder):
    result = verify(llama, folder, "--twin")
    assert result.exit_code == 2 and "--twin verifies a smaller model" in result.stderr


def under_torchrun(ranks: int) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    verify = ["-c", "from tpconvert.cli import main; main()", "verify", name_of("mlp"), "--tp", "2"]
    command = [sys.executable, *torchrun, "--no-python", sys.executable, *verify]
    return subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True, timeout=120)


def test_the_ranks_of_torchrun_are_used():
    good = under_torchrun(2)
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("Equal: ") == 1
    assert "destroy_process_group" not in good.stderr


def test_torchrun_with_the_wrong_number_of_ranks_says_so():
    done = under_torchrun(1)
    assert done.returncode != 0
    assert "error: torchrun started 1 ranks, the plan is for tp=2. Start 2." in done.stderr


def test_threads_used_before_do_not_stop_the_ranks():
    code = (
        "import sys, torch; torch.set_num_threads(4); a = torch.randn(900, 900); (a @ a).sum();"
        "torch.randn(3000000).add_(1); from tpconvert.cli import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", name_of("mlp"), "--tp", "2"],
        env=ENVIRONMENT | {"OMP_NUM_THREADS": "4"}, text=True, capture_output=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


FORKED = "from tpconvert.cli import main; main()"


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGTERM, FORKED), (signal.SIGKILL, FORKED), (signal.SIGKILL, WITH_GPUS)]
)
def test_no_rank_outlives_the_command(how, code, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", code, "verify", name_of("waiting"), "--tp", "2"],
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ranks = []
    deadline = time.monotonic() + 60
    while len(ranks) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
        ranks = children(process.pid)
    assert len(ranks) == 2
    time.sleep(1.0)
    process.send_signal(how)
    process.wait(60)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(alive(pid) for pid in ranks):
        time.sleep(0.2)
    assert not any(alive(pid) for pid in ranks)


def alive(pid):
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
