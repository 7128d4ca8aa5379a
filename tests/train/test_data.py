import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.tiny import make_folder, make_text
from tpconvert.checkpoint import load_rank
from tpconvert.errors import ConfigError
from tpconvert.parallel import make_mesh
from tpconvert.train.data.batch import IGNORE, Shortened, check_shares, collate, count_labels, fingerprint, origins_of
from tpconvert.train.data.order import Batches, Position
from tpconvert.train.examples.fits import Limits, check_fits, cut_off
from tpconvert.train.examples.objectives import Causal, make_sequences
from tpconvert.train.examples.text import Column, Tokens
from tpconvert.train.examples.tokenizer import ByteTokenizer
from tpconvert.train.loop import train
from tpconvert.train.settings.config import make_config


def numbers(n: int, *starts: int) -> Tokens:
    return Tokens(np.arange(n) % 256, np.array([0, *starts, n]), 255)


def batches(count: int, *, dp_rank=0, dp_degree=1, micro=2, accumulation=1, seed=0) -> Batches:
    return Batches((Causal(numbers(count * 4 + 1), 4, True, 0),), seed, micro, accumulation, dp_rank, dp_degree)


def row(sequences, index: int, epoch: int = 0):
    example = sequences(index, epoch)
    return example["ids"], example["labels"], example["used"]


def take(of: Batches, n: int, position: Position | None = None):
    steps = of.steps(position or Position())
    return [next(steps) for _ in range(n)]


def test_every_token_of_packed_text_predicts_the_next_one():
    sequences = Causal(numbers(9), 4, True, 0)
    assert len(sequences) == 2
    ids, labels, used = row(sequences, 1)
    assert ids.tolist() == [4, 5, 6, 7] and labels.tolist() == [5, 6, 7, 8] and used == 4


def test_an_unpacked_document_is_padded_or_cut_off():
    sequences = Causal(numbers(9, 3), 4, False, 99)
    ids, labels, used = row(sequences, 0)
    assert ids.tolist() == [0, 1, 2, 99] and labels.tolist() == [1, 2, IGNORE, IGNORE] and used == 3
    ids, labels, used = row(sequences, 1)
    assert ids.tolist() == [3, 4, 5, 6] and labels.tolist() == [4, 5, 6, 7] and used == 4


def test_padding_has_no_attention():
    of = Batches((Causal(numbers(9, 3), 4, False, 99),), 0, 2, 1, 0, 1)
    batch = take(of, 1)[0][0][0]
    assert torch.equal(batch.attention.bool(), batch.ids != 99)


def test_an_epoch_has_every_sequence_once_and_the_next_has_another_order():
    steps = take(batches(6), 6)
    first = torch.cat([b.ids[:, 0] for micros, _ in steps[:3] for b in micros])
    second = torch.cat([b.ids[:, 0] for micros, _ in steps[3:] for b in micros])
    assert sorted(first.tolist()) == sorted(second.tolist()) == [0, 4, 8, 12, 16, 20]
    assert first.tolist() != second.tolist()


def test_another_seed_gives_another_order():
    assert fingerprint(take(batches(50), 1)[0][0]) != fingerprint(take(batches(50, seed=1), 1)[0][0])


def test_any_position_continues_exactly():
    steps = take(batches(7), 9)
    for i in range(8):
        ((micros, after),) = take(batches(7), 1, steps[i][1])
        assert fingerprint(micros) == fingerprint(steps[i + 1][0]) and after == steps[i + 1][1]


def test_dp_ranks_share_out_the_step_that_one_rank_would_take():
    ((alone, _),) = take(batches(20, micro=4, accumulation=2), 1)
    ranks = [take(batches(20, dp_rank=r, dp_degree=2, micro=4), 1)[0][0] for r in range(2)]
    assert torch.equal(torch.cat([b.ids for b in alone]), torch.cat([b.ids for micros in ranks for b in micros]))


def test_four_micro_batches_of_one_are_one_of_four():
    ((whole, _),) = take(batches(20, micro=4), 1)
    ((parts, _),) = take(batches(20, micro=1, accumulation=4), 1)
    assert len(parts) == 4 and torch.equal(whole[0].labels, torch.cat([b.labels for b in parts]))


def test_too_few_sequences_for_a_step_is_an_error_with_the_numbers():
    with pytest.raises(ConfigError, match="gives 3 sequences, but one step needs 4"):
        batches(3, micro=4)


def test_text_shorter_than_a_sequence_is_an_error_with_the_numbers():
    config = make_config({"data": {"path": "x"}, "training": {"seq_len": 128}})
    with pytest.raises(ConfigError, match=r"the text has 90 tokens, too few for one sequence of training\.seq_len 128"):
        make_sequences(config, numbers(90), ByteTokenizer())


def masked(probability: float = 0.15, seed: int = 0, **tokenizer):
    config = make_config({
        "data": {"path": "x", "objective": "masked", "mask_probability": probability},
        "training": {"seq_len": 1000, "seed": seed},
    })  # fmt: skip
    found = ByteTokenizer()
    for name, value in tokenizer.items():
        setattr(found, name, value)
    tokens = Tokens(np.random.default_rng(0).integers(0, 250, 20_000), np.array([0, 20_000]), 249)
    return make_sequences(config, tokens, found), tokens


def test_masking_asks_for_15_percent_as_80_masks_10_random_10_kept():
    sequences, tokens = masked()
    rows = [row(sequences, i) for i in range(len(sequences))]
    ids, labels = np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows])
    asked = labels != IGNORE
    assert abs(asked.mean() - 0.15) < 0.01
    assert abs((ids[asked] == ByteTokenizer.mask).mean() - 0.8) < 0.03
    assert abs((ids[asked] == tokens.ids[asked]).mean() - 0.1) < 0.03
    assert (labels[asked] == tokens.ids[asked]).all() and (ids[~asked] == tokens.ids[~asked]).all()


def test_masks_are_the_same_again_and_others_in_another_epoch():
    one, two, other = masked()[0], masked()[0], masked(seed=1)[0]
    assert np.array_equal(row(one, 3, 1)[0], row(two, 3, 1)[0])
    assert not np.array_equal(row(one, 3, 0)[0], row(one, 3, 1)[0])
    assert not np.array_equal(row(one, 3, 0)[0], row(other, 3, 0)[0])


def test_a_masked_sequence_is_enclosed_and_its_special_tokens_are_never_asked_for():
    sequences, _ = masked(0.9, frame=((251,), (252,)), special=frozenset({251, 252, 7}))
    ids, labels, used = row(sequences, 0)
    assert ids[0] == 251 and ids[-1] == 252 and used == 1000
    assert labels[0] == labels[-1] == IGNORE
    assert not (labels == 7).any()


def test_masked_needs_a_mask_token():
    with pytest.raises(ConfigError, match="the tokenizer has no mask token"):
        masked(mask=None)


def test_labels_are_counted_without_padding():
    of = Batches((Causal(numbers(9, 3), 4, False, 99),), 0, 2, 1, 0, 1)
    assert count_labels(take(of, 1)[0][0]) == 6


def test_tp_ranks_with_different_batches_are_found():
    mine, others = [(0, 0, 3)], [(0, 0, 1)]
    check_shares([("a", mine), ("a", mine), ("b", others), ("b", others)], tp=2)
    with pytest.raises(ConfigError, match="Ranks 2 and 3 are tp ranks of one dp rank, but their first batches differ"):
        check_shares([("a", mine), ("a", mine), ("b", others), ("c", others)], tp=2)


def test_dp_ranks_with_a_sequence_in_common_are_found_and_equal_ones_of_other_places_are_not():
    first, second = [(0, 0, 3), (1, 0, 7)], [(0, 0, 2), (1, 0, 7)]
    with pytest.raises(ConfigError, match="0 and 2 are different dp ranks, but sequence 7 of source 1 is in the first"):
        check_shares([("a", first), ("a", first), ("b", second), ("b", second)], tp=2)
    for other in ([(0, 0, 2), (1, 1, 7)], [(0, 0, 2), (1, 0, 6)]):
        check_shares([("a", first), ("a", first), ("a", other), ("a", other)], tp=2)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 30.0)])
def test_no_dp_rank_has_the_row_of_another_however_small_the_data_and_equal_the_rows(weights):
    same = Causal(Tokens(np.full(17, 7), np.array([0, 17]), 7), 4, True, 0)
    shares = [Batches((same, same), 0, 1, 2, rank, 2, weights) for rank in range(2)]
    for (ours, _), (others, _) in zip(take(shares[0], 12), take(shares[1], 12), strict=True):
        assert fingerprint(ours) == fingerprint(others)
        check_shares([(fingerprint(m), origins_of(m)) for m in (ours, others)], tp=1)
        with pytest.raises(ConfigError, match="different dp ranks"):
            check_shares([(fingerprint(ours), origins_of(ours))] * 2, tp=1)


def test_text_that_the_model_has_no_words_or_places_for_is_an_error_with_the_numbers():
    config = make_config({"data": {"path": "x"}, "training": {"seq_len": 64}})
    check_fits(config, numbers(300), ByteTokenizer(), Limits(256, 64))
    check_fits(config, numbers(300), ByteTokenizer(), Limits())
    with pytest.raises(ConfigError, match=r"The tokens go up to 255, but the model has 255 words \(0 to 254\)"):
        check_fits(config, numbers(300), ByteTokenizer(), Limits(255))
    with pytest.raises(ConfigError, match=r"seq_len 64 is more than the 63 positions of the model"):
        check_fits(config, numbers(300), ByteTokenizer(), Limits(places=63))


def test_places_are_known_by_whatever_name_the_kind_of_model_has_for_them():
    from tests.parallel.same import plan_of
    from tpconvert.train.examples.fits import limits

    plan = plan_of(torch.nn.Linear(2, 2), 1, {})
    assert limits({"model_type": "gpt2", "n_positions": 64, "vocab_size": 9}, plan) == Limits(9, 64, 2)
    assert limits({"model_type": "llama", "max_position_embeddings": 64}, plan).places == 64
    assert limits({"model_type": "of my own", "n_positions": 64}, plan).places is None


def test_examples_that_are_cut_off_are_counted():
    config = {"data": {"path": "x", "objective": "seq2seq", "target_len": 2}, "training": {"seq_len": 4}}
    pairs = replace(numbers(13, 4, 9), more={"target": Column(np.arange(6), np.array([0, 3, 6, 6]))})
    assert list(cut_off(make_config(config), pairs, ByteTokenizer())) == [
        "1 of 3 examples are longer than training.seq_len 4 and cut off",
        "2 of 3 examples are longer than data.target_len 2 and cut off",
    ]
    assert list(cut_off(make_config({"data": {"path": "x"}}), numbers(5000), ByteTokenizer())) == []


def test_a_step_with_nothing_to_predict_changes_no_weight(tmp_path: Path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "abc", "to": "d"}\n' * 4)
    config = make_config({
        "training": {"steps": 1, "micro_batch_size": 2, "seq_len": 2, "precision": "fp32"},
        "data": {"path": str(tmp_path / "a.jsonl"), "tokenizer": "bytes", "target": "to", "pack": False},
        "logging": {"every": 1, "tensorboard": False},
    })  # fmt: skip
    folder = make_folder(tmp_path / "model", 1)
    losses = train(folder, config, make_mesh(1), output=tmp_path / "run")
    said = capsys.readouterr().out
    assert losses == [0.0] and "4 of 4 examples are longer than training.seq_len 2 and cut off\n" in said
    assert "step 1: there is nothing to predict in its batch, so no weight is changed\n" in said
    before, after = (load_rank(f, 0) for f in (folder, tmp_path / "run" / "step-1"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_more_classes_than_the_model_has_are_an_error_with_the_numbers():
    config = make_config({"data": {"path": "x", "objective": "classification"}})
    tokens = Tokens(np.arange(4), np.array([0, 2, 4]), 3, {"label": Column(np.array([0, 3]), np.array([0, 1, 2]))})
    check_fits(config, tokens, ByteTokenizer(), Limits(classes=4))
    with pytest.raises(ConfigError, match=r"The labels go up to 3, but the model has 3 classes \(0 to 2\)"):
        check_fits(config, tokens, ByteTokenizer(), Limits(classes=3))


# -- boundaries of packed documents ---------------------------------------------------------------------------------


def test_no_label_of_packed_documents_is_of_the_next_one():
    example = Causal(numbers(13, 3, 8), 12, True, 0, boundaries=True)(0, 0)
    assert example["documents"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert example["labels"].tolist() == [1, 2, IGNORE, 4, 5, 6, 7, IGNORE, 9, 10, 11, 12]


def test_positions_begin_anew_with_each_document_and_each_sequence():
    of = Causal(numbers(25, 3, 8), 12, True, 0, boundaries=True)
    batch = collate([of(0, 0), of(1, 0)])
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3], list(range(12))]


def test_masked_documents_of_one_sequence_are_each_enclosed():
    config = make_config({"data": {"path": "x", "objective": "masked"}, "training": {"seq_len": 12}})
    tokenizer = ByteTokenizer()
    tokenizer.frame, tokenizer.special = ((251,), (252,)), frozenset(range(256))  # nothing is hidden
    of = make_sequences(config, numbers(14, 3, 3, 5), tokenizer)
    first, second = of(0, 0), of(1, 0)
    assert first["ids"].tolist() == [251, 0, 1, 2, 252, 251, 3, 4, 252, 251, 5, 252]
    assert first["documents"].tolist() == [0] * 5 + [1] * 4 + [2] * 3
    assert second["ids"].tolist() == [251, 6, 7, 8, 9, 10, 11, 12, 13, 252, 258, 258] and second["used"] == 10
    assert second["documents"].tolist() == [0] * 10 + [1] * 2 and len(of) == 2


def test_whole_words_are_hidden_whole():
    config = make_config({"data": {"path": "x", "objective": "masked", "whole_words": True, "mask_probability": 0.3},
                          "training": {"seq_len": 1000}})  # fmt: skip
    begins = np.tile([1, 0, 0, 1, 0], 200)
    tokens = Tokens(np.arange(1000) % 250, np.array([0, 1000]), 249, {"begins": Column(begins, np.array([0, 1000]))})
    asked = make_sequences(config, tokens, ByteTokenizer())(0, 0)["labels"].reshape(200, 5) != IGNORE
    assert (asked[:, :3].all(1) | ~asked[:, :3].any(1)).all() and (asked[:, 3] == asked[:, 4]).all()
    assert 0.2 < asked.mean() < 0.4


# -- padding --------------------------------------------------------------------------------------------------------


def test_padding_that_all_rows_share_can_be_left_out():
    of = Causal(numbers(30, 3, 13), 40, False, 99)
    rows = [of(i, 0) for i in range(2)]
    long, short = collate(rows), Shortened(4, False)(rows)
    assert short.ids.shape == short.labels.shape == short.attention.shape == (2, 12)
    assert all(t.is_contiguous() for t in (short.ids, short.labels, short.attention))
    assert torch.equal(short.ids, long.ids[:, :12]) and not long.attention[:, 12:].any()
    assert short.predicted == long.predicted


def test_targets_are_as_long_as_the_longest_of_them():
    row = {"ids": np.arange(16), "labels": np.array([5] * 9 + [IGNORE] * 7), "used": 3}
    short = Shortened(2, True)([row, row])
    assert short.ids.shape == (2, 4) and short.labels.shape == (2, 10) and short.predicted == 18


def test_one_label_for_a_row_stays_one():
    row = {"ids": np.arange(16), "labels": np.int64(3), "used": 3}
    assert Shortened(8, False)([row, row]).labels.tolist() == [3, 3]


# -- all of it in a run ---------------------------------------------------------------------------------------------


def run(mesh, folder, config, output) -> list[float]:
    return train(folder, config, mesh, output=output)


def test_a_blend_of_masked_documents_goes_on_to_the_bit_and_on_other_ranks(run_ranks, tmp_path: Path):
    paths = [
        make_text(tmp_path / "a.txt", 3000),
        make_text(tmp_path / "b.txt", 900),
        make_text(tmp_path / "c.txt", 300),
    ]
    sources = [{"path": str(path), "weight": weight} for path, weight in zip(paths[:2], (2, 1), strict=True)]
    config = {
        "training": {"steps": 12, "micro_batch_size": 2, "global_batch_size": 4, "seq_len": 32, "precision": "fp64"},
        "data": {
            "sources": sources, "tokenizer": "bytes", "objective": "masked", "documents": "line",
            "cache": str(tmp_path / "cache"), "eval": {"path": str(paths[2]), "every": 4},
        },
        "checkpoint": {"every": 8, "keep": 3},
        "logging": {"every": 1, "tensorboard": False},
    }  # fmt: skip
    folder = make_folder(tmp_path / "model", 1)
    whole = run_ranks(run, 1, folder, make_config(config), tmp_path / "whole", dp=2)[0]
    from_8 = make_config(config | {"checkpoint": {"resume": str(tmp_path / "whole" / "step-8")}})
    assert run_ranks(run, 1, folder, from_8, tmp_path / "again", dp=2)[0] == whole[8:]
    alone = train(folder, from_8, make_mesh(1), output=tmp_path / "alone")
    assert all(abs(a - b) < 1e-11 for a, b in zip(alone, whole[8:], strict=True))
    logs = [(tmp_path / where / "metrics.jsonl").read_text().splitlines() for where in ("whole", "again", "alone")]
    held = [[json.loads(line)["eval_loss"] for line in log if "eval_loss" in line] for log in logs]
    assert len(held[0]) == 3 and held[1] == held[0][2:] and abs(held[2][0] - held[0][2]) < 1e-11


def test_epochs_are_steps_until_every_source_was_gone_through_so_often():
    one = batches(7)  # of 2 sequences a step
    assert [one.steps_of(epochs) for epochs in (1, 2, 0.5, 0.01)] == [4, 7, 2, 1]
    both = Batches((*one.sources, *batches(4).sources), 0, 2, 1, 0, 1, (3.0, 1.0))
    steps = both.steps_of(1)
    assert [p.epoch for _, p in take(both, steps)][-2:] == [0, 1] and steps == 8


def test_a_run_of_epochs_ends_with_its_data(tmp_path: Path):
    settings = {
        "training": {"epochs": 2, "micro_batch_size": 4, "seq_len": 16, "precision": "fp32"},
        "data": {"path": str(make_text(tmp_path / "a.txt", 400)), "tokenizer": "bytes"},
        "logging": {"every": 100, "tensorboard": False},
    }
    train(make_folder(tmp_path / "model", 1), make_config(settings), make_mesh(1), output=tmp_path / "run")
    assert [p.name for p in tmp_path.glob("run/step-*")] == ["step-13"]  # 25 sequences twice, 4 a step
    settings["training"]["epochs"] = 0.1
    settings["training"]["warmup_steps"] = 5
    with pytest.raises(ConfigError, match=r"training\.epochs: training: warmup_steps 5 is more than steps 1"):
        train(tmp_path / "model", make_config(settings), make_mesh(1), output=tmp_path / "other")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"eval": {"path": "nowhere.txt"}}, r"^data\.eval\.path: there is no file nowhere\.txt"),
        ({"sources": [{"path": "a.txt"}, {"path": "nowhere.txt"}]}, r"^data\.sources\.1\.path: there is no file"),
        ({"eval": {"path": "short.txt"}}, r"^data\.eval\.path: the text has 3 tokens, too few"),
    ],
)
def test_an_error_names_the_section_that_it_is_about(tmp_path: Path, monkeypatch, data: dict, message: str):
    monkeypatch.chdir(tmp_path)
    make_text(tmp_path / "a.txt", 400), (tmp_path / "short.txt").write_text("ab")
    given = {
        "training": {"seq_len": 16},
        "data": {"tokenizer": "bytes", **({} if "sources" in data else {"path": "a.txt"}), **data},
    }
    with pytest.raises(ConfigError, match=message):
        train(make_folder(tmp_path / "model", 1), make_config(given), make_mesh(1), output=tmp_path / "run")
