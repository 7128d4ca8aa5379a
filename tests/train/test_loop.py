"""Training in parts is training of the whole."""

import ast
import contextlib
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.train.tiny import make_folder, make_text, train_plainly
from tpconvert.checkpoint import merge, read_plan
from tpconvert.errors import ConfigError, TrainError
from tpconvert.parallel import Mesh
from tpconvert.parallel.comm.mesh import dry_mesh
from tpconvert.spec.plan import Plan, Slices
from tpconvert.train.loop import check_slices, seed_micro_batch, train
from tpconvert.train.model.open import build, open_module
from tpconvert.train.saving import state
from tpconvert.train.settings.config import Config, make_config
from tpconvert.train.together.ranks import sum_gradients

PLACES = [(2, 1), (1, 2), (2, 2)]


def settings(tmp_path: Path, **training) -> Config:
    base = {
        "steps": 20, "micro_batch_size": 2, "global_batch_size": 4, "seq_len": 16, "precision": "fp64", "lr": 0.02,
    }  # fmt: skip
    return make_config({
        "training": base | training,
        "data": {
            "path": str(make_text(tmp_path / "text.txt")), "tokenizer": "bytes", "cache": str(tmp_path / "cache"),
        },
        "logging": {"every": 1, "tensorboard": False, "jsonl": False},
    })  # fmt: skip


def changed(config: Config, **sections) -> Config:
    data = config.model_dump(mode="json")
    return make_config({name: data[name] | sections.get(name, {}) for name in data})


def run(mesh, folder: Path, config: Config, output: Path) -> list[float]:
    return train(folder, config, mesh, output=output)


def merged(step: Path, out: Path) -> dict[str, torch.Tensor]:
    merge(step, out)
    return load_file(out / "model.safetensors")


def worst(ours: list[float], plain: list[float]) -> float:
    assert len(ours) == len(plain)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("tp", "dp"), PLACES)
def test_twenty_steps_equal_plain_training_of_the_whole_model(run_ranks, tmp_path: Path, tp: int, dp: int, optimizer):
    config = settings(tmp_path, optimizer=optimizer, clip=0.5, **({"lr": 0.3} if optimizer == "sgd" else {}))
    config = changed(config, training={"micro_batch_size": 4 // dp})
    folder = make_folder(tmp_path / "model", tp)
    every = run_ranks(run, tp, folder, config, tmp_path / "run", dp=dp)
    module, losses = train_plainly(config)
    assert losses[-1] < 0.8 * losses[0]
    for ours in every:
        assert worst(ours, losses) < 1e-9
    weights = merged(tmp_path / "run" / "step-20", tmp_path / "merged")
    for name, tensor in module.state_dict().items():
        assert torch.allclose(weights[name].double(), tensor, atol=1e-6), name


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2)])
def test_training_with_slices_of_the_sequence_is_plain_training(run_ranks, tmp_path: Path, tp: int, dp: int):
    config = settings(tmp_path, optimizer="adamw", clip=0.5, micro_batch_size=4 // dp)
    config = changed(config, parallelism={"sequence_parallel": True, "activation_checkpointing": "full"})
    folder = make_folder(tmp_path / "model", tp, by_hand=False)
    every = run_ranks(run, tp, folder, config, tmp_path / "run", dp=dp)
    _, losses = train_plainly(config)
    for ours in every:
        assert worst(ours, losses) < 1e-9


def test_a_length_that_ranks_cannot_share_is_told_before_training(run_ranks, tmp_path: Path):
    config = changed(settings(tmp_path, seq_len=15), parallelism={"sequence_parallel": True})
    every = run_ranks(refused, 2, make_folder(tmp_path / "model", 2, by_hand=False), config, tmp_path / "run")
    assert every == [("seq_len 15 is no multiple of tp=2.", "training.seq_len=14")] * 2


@pytest.mark.parametrize(
    ("micro", "held", "told"),
    [(3, 0, "micro_batch_size 3 is no multiple of tp=2."), (4, 7, "7 sequences are held out"), (4, 6, ""), (4, 8, "")],
)
def test_so_is_a_batch_where_they_share_whole_sequences(tmp_path: Path, micro: int, held: int, told: str):
    config = changed(settings(tmp_path, seq_len=15, micro_batch_size=micro), parallelism={"sequence_parallel": True})
    plan = Plan(2, (), slices=Slices(sequences=True))
    with pytest.raises(ConfigError, match=told) if told else contextlib.nullcontext():
        check_slices(state.Run(tmp_path, tmp_path, plan, config, dry_mesh(0, 2)), held)


def test_fp8_where_the_device_has_none_is_one_line(tmp_path: Path):
    from tpconvert.parallel import make_mesh

    config = settings(tmp_path, precision="fp8")
    with pytest.raises(ConfigError, match=r"precision is fp8, but cpu has no float8 products\. Use .*bf16"):
        train(make_folder(tmp_path / "model", 1), config, make_mesh(1), output=tmp_path / "run")


def refused(mesh, folder: Path, config: Config, output: Path) -> tuple[str, str]:
    with pytest.raises(ConfigError) as error:
        train(folder, config, mesh, output=output)
    return error.value.message, error.value.hint.split()[1].rstrip(",")


def test_accumulating_four_micro_batches_of_one_is_one_of_four_also_with_padding(run_ranks, tmp_path: Path):
    config = changed(
        settings(tmp_path), data={"pack": False, "documents": "line"}, training={"steps": 6, "seq_len": 30}
    )
    folder = make_folder(tmp_path / "model", 2)
    at_once = run_ranks(run, 2, folder, changed(config, training={"micro_batch_size": 4}), tmp_path / "a")
    one_by_one = run_ranks(run, 2, folder, changed(config, training={"micro_batch_size": 1}), tmp_path / "b")
    on_dp = run_ranks(run, 2, folder, changed(config, training={"micro_batch_size": 1}), tmp_path / "c", dp=2)
    assert worst(at_once[0], one_by_one[0]) < 1e-11 and worst(at_once[0], on_dp[0]) < 1e-11


def test_buckets_of_gradients_make_no_difference(run_ranks, tmp_path: Path):
    config = settings(tmp_path, steps=3)
    folder = make_folder(tmp_path / "model", 1)
    big = run_ranks(run, 1, folder, config, tmp_path / "a", dp=2)
    small = run_ranks(run, 1, folder, changed(config, parallelism={"bucket_mb": 1e-5}), tmp_path / "b", dp=2)
    assert big == small


def run_quietly(mesh, folder: Path, config: Config, output: Path) -> list[float]:
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler imports what torch itself has deprecated
        return train(folder, config, mesh, output=output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "parallelism"),
    [
        (1, {}),
        (1, {"activation_checkpointing": "full"}),
        (1, {"activation_checkpointing": "selective"}),
        (1, {"sequence_parallel": True}),
        (1, {"sequence_parallel": True, "activation_checkpointing": "full"}),
        (1, {"sequence_parallel": True, "activation_checkpointing": "selective"}),
        (2, {"data_parallel": "fsdp"}),
        (2, {"data_parallel": "fsdp", "activation_checkpointing": "selective", "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_compiled_layers_change_nothing(run_ranks, tmp_path: Path, dp: int, parallelism: dict):
    config = settings(tmp_path, steps=4)
    folder = make_folder(tmp_path / "model", 2, by_hand="sequence_parallel" not in parallelism)
    plain = run_ranks(run, 2, folder, config, tmp_path / "a", dp=dp, timeout=180)
    config = changed(config, parallelism={"compile": True, **parallelism})
    other = run_ranks(run_quietly, 2, folder, config, tmp_path / "b", dp=dp, timeout=500)
    assert worst(plain[0], other[0]) < 1e-9


def test_activation_checkpointing_changes_nothing(run_ranks, tmp_path: Path):
    config = settings(tmp_path, steps=4)
    folder = make_folder(tmp_path / "model", 2, "lm_dropout")
    plain = run_ranks(run, 2, folder, config, tmp_path / "a")
    other = run_ranks(run, 2, folder, changed(config, parallelism={"activation_checkpointing": "full"}), tmp_path / "b")
    assert worst(plain[0], other[0]) < 1e-11


def test_logits_that_are_worked_on_after_the_head_are_gathered(run_ranks, tmp_path: Path):
    config = changed(settings(tmp_path, steps=5), training={"micro_batch_size": 4})
    folder = make_folder(tmp_path / "model", 2, "lm_unit")
    ours = run_ranks(run, 2, folder, config, tmp_path / "run")
    assert worst(ours[0], train_plainly(config, "lm_unit")[1]) < 1e-9


def cut_words(mesh, folder: Path, config: Config) -> list[int]:
    plan = read_plan(folder)
    tensors = state.load_tensors(folder, mesh, torch.float32, masters=False)
    _, _, cut = build(lambda: open_module(folder, plan), plan, mesh, tensors, torch.float32)
    return [block.count for block in cut]


@pytest.mark.parametrize(("function", "cut"), [("lm", [259]), ("lm_unit", [])])
def test_logits_stay_cut_exactly_where_they_are_the_last_thing(
    run_ranks, tmp_path: Path, function: str, cut: list[int]
):
    folder = make_folder(tmp_path / "model", 2, function)
    assert run_ranks(cut_words, 2, folder, settings(tmp_path)) == [cut, cut]


def test_bf16_follows_the_curve_of_fp64(run_ranks, tmp_path: Path):
    config = settings(tmp_path)
    folder = make_folder(tmp_path / "model", 2)
    exact = run_ranks(run, 2, folder, config, tmp_path / "a")
    low = run_ranks(run, 2, folder, changed(config, training={"precision": "bf16"}), tmp_path / "b")
    assert worst(low[0], exact[0]) < 0.01  # 2**-8 of a product, averaged over 64 tokens


def test_a_loss_that_is_no_number_ends_the_run(run_ranks, tmp_path: Path):
    config = settings(tmp_path, steps=5, lr=1e300, optimizer="sgd", clip=None)
    folder = make_folder(tmp_path / "model", 1)
    with pytest.raises(TrainError, match=r"Step 2: the loss is (nan|inf) \(dp rank 0, micro-batch 0 and 1 more\)"):
        from tpconvert.parallel import make_mesh

        train(folder, config, make_mesh(1), output=tmp_path / "run")
    (left,) = (tmp_path / "run").glob("bad-step-*")
    with safe_open(left, "pt") as file:
        assert "epoch=0, used=(4,)" in file.metadata()["position"] and "nan" in file.metadata()["losses"]
        rows = ast.literal_eval(file.metadata()["rows"])
        assert len(rows) == 4 and all(source == epoch == 0 for source, epoch, _ in rows)
        tokens = torch.tensor(list((tmp_path / "text.txt").read_bytes()))
        assert torch.equal(file.get_tensor("1.ids")[1], tokens[16 * rows[3][2] :][:16])
        assert set(file.keys()) >= {"0.ids", "0.labels", "1.attention"} and file.get_tensor("1.ids").shape == (2, 16)


def test_a_model_that_is_not_for_text_says_so(tmp_path: Path):
    from tpconvert.source.source import Source
    from tpconvert.train.model.open import make_call

    source = Source(
        name="it", module=torch.nn.Linear(2, 2), inputs={"x": torch.zeros(2, 2)}, build=None, weights=None
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"it: its forward takes x; the trainer gives one tensor of token ids"):
        make_call(source)


def draw(mesh) -> list[float]:
    drawn = []
    for step, number in ((1, 0), (1, 1), (2, 0)):
        seed_micro_batch(mesh, 0, step, number)
        drawn.append(torch.rand(()).item())
    return drawn


def test_random_numbers_differ_by_step_micro_batch_and_dp_rank_and_agree_over_tp(run_ranks):
    drawn = run_ranks(draw, 2, dp=2)
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3]
    assert len({*drawn[0], *drawn[2]}) == 6


def sum_uneven(mesh) -> dict[str, float | None]:
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(2)) for name in ("every", "some", "none")})
    module["every"].grad = torch.ones(2)
    if mesh.dp_rank == 1:
        module["some"].grad = torch.ones(2)
    sum_gradients(module, mesh, 1 << 20)
    return {n: None if p.grad is None else p.grad.sum().item() for n, p in module.items()}


def test_a_gradient_that_only_some_dp_ranks_have_is_summed_and_one_that_none_has_stays_none(run_ranks):
    assert run_ranks(sum_uneven, 1, dp=2) == [{"every": 4.0, "some": 2.0, "none": None}] * 2


def test_the_module_is_built_from_what_the_folder_says_without_tracing(tmp_path: Path):
    folder = make_folder(tmp_path / "model", 2)
    source = open_module(folder, read_plan(folder))
    assert all(p.is_meta for p in source.module.parameters())


def test_an_output_that_cannot_be_written_is_told_before_training(tmp_path: Path):
    from tpconvert.parallel import make_mesh

    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"run: is a file, not a folder\. Choose another --output\."):
        train(make_folder(tmp_path / "model", 1), settings(tmp_path), make_mesh(1), output=tmp_path / "run")


def test_backward_runs_in_the_thread_of_forward(tmp_path: Path):
    asked = []

    def stopped() -> bool:
        asked.append(torch._C._is_multithreading_enabled())
        return False

    mesh = Mesh(0, 1, None, torch.device("cpu"))
    train(
        make_folder(tmp_path / "model", 1), settings(tmp_path, steps=1), mesh, output=tmp_path / "run", stopped=stopped
    )
    assert asked and not any(asked) and torch._C._is_multithreading_enabled()
