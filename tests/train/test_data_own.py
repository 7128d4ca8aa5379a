"""Datasets and losses of the user's own."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, IterableDataset

from tests.train.tiny import WORDS, lm, make_folder
from tpconvert.errors import ConfigError
from tpconvert.parallel import make_mesh
from tpconvert.train.data import run as data
from tpconvert.train.data.batch import fingerprint
from tpconvert.train.data.order import Position
from tpconvert.train.data.own import Stream
from tpconvert.train.loop import train
from tpconvert.train.saving import state
from tpconvert.train.settings.config import Config, make_config

HERE = Path(__file__)


class Pairs(Dataset):
    """Ids and the labels of each, as the forward and the loss take them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        text = torch.arange(9) * (index + 1) % WORDS
        return {"ids": text[:-1], "labels": text[1:]}


def pairs():
    return Pairs()


class SeldomAsked(Pairs):
    """One example of four is asked for, so that dp ranks, and even steps, have no label at all."""

    def __getitem__(self, index: int):
        example = super().__getitem__(index)
        return example if index % 4 == 0 else example | {"labels": torch.full((8,), -100)}


def seldom_asked():
    return SeldomAsked()


class Endless(IterableDataset):
    def __iter__(self):
        return ({"ids": torch.arange(8) * i % WORDS, "labels": torch.arange(8) * i % 5} for i in range(1, 8))


def stream():
    return Endless()


class Counter:
    """An iterable that can say where it is."""

    def __init__(self) -> None:
        self.at, self.asked = 0, 0

    def __iter__(self):
        while self.at < 7:
            self.at += 1
            self.asked += 1
            yield {"ids": torch.full((8,), self.at), "labels": torch.full((8,), self.at % 5)}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state) -> None:
        self.at = state["at"]


def counter():
    return Counter()


def squared(model, batch):
    return model(batch["ids"]).pow(2).mean()


def of_text(model, batch):
    return F.cross_entropy(model(batch.ids).flatten(0, 1), batch.labels.flatten(), ignore_index=-100)


def no_tensor(model, batch):
    return 1.0


def per_token(model, batch):
    return model(batch["ids"]).mean(-1)


def test_tokens_of_own_examples_are_counted_as_they_are(tmp_path: Path):
    config = make_config(settings().model_dump(mode="json") | {"logging": {"every": 1, "peak_tflops": 1.0}})
    train(make_folder(tmp_path / "model", 1), config, make_mesh(1), output=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # 4 examples of 8
        assert abs(line["tokens_per_second"] * line["step_seconds"] - 32) < 1e-6 and "tflops_per_gpu" not in line


def drawn():
    return [{"ids": ids, "labels": ids} for ids in torch.randint(0, WORDS, (24, 8))]


def alike():
    return [{"ids": torch.arange(8), "labels": torch.arange(8) % 5}] * 4


class Alike(IterableDataset):
    def __iter__(self):
        return iter(alike())


def alike_stream():
    return Alike()


def one_time():
    return (example for example in alike())


def nothing():
    return 5


def empty():
    return []


def ragged():
    return [{"ids": torch.arange(n), "labels": torch.arange(n)} for n in (3, 4, 5, 6)]


def without_labels():
    return [{"ids": torch.arange(n, n + 8)} for n in range(8)]


def settings(dataset: str = "pairs", loss: str | None = None, **data) -> Config:
    return make_config({
        "training": {"steps": 6, "micro_batch_size": 2, "global_batch_size": 4, "precision": "fp64", "lr": 0.01},
        "data": {"dataset": f"{HERE}:{dataset}", "loss": f"{HERE}:{loss}" if loss else None, **data},
        "checkpoint": {"every": 2, "keep": 9},
        "logging": {"every": 1, "tensorboard": False},
    })  # fmt: skip


def run(mesh, folder: Path, config: Config, output: Path) -> list[float]:
    return train(folder, config, mesh, output=output)


def plainly(loss, steps: int = 6, dataset: Dataset | None = None) -> list[float]:
    """The same training of the whole model in one process."""
    from tpconvert.train.steps.optimizer import learning_rate, make_optimizer, set_learning_rate

    config, dataset = settings(), dataset or Pairs()
    module = lm()[0].double().train()
    optimizer = make_optimizer(module.named_parameters(), config.training)
    import numpy as np

    order, losses = np.random.default_rng([0, 0]).permutation(24), []
    for step in range(steps):
        rows = [dataset[int(i)] for i in order[4 * step : 4 * step + 4]]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        set_learning_rate(optimizer, learning_rate(step + 1, config.training))
        if bool((batch["labels"] == -100).all()):
            losses.append(0.0)
            continue
        value = loss(module, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(("tp", "dp", "loss"), [(2, 1, None), (2, 2, None), (2, 2, "squared")])
def test_own_examples_train_as_in_one_process(run_ranks, tmp_path: Path, tp: int, dp: int, loss: str | None):
    folder = make_folder(tmp_path / "model", tp)
    every = run_ranks(run, tp, folder, settings(loss=loss), tmp_path / "run", dp=dp)
    expected = plainly(squared if loss else cross_entropy)
    for losses in every:
        assert all(abs(a - b) < 1e-9 * abs(b) for a, b in zip(losses, expected, strict=True))


@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("tp", "dp", "micro"), [(1, 4, 1), (2, 2, 1), (1, 2, 2)])
def test_ranks_without_labels_train_along(run_ranks, tmp_path: Path, tp: int, dp: int, micro: int, data_parallel: str):
    config = settings("seldom_asked").model_dump(mode="json")
    config["training"] |= {"micro_batch_size": micro, "epochs": None}
    config = make_config(config | {"parallelism": {"data_parallel": data_parallel}})
    every = run_ranks(run, tp, make_folder(tmp_path / "model", tp), config, tmp_path / "run", dp=dp)
    expected = plainly(cross_entropy, dataset=SeldomAsked())
    assert 0.0 in expected and sum(expected) > 10
    for losses in every:
        assert all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(losses, expected, strict=True)), (losses, expected)


@pytest.mark.parametrize("dataset", ["pairs", "stream", "counter"])
def test_own_examples_go_on_where_they_stopped_also_on_another_dp(run_ranks, tmp_path: Path, dataset: str):
    folder, config = make_folder(tmp_path / "model", 1), settings(dataset)
    whole = train(folder, config, make_mesh(1), output=tmp_path / "whole")
    for dp in (1, 2):
        resumed = resume_from(config, tmp_path / "whole" / "step-4")
        every = run_ranks(run, 1, folder, resumed, tmp_path / f"on-{dp}", dp=dp)
        assert all(abs(a - b) < 1e-12 for a, b in zip(every[0], whole[4:], strict=True))


def test_examples_that_are_drawn_are_the_same_on_all_ranks(run_ranks, tmp_path: Path):
    every = run_ranks(run_after_drawing, 2, make_folder(tmp_path / "model", 2), settings("drawn"), tmp_path / "run")
    assert every[0] == every[1]


@pytest.mark.parametrize("dataset", ["alike", "alike_stream"])
def test_an_example_that_is_there_twice_is_no_fault_and_a_shared_one_is(run_ranks, tmp_path: Path, dataset: str):
    folder, config = make_folder(tmp_path / "model", 1), settings(dataset)
    every = run_ranks(run, 1, folder, config, tmp_path / "run", dp=2)
    assert every[0] == every[1] and len(every[0]) == 6
    told = run_ranks(run_with_one_share, 1, folder, config, tmp_path / "wrong", dp=2)
    assert told[0] == told[1] and "different dp ranks, but sequence" in told[0]


def test_a_stream_that_can_be_gone_through_once_says_so(tmp_path: Path):
    with pytest.raises(ConfigError, match="gives no examples when it is gone through again"):
        train(make_folder(tmp_path / "model", 1), settings("one_time"), make_mesh(1), output=tmp_path / "run")


def run_with_one_share(mesh, folder: Path, config: Config, output: Path) -> str:
    share = data._share
    data._share = lambda *given: (*share(*given)[:3], 0, 2)
    try:
        train(folder, config, mesh, output=output)
    except ConfigError as error:
        return str(error)
    finally:
        data._share = share
    return ""


def run_after_drawing(mesh, folder: Path, config: Config, output: Path) -> list[float]:
    torch.manual_seed(mesh.rank)
    return train(folder, config, mesh, output=output)


def resume_from(config: Config, step: Path) -> Config:
    data = config.model_dump(mode="json")
    return make_config(data | {"checkpoint": data["checkpoint"] | {"resume": str(step)}})


def test_a_stream_that_knows_its_place_is_not_gone_through_again():
    steps = Stream(Counter(), 2, 1, 0, 1).steps(Position())
    for _ in range(2):
        _, after = next(steps)
    expected = fingerprint(next(steps)[0])
    again = Counter()
    micros, _ = next(Stream(again, 2, 1, 0, 1).steps(Position(**json.loads(json.dumps(vars_of(after))))))
    assert fingerprint(micros) == expected and again.asked == 2


def test_a_stream_can_be_read_ahead_and_resumed(tmp_path: Path):
    plain = Stream(Endless(), 2, 1, 0, 1).steps(Position())
    expected = [fingerprint(next(plain)[0]) for _ in range(5)]
    ahead = Stream(Endless(), 2, 1, 0, 1, workers=3).steps(Position())
    steps = [next(ahead) for _ in range(2)]
    again = Stream(Endless(), 2, 1, 0, 1, workers=3).steps(Position(**json.loads(json.dumps(vars_of(steps[-1][1])))))
    assert [fingerprint(m) for m, _ in steps] + [fingerprint(next(again)[0]) for _ in range(3)] == expected


def vars_of(position: Position) -> dict:
    from dataclasses import asdict

    return asdict(position)


def test_the_end_of_a_stream_is_its_beginning():
    steps = Stream(Endless(), 2, 1, 0, 1).steps(Position())
    taken = [
        (micros[0].content["ids"][:, 1].tolist(), after.epoch) for micros, after in (next(steps) for _ in range(5))
    ]
    assert taken == [([1, 2], 0), ([3, 4], 0), ([5, 6], 0), ([7, 1], 1), ([2, 3], 1)]


def test_text_can_have_a_loss_of_ones_own(tmp_path: Path):
    from tests.train.tiny import make_text

    folder = make_folder(tmp_path / "model", 1)
    given = {"path": str(make_text(tmp_path / "text.txt")), "tokenizer": "bytes"}
    plain = settings().model_dump(mode="json")
    plain["training"] |= {"seq_len": 16}
    usual = make_config(plain | {"data": given})
    own = make_config(plain | {"data": given | {"loss": f"{HERE}:of_text"}})
    one = train(folder, usual, make_mesh(1), output=tmp_path / "a")
    other = train(folder, own, make_mesh(1), output=tmp_path / "b")
    assert all(abs(a - b) < 1e-12 for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("dataset", "loss", "message"),
    [
        ("pairs", "no_tensor", r"data\.loss: the function returned float\. Return the mean loss"),
        ("pairs", "per_token", r"data\.loss: the function returned a tensor of shape \(2, 8\)"),
        ("nothing", None, r"data\.dataset: .*nothing returned int, of which no examples can be had"),
        ("empty", None, r"data\.dataset: .*empty returned a dataset without examples"),
        ("ragged", None, r"data\.dataset: its examples cannot be stacked into a batch"),
        ("without_labels", None, r"data\.dataset: its examples have no labels for the loss"),
        ("pears", None, r"data\.dataset: .* has no function pears\. Did you mean pairs\?"),
    ],
)
def test_what_cannot_be_trained_on_is_one_line(tmp_path: Path, dataset: str, loss: str | None, message: str):
    with pytest.raises(ConfigError, match=message):
        train(make_folder(tmp_path / "model", 1), settings(dataset, loss), make_mesh(1), output=tmp_path / "run")
    assert state.complete_steps(tmp_path / "run") == []


def test_a_held_out_part_is_judged_alike_on_any_number_of_ranks(run_ranks, tmp_path: Path):
    folder = make_folder(tmp_path / "model", 1)
    config = settings(eval={"fraction": 0.2, "every": 3})
    losses = []
    for dp in (1, 2):
        run_ranks(run, 1, folder, config, tmp_path / f"on-{dp}", dp=dp)
        lines = [json.loads(line) for line in (tmp_path / f"on-{dp}" / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["eval_loss"] for line in lines if "eval_loss" in line])
    assert len(losses[0]) == 2
    assert all(abs(a - b) < 1e-9 for a, b in zip(*losses, strict=True))


def test_an_evaluation_changes_nothing_of_the_training(run_ranks, tmp_path: Path):
    folder = make_folder(tmp_path / "model", 2, "lm_dropout")
    with_it = settings(eval={"dataset": f"{HERE}:pairs", "every": 1, "batches": 2})
    plain = run_ranks(run, 2, folder, settings(), tmp_path / "a")
    assert run_ranks(run, 2, folder, with_it, tmp_path / "b") == plain


def told_while_judged(mesh, folder: Path, config: Config, output: Path) -> int:
    """Questions asked by the time the run is over; the answer to the fourth is yes on one rank."""
    asked = []

    def stopped() -> bool:
        asked.append(0)
        return len(asked) >= 4 and mesh.dp_rank == 1

    train(folder, config, mesh, output=output, stopped=stopped)
    return len(asked)


def test_a_run_that_is_told_to_stop_does_not_finish_its_evaluation(run_ranks, tmp_path: Path):
    config = settings(eval={"dataset": f"{HERE}:pairs", "every": 1})  # 6 batches of each dp rank
    folder = make_folder(tmp_path / "model", 1)
    assert run_ranks(told_while_judged, 1, folder, config, tmp_path / "run", dp=2) == [5, 5]
    assert "eval_loss" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert [p.name for p in state.complete_steps(tmp_path / "run")] == ["step-1"]


def test_an_evaluation_leaves_shards_over_dp_as_they_were(run_ranks, tmp_path: Path):
    folder = make_folder(tmp_path / "model", 1)
    config = settings(eval={"fraction": 0.2, "every": 1}).model_dump(mode="json")
    sharded = make_config(config | {"parallelism": {"data_parallel": "fsdp"}})
    whole = run_ranks(run, 1, folder, make_config(config), tmp_path / "a", dp=2)
    every = run_ranks(run, 1, folder, sharded, tmp_path / "b", dp=2)
    assert all(abs(a - b) < 1e-11 for a, b in zip(every[0], whole[0], strict=True))
    resumed = run_ranks(run, 1, folder, resume_from(sharded, tmp_path / "b" / "step-4"), tmp_path / "c", dp=2)
    assert resumed[0] == every[0][4:]
