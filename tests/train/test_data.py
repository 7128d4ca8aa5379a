import numpy as np
import pytest
import torch

from tpconvert.errors import ConfigError
from tpconvert.train.config import make_config
from tpconvert.train.data import (
    IGNORE,
    Batches,
    Causal,
    Position,
    check_fingerprints,
    check_fits,
    count_labels,
    fingerprint,
    make_sequences,
)
from tpconvert.train.text import ByteTokenizer, Tokens


def numbers(n: int, *starts: int) -> Tokens:
    return Tokens(np.arange(n) % 256, np.array([0, *starts, n]), 255)


def batches(count: int, *, dp_rank=0, dp_degree=1, micro=2, accumulation=1, seed=0) -> Batches:
    return Batches(Causal(numbers(count * 4 + 1), 4, True, 0), seed, micro, accumulation, dp_rank, dp_degree)


def take(of: Batches, n: int, position: Position | None = None):
    steps = of.steps(position or Position())
    return [next(steps) for _ in range(n)]


def test_every_token_of_packed_text_predicts_the_next_one():
    sequences = Causal(numbers(9), 4, True, 0)
    assert len(sequences) == 2
    ids, labels, used = sequences(1, 0)
    assert ids.tolist() == [4, 5, 6, 7] and labels.tolist() == [5, 6, 7, 8] and used == 4


def test_an_unpacked_document_is_padded_or_cut_off():
    sequences = Causal(numbers(9, 3), 4, False, 99)
    ids, labels, used = sequences(0, 0)
    assert ids.tolist() == [0, 1, 2, 99] and labels.tolist() == [1, 2, IGNORE, IGNORE] and used == 3
    ids, labels, used = sequences(1, 0)
    assert ids.tolist() == [3, 4, 5, 6] and labels.tolist() == [4, 5, 6, 7] and used == 4


def test_padding_has_no_attention():
    of = Batches(Causal(numbers(9, 3), 4, False, 99), 0, 2, 1, 0, 1)
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
    rows = [sequences(i, 0) for i in range(len(sequences))]
    ids, labels = np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows])
    asked = labels != IGNORE
    assert abs(asked.mean() - 0.15) < 0.01
    assert abs((ids[asked] == ByteTokenizer.mask).mean() - 0.8) < 0.03
    assert abs((ids[asked] == tokens.ids[asked]).mean() - 0.1) < 0.03
    assert (labels[asked] == tokens.ids[asked]).all() and (ids[~asked] == tokens.ids[~asked]).all()


def test_masks_are_the_same_again_and_others_in_another_epoch():
    one, two, other = masked()[0], masked()[0], masked(seed=1)[0]
    assert np.array_equal(one(3, 1)[0], two(3, 1)[0])
    assert not np.array_equal(one(3, 0)[0], one(3, 1)[0])
    assert not np.array_equal(one(3, 0)[0], other(3, 0)[0])


def test_a_masked_sequence_is_enclosed_and_its_special_tokens_are_never_asked_for():
    sequences, _ = masked(0.9, wrap=(251, 252), special=frozenset({251, 252, 7}))
    ids, labels, used = sequences(0, 0)
    assert ids[0] == 251 and ids[-1] == 252 and used == 1000
    assert labels[0] == labels[-1] == IGNORE
    assert not (labels == 7).any()


def test_masked_needs_a_mask_token():
    with pytest.raises(ConfigError, match="the tokenizer has no mask token"):
        masked(mask=None)


def test_labels_are_counted_without_padding():
    of = Batches(Causal(numbers(9, 3), 4, False, 99), 0, 2, 1, 0, 1)
    assert count_labels(take(of, 1)[0][0]) == 6


def test_tp_ranks_with_different_batches_are_found():
    check_fingerprints(["a", "a", "b", "b"], tp=2)
    with pytest.raises(ConfigError, match="Ranks 2 and 3 are tp ranks of one dp rank, but their first batches differ"):
        check_fingerprints(["a", "a", "b", "c"], tp=2)


def test_dp_ranks_with_the_same_batch_are_found():
    with pytest.raises(ConfigError, match="Ranks 0 and 2 are different dp ranks, but their first batches are the same"):
        check_fingerprints(["a", "a", "a", "a"], tp=2)


def test_text_that_the_model_has_no_words_or_places_for_is_an_error_with_the_numbers():
    config = make_config({"data": {"path": "x"}, "training": {"seq_len": 64}})
    check_fits(config, numbers(300), ByteTokenizer(), 256, 64)
    check_fits(config, numbers(300), ByteTokenizer(), None, None)
    with pytest.raises(ConfigError, match=r"The tokens go up to 255, but the model has 255 words \(0 to 254\)"):
        check_fits(config, numbers(300), ByteTokenizer(), 255, None)
    with pytest.raises(ConfigError, match=r"seq_len 64 is more than the 63 positions of the model"):
        check_fits(config, numbers(300), ByteTokenizer(), None, 63)
